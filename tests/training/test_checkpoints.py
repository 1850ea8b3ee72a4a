from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.errors import CheckpointError
from loopformers.training.checkpoints import check_complete, last_complete_checkpoint, mark_complete


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
