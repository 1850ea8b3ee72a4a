"""TensorBoard's record of a run: one, however often the run is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

__all__ = ["TENSORBOARD_DIR", "ContinuedTensorBoard", "continue_tensorboard"]

TENSORBOARD_DIR = "tensorboard"
"""Folder in a run's folder; the environment variable TENSORBOARD_LOGGING_DIR names another."""


class ContinuedTensorBoard(TensorBoardCallback):  # type: ignore[misc, unused-ignore]
    """transformers' callback in a folder that does not change when a run is continued.

    What an interrupted run has written beyond its last checkpoint is repeated by the next one; TensorBoard drops it.
    """

    tb_writer: Any
    logging_dir: str | None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the run's record, or the one that is there."""
        if state.is_world_process_zero and self.tb_writer is None:
            folder = Path(self.logging_dir or Path(args.output_dir) / TENSORBOARD_DIR)
            self.logging_dir = str(folder)
            has_begun = folder.is_dir() and any(folder.iterdir())
            self.tb_writer = self._SummaryWriter(
                log_dir=str(folder), purge_step=state.global_step + 1 if has_begun else None
            )
        super().on_train_begin(args, state, control, **kwargs)


def continue_tensorboard(trainer: Trainer) -> None:
    """Give a trainer that reports to TensorBoard the callback of this module."""
    if trainer.pop_callback(TensorBoardCallback) is not None:
        trainer.add_callback(ContinuedTensorBoard)
