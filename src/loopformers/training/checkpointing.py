"""How a trainer writes and reads checkpoints: each is whole or absent, whatever fails and on whichever rank, shards included."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME as OPTIMIZER_FILE
from transformers.trainer import SCHEDULER_NAME as SCHEDULER_FILE

from loopformers.errors import CheckpointError
from loopformers.training.checkpoints import (
    ASIDE,
    is_write_failure,
    keep_newest,
    last_complete_checkpoint,
    mark_complete,
    publish,
)
from loopformers.training.sharding import SHARDED, gather_weights, is_sharded, load_sharded, save_sharded

__all__ = ["WholeCheckpoints"]


class WholeCheckpoints(Trainer):
    """`transformers.Trainer` whose checkpoints are written aside, and put into their place when every rank's part is written.

    Attributes:
        checkpoint_files: Texts by file name that every checkpoint holds beside the model, such as the recipe.
    """

    optimizer: Any
    lr_scheduler: Any
    checkpoint_files: Mapping[str, str] = {}
    _writes_aside = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for `from_pretrained`; call it on every rank. A checkpoint of a sharded model holds shards instead."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        if _internal_call:
            if self.args.should_save:
                os.makedirs(folder, exist_ok=True)
                self.model.config.save_pretrained(folder)
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(folder)
            return
        weights = gather_weights(self.model)
        if self.args.should_save:
            self._save(folder, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_sharded(os.path.join(output_dir, SHARDED), self.model, self._plain_optimizer())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        shards = Path(resume_from_checkpoint) / SHARDED
        if shards.is_dir():
            load_sharded(shards, self.model)
        elif is_sharded(self.model):
            raise CheckpointError(
                f"{resume_from_checkpoint!r} was written by a run without shards, and a run with shards cannot continue it; "
                "resume with shard=False"
            )
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / SHARDED).is_dir():
            load_sharded(Path(checkpoint) / SHARDED, self.model, self._plain_optimizer())
        elif checkpoint is not None and self.args.world_size > 1 and self.args.device.type == "cpu":
            # Some versions ask for the device cpu:0 here, which torch does not know.
            state = torch.load(os.path.join(checkpoint, OPTIMIZER_FILE), map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(state)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_FILE), weights_only=True))

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(
            self.optimizer, "optimizer", self.optimizer
        )  # out of accelerate's wrapper
        return optimizer

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        folder: str = super()._get_output_dir(*args, **kwargs)
        return os.path.join(folder, ASIDE) if self._writes_aside else folder

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint aside, and put it into its place once every rank's part of it is written.

        Raises:
            CheckpointError: A file could not be written, on any rank.
        """
        name = f"checkpoint-{self.state.global_step}"
        folder = Path(self.args.output_dir)
        failure: Exception | None = None
        with self._aside():
            try:
                super()._save_checkpoint(*args, **kwargs)
                if self.args.should_save:
                    for file, text in self.checkpoint_files.items():
                        (folder / ASIDE / name / file).write_text(text, encoding="utf-8")
                    mark_complete(folder / ASIDE / name, self.state.global_step)
            except Exception as error:
                if not is_write_failure(error):
                    raise
                failure = error
        if self._on_any_rank(failure is not None):
            self._refuse_checkpoint(failure)
        if self.args.should_save:
            publish(folder / ASIDE / name, folder / name)
            keep_newest(folder, self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self._writes_aside = True
        try:
            with warnings.catch_warnings():
                # Two checkpoints within a second make some versions doubt the file system: theirs are ordered by step.
                warnings.filterwarnings("ignore", message="mtime may not be reliable")
                yield
        finally:
            self._writes_aside = False

    def _refuse_checkpoint(self, failure: Exception | None) -> NoReturn:
        shutil.rmtree(Path(self.args.output_dir) / ASIDE, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {self.state.global_step} could not be written to {self.args.output_dir!r} "
            f"({failure or 'on another rank'}); {self._what_remains()}"
        ) from failure

    def _what_remains(self) -> str:
        last = last_complete_checkpoint(self.args.output_dir)
        rest = "no earlier one exists" if last is None else f"{last.name} is whole: free space and resume from it"
        return f"training stopped, and {rest}"

    def _on_any_rank(self, here: bool) -> bool:
        """Whether something is so on any rank, for all of them to do the same: stop, or refuse a checkpoint."""
        if self.args.world_size == 1:
            return here
        return bool(self.accelerator.gather(torch.tensor([here], device=self.args.device)).any())
