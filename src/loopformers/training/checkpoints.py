"""Checkpoints of a run that are whole or not there: written aside, then renamed, and verified before they are continued.

`transformers.Trainer` writes a checkpoint file by file. Here it does so in a folder beside the run's checkpoints; when every
rank is done and every byte is on the disk, the folder is renamed into its place. A marker, written last, lists the files with
their sizes and digests, and the number of records that the run's logs had.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from loopformers.errors import CheckpointError, ConfigError
from loopformers.files import write_whole, writing
from loopformers.folders import ASIDE
from loopformers.readers import read_json

__all__ = [
    "ASIDE",
    "Manifest",
    "check_complete",
    "check_writable",
    "checkpoint_folders",
    "complete_checkpoints",
    "is_write_failure",
    "keep_newest",
    "last_complete_checkpoint",
    "mark_complete",
    "publish",
    "read_manifest",
    "remove_all",
    "verify",
]

MARKER = "complete.json"
FOLDER = re.compile(r"checkpoint-(\d{1,18})")

MAX_STEP = 10**18

BLOCK = 2**18
"""Bytes that are read at a time for a digest: few enough to stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the marker of a checkpoint says."""

    step: int
    """Updates done."""
    files: Mapping[str, tuple[int, str]] | None = None
    """Size in bytes and digest of each file, by its path in the checkpoint; None in checkpoints of earlier versions."""
    records: Mapping[str, int] = field(default_factory=dict)
    """Number of records that each log of the run had, by the log's file name."""


def mark_complete(checkpoint: Path, step: int, *, records: Mapping[str, int] | None = None) -> None:
    """Declare a checkpoint whole; call it after everything else has been written, by every rank.

    Args:
        checkpoint: Its folder.
        step: Updates done.
        records: See `Manifest`.

    Raises:
        WriteError: A file cannot be read back, or the marker cannot be written.
    """
    with writing(checkpoint):
        files = {path.relative_to(checkpoint).as_posix(): _measure(path) for path in _files(checkpoint)}
    manifest = Manifest(step=step, files=files, records=dict(records or {}))
    write_whole(checkpoint / MARKER, json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")


def read_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Return what a checkpoint's marker says.

    Raises:
        CheckpointError: The folder does not exist, or lacks the marker, or the marker is damaged or of another checkpoint.
    """
    folder = Path(checkpoint)
    try:
        content: dict[str, Any] = read_json(folder / MARKER, remedy="every complete checkpoint has one")
        manifest = _parse(content)
        named = FOLDER.fullmatch(folder.name)
        if named is not None and int(named[1]) != manifest.step:
            raise ValueError(f"it says step {manifest.step}")
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} is not a complete checkpoint of this trainer: {MARKER} is missing or damaged ({error})"
        ) from error
    return manifest


def check_complete(checkpoint: str | os.PathLike[str]) -> int:
    """Return the step of a checkpoint whose files are all there, in the size that they were written with.

    This looks at no file's content; `verify` does.

    Raises:
        CheckpointError: See `read_manifest`; or a file is missing or has another size.
    """
    return _complete_manifest(checkpoint).step


def _complete_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    manifest = read_manifest(checkpoint)
    for name, (size, _) in (manifest.files or {}).items():
        path = Path(checkpoint) / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{os.fspath(checkpoint)!r} is damaged: {name} is missing") from error
        if found != size:
            raise CheckpointError(
                f"{os.fspath(checkpoint)!r} is damaged: {name} has {found:,} bytes and was written with {size:,}"
            )
    return manifest


def verify(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Return what a checkpoint's marker says, after comparing every file with it.

    Of a checkpoint of an earlier version, whose marker lists no files, only the presence of its parts is known.

    Raises:
        CheckpointError: See `check_complete`; or a file's content has changed, or cannot be read.
    """
    manifest = _complete_manifest(checkpoint)
    folder = Path(checkpoint)
    for name, expected in (manifest.files or {}).items():
        try:
            found = _measure(folder / name)
        except OSError as error:
            raise CheckpointError(f"{str(folder / name)!r} cannot be read ({error.strerror or error})") from error
        if found != expected:
            raise CheckpointError(
                f"{os.fspath(checkpoint)!r} is damaged: {name} is not what was written (its digest differs)"
            )
    if manifest.files is None:
        _check_parts(folder, manifest.step)
    return manifest


def checkpoint_folders(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return all that is named like a checkpoint in a run's folder, by rising step, whole or not."""
    folder = Path(output_dir)
    found = [(int(named[1]), path) for path in _entries(folder) if (named := FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def complete_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a run's folder, by rising step; see `check_complete`."""
    return [path for path in checkpoint_folders(output_dir) if _is_complete(path)]


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of the highest step in a run's folder, or None."""
    return next((path for path in reversed(checkpoint_folders(output_dir)) if _is_complete(path)), None)


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
    folders = checkpoint_folders(output_dir)
    whole = [path for path in folders if _is_complete(path)]
    cut_off = [path for path in folders if path not in whole]
    _remove(Path(output_dir), [*(whole[:-count] if count else []), *cut_off])


def remove_all(output_dir: str | os.PathLike[str]) -> None:
    """Delete all checkpoints of a run that needs none any more; a crash leaves each whole or absent."""
    _remove(Path(output_dir), checkpoint_folders(output_dir))


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


# -- parts -------------------------------------------------------------------------------------------------------


def _parse(content: Mapping[str, Any]) -> Manifest:
    step, files, records = content.get("step"), content.get("files"), content.get("records", {})
    if not _is_count(step):
        raise ValueError("its step is not a number of updates")
    if files is not None:
        if not isinstance(files, dict):
            raise ValueError("its list of files is not a list of files")
        for name, entry in files.items():
            inside = not os.path.isabs(name) and ".." not in Path(name).parts
            if not (inside and isinstance(entry, list) and len(entry) == 2 and _is_count(entry[0])):
                raise ValueError(f"its entry of {name!r} is not a file's size and digest")
        files = {name: (size, str(digest)) for name, (size, digest) in files.items()}
    if not isinstance(records, dict) or not all(map(_is_count, records.values())):
        raise ValueError("its record counts are not numbers")
    return Manifest(step=step, files=files, records=records)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP


def _check_parts(folder: Path, step: int) -> None:
    """Check what a checkpoint of an earlier version must hold; transformers would go on without an optimiser's state."""
    weights = ["sharded"] if (folder / "sharded").is_dir() else ["optimizer.pt"]
    for name in (*weights, "scheduler.pt", "trainer_state.json"):
        if not (folder / name).exists():
            raise CheckpointError(f"{str(folder)!r} is damaged: {name} is missing")
    said: dict[str, Any] = read_json(folder / "trainer_state.json", remedy="a checkpoint needs it")
    if said.get("global_step") != step:
        raise CheckpointError(f"{str(folder)!r} is damaged: trainer_state.json is not of step {step}")


def _is_complete(checkpoint: Path) -> bool:
    try:
        check_complete(checkpoint)
    except CheckpointError:
        return False
    return True


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER)


def _measure(path: Path) -> tuple[int, str]:
    """Return a file's size and digest. CRC-32 finds every damaged block at the speed of memory, and forgery is no concern."""
    size = digest = 0
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            size += count
            digest = zlib.crc32(block[:count], digest)
    return size, f"crc32:{digest:08x}"


def _remove(folder: Path, checkpoints: list[Path]) -> None:
    aside = folder / ASIDE
    for path in checkpoints:
        aside.mkdir(exist_ok=True)
        os.replace(path, aside / f"old-{uuid.uuid4().hex}")
    shutil.rmtree(aside, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
