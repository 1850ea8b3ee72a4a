"""Which checkpoints of a run are complete.

`transformers.Trainer` writes a checkpoint file by file into its final folder. A marker, written last, tells a whole one
from one that was cut off.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from loopformers.errors import CheckpointError

__all__ = ["check_complete", "last_complete_checkpoint", "mark_complete"]

MARKER = "complete.json"
FOLDER = re.compile(r"checkpoint-(\d+)")


def mark_complete(checkpoint: Path, step: int) -> None:
    """Declare a checkpoint whole; call it after everything else has been written."""
    aside = checkpoint / (MARKER + ".partial")
    aside.write_text(json.dumps({"step": step}), encoding="utf-8")
    os.replace(aside, checkpoint / MARKER)


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


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of the highest step in a run's folder, or None."""
    folder = Path(output_dir)
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if FOLDER.fullmatch(path.name):
            try:
                found.append((check_complete(path), path))
            except CheckpointError:
                continue
    return max(found)[1] if found else None
