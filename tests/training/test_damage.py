"""What a resumed run finds damaged is passed over for the last whole checkpoint, or refused by name; never continued."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopformers.errors import CheckpointError, CheckpointWarning, DataError
from loopformers.training.callbacks import BudgetValidationCallback
from loopformers.training.checkpoints import mark_complete, publish
from loopformers.training.step_log import StepLog
from loopformers.training.trainer import LoopTrainer
from tests.training.test_trainer import At, assert_same_weights, make_dataset, make_model, make_trainer, records

STEPS = {"num_steps": 6, "save_steps": 2}


def trainer(folder: Path, model: Any = None, **options: Any) -> LoopTrainer:
    log = StepLog(folder / "validation.jsonl")
    callback = BudgetValidationCallback(make_dataset(3, seed=1), [3], every_steps=2, log=log)
    callbacks = [callback, *options.pop("callbacks", ())]
    return make_trainer(folder, model, arguments=STEPS, callbacks=callbacks, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of six updates with the checkpoints of the fourth and the sixth."""
    folder, model = tmp_path_factory.mktemp("whole") / "run", make_model()
    trainer(folder, model).train()
    return folder, model


@pytest.fixture
def run(whole: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def flip(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        file = run / "checkpoint-6" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_text(text)

    return damage


def drop_last(name: str, count: int) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:-count]))

    return damage


def tear_last(run: Path) -> None:
    file = run / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 9)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip("model.safetensors"), "model.safetensors is not what was written"),
        (remove("checkpoint-6/optimizer.pt"), "optimizer.pt is missing"),
        (remove("checkpoint-6/scheduler.pt"), "scheduler.pt is missing"),
        (truncate("checkpoint-6/model.safetensors"), "model.safetensors has"),
        (overwrite("checkpoint-6/trainer_state.json", "{}"), "trainer_state.json has 2 bytes"),
        (overwrite("checkpoint-6/complete.json", '{"step": 1e400}'), "complete.json is missing or damaged"),
        (remove("checkpoint-6/complete.json"), "complete.json is missing or damaged"),
        (drop_last("metrics.jsonl", 2), "metrics.jsonl' holds 4 of the 6 records that led to checkpoint-6"),
        (tear_last, "metrics.jsonl' holds 5 of the 6 records"),
        (drop_last("speed.jsonl", 1), "speed.jsonl' holds 5 of the 6 records"),
        (drop_last("validation.jsonl", 1), "validation.jsonl' holds 2 of the 3 records"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_last_whole_one_and_says_so(
    whole: tuple[Path, Any], run: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(run)
    model = make_model(seed=9)
    with pytest.warns(CheckpointWarning) as said:
        trainer(run, model).train(resume_from_checkpoint="auto")
    (warning,) = said
    assert named in str(warning.message)
    assert str(warning.message).endswith("training continues from checkpoint-4, the last complete one before it")
    assert_same_weights(whole[1], model)
    assert records(run) == records(whole[0])
    logs = [StepLog(folder / "validation.jsonl").read() for folder in (run, whole[0])]
    assert logs[0] == logs[1]
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_a_damaged_checkpoint_that_is_asked_for_is_refused_and_the_whole_one_named(run: Path) -> None:
    flip("optimizer.pt")(run)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-6' is damaged: optimizer.pt .*checkpoint-4 in the same folder is complete: resume",
    ):
        trainer(run).train(resume_from_checkpoint=run / "checkpoint-6")
    assert len(records(run)) == 6, "nothing is cut off before a checkpoint is accepted"


@pytest.mark.parametrize("resume", ["auto", True])
def test_a_run_of_which_nothing_is_whole_is_refused_and_left_as_it_is(run: Path, resume: Any) -> None:
    flip("model.safetensors")(run)
    shutil.rmtree(run / "checkpoint-4")
    with pytest.raises(
        CheckpointError, match=r"has no complete checkpoint to continue from: .*model.safetensors is not"
    ):
        trainer(run).train(resume_from_checkpoint=resume)
    flip("model.safetensors")(run)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics.jsonl' holds 0 of the 6 records"):
        trainer(run).train(resume_from_checkpoint=resume)
    assert (run / "checkpoint-6" / "complete.json").exists()


def test_a_record_that_cannot_be_read_is_refused_with_its_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], b"\xff\n", *lines[3:]]))
    with pytest.raises(DataError, match=r"line 3 of .*metrics.jsonl is not a record"):
        trainer(run).train(resume_from_checkpoint="auto")


# -- checkpoints of earlier versions -----------------------------------------------------------------------------


def make_old(run: Path) -> None:
    """Leave one checkpoint, with a marker as earlier versions wrote it."""
    shutil.rmtree(run / "checkpoint-6")
    (run / "checkpoint-4" / "complete.json").write_text(json.dumps({"step": 4}))


