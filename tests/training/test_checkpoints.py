from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopformers.errors import CheckpointError
from loopformers.training.checkpoints import (
    ASIDE,
    check_complete,
    complete_checkpoints,
    is_write_failure,
    keep_newest,
    last_complete_checkpoint,
    mark_complete,
    publish,
)


def make(folder: Path, step: int, *, complete: bool) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    if complete:
        mark_complete(checkpoint, step)
    return checkpoint


def test_the_last_complete_checkpoint_is_found_by_number(tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    assert last_complete_checkpoint(tmp_path) is None
    make(tmp_path, 9, complete=True)
    expected = make(tmp_path, 10, complete=True)
    make(tmp_path, 11, complete=False)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path) == expected


def test_an_incomplete_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 3, complete=False)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        check_complete(checkpoint)
    (checkpoint / "complete.json").write_text("{")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        check_complete(checkpoint)
    mark_complete(checkpoint, 3)
    assert check_complete(checkpoint) == 3


def test_a_published_checkpoint_replaces_an_older_one_of_its_step(tmp_path: Path) -> None:
    for folder, text in ((tmp_path / "checkpoint-3", "old"), (tmp_path / ASIDE / "checkpoint-3", "new")):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(text)
        mark_complete(folder, 3)
    publish(tmp_path / ASIDE / "checkpoint-3", tmp_path / "checkpoint-3")
    assert (tmp_path / "checkpoint-3" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_the_newest_complete_checkpoints_stay_and_what_was_cut_off_goes(tmp_path: Path) -> None:
    for step in (2, 10, 9, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        mark_complete(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "other").mkdir()
    keep_newest(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-10", "checkpoint-2", "checkpoint-4", "checkpoint-9", "other",
    ]  # fmt: skip
    keep_newest(tmp_path, 2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9", "other"]


def test_write_failures_of_all_writers_are_known(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as full, open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    assert is_write_failure(full.value)
    with pytest.raises(RuntimeError) as torchs:
        torch.save({"x": torch.ones(9999)}, "/dev/full")
    assert is_write_failure(torchs.value)
    assert not is_write_failure(RuntimeError("shapes differ"))
