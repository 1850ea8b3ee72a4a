"""What is checked of saved weights: the index of several files before a library follows it, and the numbers after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from loopformers.errors import CheckpointError, NonFiniteError
from loopformers.readers import read_json

__all__ = ["WEIGHT_INDEX", "check_weight_index", "check_weights_finite"]

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


def check_weights_finite(model: Any, name: str) -> None:
    """Check that every weight is a number. One that is not may go unseen: fused attention makes zeros of NaN queries.

    Args:
        model: A model whose weights are loaded.
        name: What errors call it.

    Raises:
        NonFiniteError: One is not; names the tensor.
    """
    for key, tensor in model.named_parameters():
        if tensor.is_floating_point() and not tensor.is_meta and not tensor.isfinite().all():
            raise NonFiniteError(
                f"{name} holds weights that are not finite ({key}), and everything that it computes would be NaN; the file is "
                "damaged, or training diverged: give an earlier checkpoint"
            )