def test_a_checkpoint_that_lists_no_files_is_continued_with_a_note(whole: tuple[Path, Any], run: Path) -> None:
    make_old(run)
    model = make_model(seed=9)
    with pytest.warns(CheckpointWarning, match="was written by an earlier version, .* cannot be verified"):
        trainer(run, model).train(resume_from_checkpoint="auto")
    assert_same_weights(whole[1], model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(run).train(resume_from_checkpoint=True)  # the new one lists them


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove("checkpoint-4/model.safetensors"), "the model's weights"),
        (overwrite("checkpoint-4/optimizer.pt", ""), "optimizer.pt or scheduler.pt"),
        (overwrite("checkpoint-4/scheduler.pt", "rubbish"), "optimizer.pt or scheduler.pt"),
        (overwrite("checkpoint-4/rng_state.pth", "rubbish"), "the random states"),
        (remove("checkpoint-4/optimizer.pt"), "optimizer.pt is missing"),
        (remove("checkpoint-4/scheduler.pt"), "scheduler.pt is missing"),
        (overwrite("checkpoint-4/trainer_state.json", "{"), "trainer_state.json is not readable JSON"),
        (lambda run: os.truncate(run / "metrics.jsonl", 0), "holds 0 of the 4 records"),
    ],
)
def test_damage_that_no_list_shows_is_an_error_that_names_the_part(
    run: Path, damage: Callable[[Path], None], named: str
) -> None:
    make_old(run)
    damage(run)
    warnings.simplefilter("ignore", CheckpointWarning)  # pytest restores the filters
    with pytest.raises(CheckpointError, match=named):
        trainer(run, make_model(seed=9)).train(resume_from_checkpoint="auto")


def test_a_whole_checkpoint_of_another_model_is_an_error_of_ours(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint-6' cannot be continued: the model's weights .*do not fit"):
        trainer(run, make_model(hidden_size=36, num_attention_heads=2)).train(resume_from_checkpoint=True)


# -- while a run goes on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (shutil.rmtree, "training stopped: metrics.jsonl, speed.jsonl, validation.jsonl and all records in it"),
        (
            lambda run: (run / "metrics.jsonl").unlink(),
            "training stopped: metrics.jsonl and all records in it are gone",
        ),
        (
            lambda run: run.rename(run.with_name("moved")),
            "was the folder moved",
        ),
    ],
)
def test_a_folder_that_is_lost_during_a_run_stops_it_and_is_not_made_anew(
    tmp_path: Path, lose: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(CheckpointError, match=rf"record of step 4 could not be written .*{said}"):
        trainer(folder, callbacks=[At(4, lambda model: lose(folder))]).train()
    assert not (folder / "metrics.jsonl").exists()


class Killed(BaseException):
    """Stands for the end of the process: nothing here catches it."""


def kill(*args: Any, **kwargs: Any) -> None:
    raise Killed


@pytest.mark.parametrize(
    "point",
    [
        "loopformers.training.step_log.StepLog.to_disk",
        "loopformers.training.checkpointing.mark_complete",
        "loopformers.training.checkpoints._measure",
        "loopformers.training.checkpointing.publish",
        "loopformers.training.checkpointing.keep_newest",
    ],
)
def test_a_run_that_is_killed_while_it_finishes_a_checkpoint_continues_to_the_same_bits(
    whole: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        trainer(folder, callbacks=[At(4, lambda model: patch.setattr(point, kill))]).train()
    model = make_model(seed=9)
    trainer(folder, model).train(resume_from_checkpoint="auto")
    assert_same_weights(whole[1], model)
    assert records(folder) == records(whole[0])
    assert sorted(path.name for path in folder.iterdir() if "json" not in path.name) == ["checkpoint-4", "checkpoint-6"]


def test_records_reach_the_disk_before_the_checkpoint_that_rests_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    to_disk = StepLog.to_disk

    def note(log: StepLog) -> None:
        order.append(log.path.name)
        to_disk(log)

    def note_publish(aside: Path, final: Path) -> None:
        order.append(final.name)
        publish(aside, final)

    monkeypatch.setattr(StepLog, "to_disk", note)
    monkeypatch.setattr("loopformers.training.checkpointing.publish", note_publish)
    trainer(tmp_path).train()
    assert order[:4] == ["metrics.jsonl", "speed.jsonl", "validation.jsonl", "checkpoint-2"]


def test_the_marker_counts_the_records_of_a_run_that_was_resumed(run: Path) -> None:
    shutil.rmtree(run / "checkpoint-6")
    trainer(run).train(resume_from_checkpoint=True)
    marker = json.loads((run / "checkpoint-6" / "complete.json").read_text())
    assert marker["records"] == {"metrics.jsonl": 6, "speed.jsonl": 6, "validation.jsonl": 3}
    mark_complete(run / "checkpoint-6", 6, records={"metrics.jsonl": 7})
    with pytest.warns(CheckpointWarning, match="holds 6 of the 7 records"):
        trainer(run).train(resume_from_checkpoint=True)
