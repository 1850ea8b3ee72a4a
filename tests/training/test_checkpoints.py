from __future__ import annotations

import os
from collections.abc import Callable
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
    read_manifest,
    remove_all,
    verify,
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
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        check_complete(checkpoint)
    (checkpoint / "complete.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
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


# -- manifests ---------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    checkpoint = folder / "checkpoint-7"
    (checkpoint / "sharded").mkdir(parents=True)
    for name, content in (("model.safetensors", b"weights"), ("sharded/.metadata", b"x" * 2_500_000), ("empty", b"")):
        (checkpoint / name).write_bytes(content)
    mark_complete(checkpoint, 7, records={"metrics.jsonl": 7})
    return checkpoint


def flip(checkpoint: Path) -> None:
    with (checkpoint / "sharded/.metadata").open("r+b") as file:
        file.seek(2_400_000)
        file.write(b"y")


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 3)


def grow(checkpoint: Path) -> None:
    (checkpoint / "empty").write_bytes(b"0")


def lose(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def swap(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"WEIGHTS")


def test_a_marker_lists_what_was_written(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    manifest = verify(checkpoint)
    assert manifest == read_manifest(checkpoint)
    assert (manifest.step, manifest.records) == (7, {"metrics.jsonl": 7})
    assert manifest.files is not None
    assert {name: size for name, (size, _) in manifest.files.items()} == {
        "empty": 0, "model.safetensors": 7, "sharded/.metadata": 2_500_000,
    }  # fmt: skip
    (checkpoint / "notes.txt").touch()
    assert verify(checkpoint) == manifest, "a file that nobody reads does no harm"


@pytest.mark.parametrize(
    ("damage", "text", "is_seen_without_reading"),
    [
        (lose, "model.safetensors is missing", True),
        (cut, "model.safetensors has 3 bytes and was written with 7", True),
        (grow, "empty has 1 bytes and was written with 0", True),
        (swap, "model.safetensors is not what was written", False),
        (flip, "sharded/.metadata is not what was written", False),
    ],
)
def test_damage_is_found_and_the_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], text: str, is_seen_without_reading: bool
) -> None:
    checkpoint = write(tmp_path)
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=text):
        verify(checkpoint)
    assert (last_complete_checkpoint(tmp_path) is None) is is_seen_without_reading


@pytest.mark.parametrize(
    "marker",
    [
        "",
        "[7]",
        '{"step": 1e400}',
        '{"step": 7.0}',
        '{"step": true}',
        '{"step": -7}',
        '{"step": 8}',
        '{"step": 7, "files": ["a"]}',
        '{"step": 7, "files": {"../../precious": [1, "crc32:0"]}}',
        '{"step": 7, "files": {"/etc/passwd": [1, "crc32:0"]}}',
        '{"step": 7, "files": {"a": 3}}',
        '{"step": 7, "files": {"a": ["3", "crc32:0"]}}',
        '{"step": 7, "records": {"metrics.jsonl": "7"}}',
        '{"step": ' + "7" * 5000 + "}",
        '{"a":' * 3000 + "1" + "}" * 3000,
    ],
)
def test_a_damaged_marker_marks_nothing(tmp_path: Path, marker: str) -> None:
    checkpoint = write(tmp_path)
    (checkpoint / "complete.json").write_text(marker)
    with pytest.raises(
        CheckpointError, match=r"not a complete checkpoint of this trainer: complete.json is missing or dam"
    ):
        verify(checkpoint)
    assert complete_checkpoints(tmp_path) == []


def test_all_checkpoints_of_a_run_go_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-11").touch()
    remove_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-11", "checkpoint-best"]
