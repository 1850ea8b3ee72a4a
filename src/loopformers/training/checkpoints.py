"""Checkpoints of a run that are whole or not there: written aside, then renamed.

`transformers.Trainer` writes a checkpoint file by file. Here it does so in a folder beside the run's checkpoints; when every
rank is done and every byte is on the disk, the folder is renamed into its place. A marker, written last, tells a whole
checkpoint from one that somebody else cut off.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError

from loopformers.errors import CheckpointError, ConfigError
from loopformers.files import write_whole

__all__ = [
    "ASIDE",
    "check_complete",
    "check_writable",
    "complete_checkpoints",
    "is_write_failure",
    "keep_newest",
    "last_complete_checkpoint",
    "mark_complete",
    "publish",
]

ASIDE = ".partial"
"""Folder in a run's folder where a checkpoint stands while it is written, and where it goes to be deleted."""

MARKER = "complete.json"
FOLDER = re.compile(r"checkpoint-(\d+)")


def mark_complete(checkpoint: Path, step: int) -> None:
    """Declare a checkpoint whole; call it after everything else has been written."""
    write_whole(checkpoint / MARKER, json.dumps({"step": step}))


def check_complete(checkpoint: str | os.PathLike[str]) -> int:
    """Return the step of a complete checkpoint.

    Raises:
        CheckpointError: The folder does not exist or lacks the marker.
    """
    marker = Path(checkpoint) / MARKER
    try:
        return int(json.loads(marker.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} is no complete checkpoint of this trainer ({MARKER} is missing or damaged); "
            "resume from an earlier one"
        ) from error


def complete_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a run's folder, by rising step."""
    folder = Path(output_dir)
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if FOLDER.fullmatch(path.name):
            try:
                found.append((check_complete(path), path))
            except CheckpointError:
                continue
    return [path for _, path in sorted(found)]


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of the highest step in a run's folder, or None."""
    found = complete_checkpoints(output_dir)
    return found[-1] if found else None


def publish(aside: Path, final: Path) -> None:
    """Put a written checkpoint into its place, whole or not at all; an older one of the same step makes way."""
    for path in (*aside.rglob("*"), aside):
        _to_disk(path)
    if final.exists():
        os.replace(final, aside.with_name(f"old-{uuid.uuid4().hex}"))
    os.replace(aside, final)
    _to_disk(final.parent)
    shutil.rmtree(final.parent / ASIDE, ignore_errors=True)


def keep_newest(output_dir: str | os.PathLike[str], count: int | None) -> None:
    """Delete all complete checkpoints but the newest `count`, and whatever was cut off. None: keep all.

    A checkpoint is moved aside before its files go, so that none is ever found half deleted.
    """
    folder = Path(output_dir)
    aside = folder / ASIDE
    whole = complete_checkpoints(folder)
    cut_off = [path for path in folder.iterdir() if FOLDER.fullmatch(path.name) and path not in whole]
    for path in [*(whole[:-count] if count else []), *cut_off]:
        aside.mkdir(exist_ok=True)
        os.replace(path, aside / f"old-{uuid.uuid4().hex}")
    shutil.rmtree(aside, ignore_errors=True)


def check_writable(output_dir: str | os.PathLike[str]) -> None:
    """Make a run's folder, and write and remove a file in it.

    Raises:
        ConfigError: That fails: no permission, no space, a file in the way.
    """
    folder = Path(output_dir)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output_dir={os.fspath(output_dir)!r} cannot be written ({error.strerror or error}); free space, or give another "
            "folder"
        ) from error


def is_write_failure(error: BaseException) -> bool:
    """Whether an error says that a file could not be written; safetensors and torch have words of their own for it."""
    torchs = isinstance(error, RuntimeError) and ("inline_container" in str(error) or "StreamWriter" in str(error))
    return torchs or isinstance(error, OSError | SafetensorError)


def _to_disk(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
