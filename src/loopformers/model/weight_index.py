"""The index of weights that lie in several files, checked before a library follows it."""

from __future__ import annotations

import os
from pathlib import Path

from loopformers.errors import CheckpointError
from loopformers.readers import read_json

__all__ = ["WEIGHT_INDEX", "check_weight_index"]

WEIGHT_INDEX = "model.safetensors.index.json"


def check_weight_index(folder: str | os.PathLike[str]) -> None:
    """Check that the index of a folder, where it has one, names files of this folder and no other.

    Raises:
        CheckpointError: It is not readable, maps no tensors to files, or names a file elsewhere or one that is missing.
    """
    index = Path(folder) / WEIGHT_INDEX
    if not index.exists():
        return
    remedy = "copy the index and the files that it names again"
    files = read_json(index, dict, remedy=remedy).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index} has no weight_map, which says where each tensor is; {remedy}")
    for tensor, file in files.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {tensor} in {file!r}, which is no safetensors file of this folder; {remedy}"
            )
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index} places {tensor} in {file}, which is missing; {remedy}")
