"""How a trainer writes and reads checkpoints: each is whole or absent, whatever fails and on whichever rank, shards included."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME as OPTIMIZER_FILE
from transformers.trainer import SCHEDULER_NAME as SCHEDULER_FILE

from loopformers.errors import CheckpointError, CheckpointWarning, ConfigError, LoopformersError, first_line
from loopformers.files import write_whole
from loopformers.training.checkpoints import (
    ASIDE,
    Manifest,
    checkpoint_folders,
    is_write_failure,
    keep_newest,
    last_complete_checkpoint,
    mark_complete,
    publish,
    verify,
)
from loopformers.training.sharding import SHARDED, gather_weights, is_sharded, load_sharded, save_sharded
from loopformers.training.step_log import METRICS_FILE, StepLog

__all__ = ["WholeCheckpoints"]


class WholeCheckpoints(Trainer):
    """`transformers.Trainer` whose checkpoints are written aside, and put into their place when every rank's part is written.

    Attributes:
        checkpoint_files: Texts by file name that every checkpoint holds beside the model, such as the recipe.
        logs: The run's logs; a checkpoint counts their records, and is continued only where they still are there.
    """

    optimizer: Any
    lr_scheduler: Any
    checkpoint_files: Mapping[str, str] = {}
    logs: Sequence[StepLog] = ()
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
            with _reading(resume_from_checkpoint, "the model's weights"):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / SHARDED).is_dir():
            load_sharded(Path(checkpoint) / SHARDED, self.model, self._plain_optimizer())
        elif checkpoint is not None and self.args.world_size > 1 and self.args.device.type == "cpu":
            # Some versions ask for the device cpu:0 here, which torch does not know.
            with _reading(checkpoint, OPTIMIZER_FILE):
                state = torch.load(os.path.join(checkpoint, OPTIMIZER_FILE), map_location="cpu", weights_only=True)
                self.optimizer.load_state_dict(state)
        else:
            with _reading(checkpoint, f"{OPTIMIZER_FILE} or {SCHEDULER_FILE}"):
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        with _reading(checkpoint, SCHEDULER_FILE):
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_FILE), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _reading(checkpoint, "the random states (rng_state)"):
            super()._load_rng_state(checkpoint)

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
        step = self.state.global_step
        folder = Path(self.args.output_dir)
        aside, final = folder / ASIDE / f"checkpoint-{step}", folder / f"checkpoint-{step}"
        save = super()._save_checkpoint

        def write() -> None:
            if self.args.should_save:
                for log in self.logs:  # a checkpoint must never be ahead of the records that lead to it
                    log.to_disk()
            with self._aside():
                save(*args, **kwargs)

        def finish() -> None:
            if self.args.should_save:
                for file, text in self.checkpoint_files.items():
                    write_whole(aside / file, text)
                mark_complete(aside, step, records={log.path.name: log.num_records for log in self.logs})
                publish(aside, final)
                keep_newest(folder, self.args.save_total_limit)

        self._on_every_rank(write)
        self._on_every_rank(finish)
        self.accelerator.wait_for_everyone()

    def _on_every_rank(self, do: Callable[[], None]) -> None:
        """Do a part of a checkpoint; where it fails on one rank, all refuse the checkpoint."""
        failure: Exception | None = None
        try:
            do()
        except Exception as error:
            if not is_write_failure(error):
                raise
            failure = error
        if self._on_any_rank(failure is not None):
            self._refuse_checkpoint(failure)

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
        lost = [log.path.name for log in self.logs if log.num_records and not log.path.exists()]
        if lost:
            return (
                f"training stopped: {', '.join(lost)} and all records in it are gone; was the folder "
                "moved or removed? Put it back, or start the run again in another folder"
            )
        last = last_complete_checkpoint(self.args.output_dir)
        rest = (
            "no earlier one exists" if last is None else f"{last.name} is complete: free some space and resume from it"
        )
        return f"training stopped, and {rest}"

    def _on_any_rank(self, here: bool) -> bool:
        """Whether something is so on any rank, for all of them to do the same: stop, or refuse a checkpoint."""
        if self.args.world_size == 1:
            return here
        return bool(self.accelerator.gather(torch.tensor([here], device=self.args.device)).any())

    # -- choosing what to continue from ------------------------------------------------------------------------

    def _resolve(self, resume: str | os.PathLike[str] | bool | None) -> Path | None:
        """Return the checkpoint to continue from, verified; None: start anew. The main process decides for all.

        Raises:
            CheckpointError: There is none, it is damaged, or the run's records up to it are not all there.
            ConfigError: A fresh start in a folder that holds a run.
        """
        if self.args.world_size == 1:
            return self._choose(resume)
        decision: list[Any] = [None, None]
        if self.is_world_process_zero():
            try:
                decision[0] = self._choose(resume)
            except LoopformersError as error:
                decision[1] = error
        chosen, refusal = broadcast_object_list(decision)
        if refusal is not None:
            raise refusal
        return chosen

    def _choose(self, resume: str | os.PathLike[str] | bool | None) -> Path | None:
        folder = self.args.output_dir
        if resume is None or resume is False:
            if last_complete_checkpoint(folder) is not None or any(log.read() for log in self.logs):
                raise ConfigError(
                    f"output_dir={folder!r} already contains a run; continue it with resume_from_checkpoint=True, or "
                    "choose another folder"
                )
            return None
        if resume is not True and resume != "auto":
            named = Path(resume)
            try:
                self._check(named)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {_alternative(named)}") from error
            return named
        damages: list[str] = []
        for checkpoint in reversed(checkpoint_folders(folder)):
            try:
                self._check(checkpoint)
            except CheckpointError as error:
                if any(checkpoint.iterdir()):  # else somebody else began it, and nothing is lost
                    damages.append(str(error))
                continue
            if damages:
                _warn(f"{damages[0]}; training continues from {checkpoint.name}, the last complete one before it")
            return checkpoint
        if damages:
            raise CheckpointError(
                f"output_dir={folder!r} has no complete checkpoint to continue from: {damages[0]}; restore it from a copy, or "
                "start the run again in another folder"
            )
        if resume is True:
            raise CheckpointError(
                f"output_dir={folder!r} has no complete checkpoint to continue from; start the run again"
            )
        return None

    def _check(self, checkpoint: Path) -> None:
        """Verify a checkpoint, and that the records which lead to it are there."""
        manifest = verify(checkpoint)
        if checkpoint.parent.resolve() == Path(self.args.output_dir).resolve():
            for log in self.logs:
                _check_records(checkpoint, manifest, log)
        if manifest.files is None:
            _warn(
                f"{str(checkpoint)!r} was written by an earlier version, which listed no files: it cannot be verified, and is "
                "continued as it is"
            )


def _alternative(refused: Path) -> str:
    """Say what to do in the place of continuing a checkpoint that is refused."""
    for checkpoint in reversed(checkpoint_folders(refused.parent)):
        with contextlib.suppress(CheckpointError):
            if checkpoint.name != refused.name:
                verify(checkpoint)
                return f"{checkpoint.name} in the same folder is complete: resume from that one"
    return "restore it from a copy"


def _warn(text: str) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=2)


def _check_records(checkpoint: Path, manifest: Manifest, log: StepLog) -> None:
    """Raise CheckpointError unless a log has each record that it had when a checkpoint was written."""
    expected = manifest.records.get(log.path.name)
    if expected is None:
        if manifest.files is not None or log.path.name != METRICS_FILE:
            return  # a log that this run did not have
        expected = manifest.step
    steps = [record["step"] for record in log.read() if record["step"] <= manifest.step]
    if len(steps) != expected or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise CheckpointError(
            f"{str(log.path)!r} holds {len(steps):,} of the {expected:,} records that led to {checkpoint.name}, "
            "or not in their order"
        )


@contextlib.contextmanager
def _reading(checkpoint: str | os.PathLike[str] | None, part: str) -> Iterator[None]:
    """Turn whatever the libraries raise over a damaged or foreign part of a checkpoint into a CheckpointError."""
    try:
        yield
    except (LoopformersError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # unpickling raises anything
        if checkpoint is None:
            raise
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} cannot be continued: {part} cannot be read or do not fit this run "
            f"({first_line(error)}); restore the checkpoint, or resume from an earlier one"
        ) from error
