"""Kill -9 at any moment, resume, and the weights are those of a run that nothing happened to (peer-faults 12)."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException
from torch.multiprocessing.spawn import start_processes
from transformers import Trainer, TrainerCallback

from loopformers.errors import CheckpointError, ConfigError
from loopformers.laws import PoissonLogNormal
from loopformers.testing.distributed import run_distributed
from loopformers.training.checkpoints import complete_checkpoints
from loopformers.training.lr_schedules import WarmupCosine
from loopformers.training.step_log import StepLog
from loopformers.training.trainer import LoopTrainer, training_arguments
from tests.training.test_trainer import make_dataset, make_model

multiprocessing.set_forkserver_preload(["tests.training.test_trainer"])

STEPS, SAVE_EVERY, BATCH = 13, 2, 4


class KillAt(TrainerCallback):
    """Kills this process before the update of a step, in the middle of it, or after it."""

    def __init__(self, step: int, event: str) -> None:
        self.step, self.event = step, event

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._kill("begin", state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._kill("update", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._kill("end", state.global_step)

    def _kill(self, event: str, step: int) -> None:
        if event == self.event and step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, kill: tuple[int, str] | None, preset: str, sharded: bool = False) -> None:
    """Train, or continue, a tiny model that shows where its weights end."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    callbacks: list[TrainerCallback] = []
    if kill is not None and kill[1] == "checkpoint":
        save = Trainer._save_rng_state

        def killed(trainer: Any, output_dir: str) -> None:
            save(trainer, output_dir)
            if trainer.state.global_step == kill[0] and trainer.args.should_save:
                os.kill(
                    os.getpid(), signal.SIGKILL
                )  # weights, optimiser and random states are written, the rest is not

        Trainer._save_rng_state = killed  # this process ends with the run
    elif kill is not None:
        callbacks.append(KillAt(*kill))
    model = make_model(preset, seed=9 if complete_checkpoints(folder) else 0)
    options = {"fsdp": True} if sharded else {}
    arguments = training_arguments(
        folder, num_steps=STEPS, batch_size=BATCH // ranks // 2, seed=3, save_steps=SAVE_EVERY,
        gradient_accumulation_steps=2, **options,
    )  # fmt: skip
    law = PoissonLogNormal(3, max_loops=6) if preset == "flt" else None
    trainer = LoopTrainer(
        model, arguments, make_dataset(22), law=law, lr_schedule=WarmupCosine(warmup_steps=4), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint="auto")


def alone(rank: int, *args: Any) -> None:
    torch.set_num_threads(1)
    train(*args)


def on_ranks(rank: int, *args: Any) -> None:
    train(*args)


def run(ranks: int, folder: Path, kill: tuple[int, str] | None, *args: Any) -> None:
    if ranks == 1:
        start_processes(alone, (str(folder), kill, *args), nprocs=1, start_method="forkserver")
    else:
        run_distributed(
            on_ranks, str(folder), kill, *args, world_size=ranks, folder=folder.parent, start_method="forkserver"
        )


def weights(folder: Path) -> bytes:
    return (folder / f"checkpoint-{STEPS}" / "model.safetensors").read_bytes()


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "preset"), [(1, "flt"), (1, "elastic-flt"), (2, "elastic-flt")])
def test_a_run_that_is_killed_ends_with_the_weights_of_one_that_is_not(tmp_path: Path, ranks: int, preset: str) -> None:
    rng = random.Random(f"{ranks}{preset}")
    run(ranks, tmp_path / "whole", None, preset)
    first = rng.randint(3, 6)
    in_checkpoint = rng.randrange(first + first % 2 + SAVE_EVERY, STEPS, SAVE_EVERY)
    for kill in ((first, rng.choice(["begin", "update", "end"])), (in_checkpoint, "checkpoint")):
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            run(ranks, tmp_path / "cut", kill, preset)
        last = (kill[0] - 1) // SAVE_EVERY * SAVE_EVERY
        assert [path.name for path in complete_checkpoints(tmp_path / "cut")][-1] == f"checkpoint-{last}"
        assert len(complete_checkpoints(tmp_path / "cut")) <= 2
    assert list((tmp_path / "cut" / ".partial").iterdir())  # the checkpoint that was being written
    run(ranks, tmp_path / "cut", None, preset)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    records = [StepLog(tmp_path / name / "metrics.jsonl").read() for name in ("cut", "whole")]
    assert records[0] == records[1]
    assert [record["step"] for record in records[0]] == list(range(1, STEPS + 1))
    assert [path.name for path in complete_checkpoints(tmp_path / "cut")] == ["checkpoint-12", "checkpoint-13"]
    assert not (tmp_path / "cut" / ".partial").exists()


class FullDisk(TrainerCallback):
    """From a step on, no file may grow beyond so many bytes."""

    def __init__(self, step: int, num_bytes: int) -> None:
        self.step, self.num_bytes = step, num_bytes

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            limit_files(self.num_bytes)


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(("num_bytes", "what"), [(1, "record of step 5"), (16_000, "checkpoint of step 6")])
def test_a_full_disk_stops_training_and_loses_nothing(tmp_path: Path, num_bytes: int, what: str) -> None:
    def trainer(name: str, seed: int = 0, **options: Any) -> LoopTrainer:
        arguments = training_arguments(tmp_path / name, num_steps=8, batch_size=3, seed=3, save_steps=3)
        return LoopTrainer(make_model(seed=seed), arguments, make_dataset(), **options)

    trainer("whole").train()
    soft_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        with pytest.raises(CheckpointError, match=f"{what}.*could not be written.*checkpoint-3 is complete"):
            trainer("cut", callbacks=[FullDisk(5, num_bytes)]).train()
    finally:
        limit_files(soft_limit)
    assert not (tmp_path / "cut" / ".partial").exists()
    trainer("cut", seed=9).train(resume_from_checkpoint=True)
    last = [(tmp_path / name / "checkpoint-8" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert last[0] == last[1]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be written \("):
            LoopTrainer(make_model(), training_arguments(folder, num_steps=1, batch_size=3), make_dataset())
