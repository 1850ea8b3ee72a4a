"""Looks into a checkpoint's weights: what its files say of each tensor, and whether those that were loaded are finite."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from loopformers.errors import CheckpointError
from loopformers.readers import read_json

__all__ = ["StoredTensor", "check_file_name", "check_finite", "check_floating", "check_weight_index", "stored_tensors"]

FLOATING = ("F", "BF")
"""How safetensors' names of floating point types begin."""

INDEX_REMEDY = "copy the index and the files that it names again"

WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of from_pretrained that say where files lie."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        dtype: As safetensors names it, such as F32.
        shape: Sizes.
        file: The file that holds it, or the tensor itself where a state dict was given.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path | Tensor

    def rows(self, name: str, num_rows: int) -> Tensor:
        """Return the first rows of it."""
        if isinstance(self.file, Tensor):
            return self.file[:num_rows]
        with safe_open(self.file, "pt") as opened:
            return opened.get_slice(name)[:num_rows]


def stored_tensors(
    source: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None, variant: str | None, **where: Any
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, from the headers of its files; none where it has no files.

    Args:
        source: Folder or hub name.
        state_dict: Tensors that stand in for the files.
        variant: Part of the file names, such as fp16.
        where: Arguments of from_pretrained that say where files lie.

    Raises:
        CheckpointError: The index of a sharded checkpoint is not one.
        SafetensorError: A file is truncated or is not a safetensors file.
    """
    if state_dict is not None:
        return {
            name: StoredTensor(_type_name(tensor), tuple(tensor.shape), tensor) for name, tensor in state_dict.items()
        }
    tensors: dict[str, StoredTensor] = {}
    for file in _files(source, variant, {name: where[name] for name in WHERE if name in where}):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                piece = opened.get_slice(name)
                tensors[name] = StoredTensor(piece.get_dtype(), tuple(piece.get_shape()), file)
    return tensors


def _type_name(tensor: Tensor) -> str:
    return "F" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def check_floating(source: object, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError unless every tensor is of floating point numbers."""
    for name, tensor in sorted(tensors.items()):
        if not tensor.dtype.startswith(FLOATING):
            raise CheckpointError(
                f"{source} holds {name} as {tensor.dtype}, and weights are floating point numbers; the file is damaged, or of "
                "quantised weights whose configuration lacks quantization_config"
            )


def check_finite(source: object, model: nn.Module) -> None:
    """Raise CheckpointError where a weight is infinite or not a number, in one pass over the weights."""
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if weight.is_meta or not weight.is_floating_point() or type(weight.data) is not torch.Tensor:
                continue  # quantised weights are tensors of types of their own, which hold whole numbers
            # A sum is not finite if a term is not, and is the cheapest pass; that of finite terms may overflow.
            total = weight.sum(dtype=torch.float32) if weight.element_size() > 1 else weight.float().sum()
            if not bool(total.isfinite()) and not bool(weight.float().isfinite().all()):
                bad = int((~weight.float().isfinite()).sum())
                raise CheckpointError(
                    f"{source} holds {bad:,} of {weight.numel():,} numbers of {name} that are infinite or not a number; the file "
                    "is damaged, or its training had diverged: take an earlier checkpoint"
                )


def check_weight_index(folder: str | os.PathLike[str]) -> None:
    """Check the index of a folder's weights, where it has one: it names files of this folder, and they are there.

    Raises:
        CheckpointError: It is not readable, maps no tensors to files, or names a file elsewhere or one that is missing.
    """
    index = Path(folder) / SAFE_WEIGHTS_INDEX_NAME
    for shard in _shards(index) if index.exists() else ():
        if not shard.is_file():
            raise CheckpointError(f"{index} names {shard.name}, which is missing; {INDEX_REMEDY}")


def check_file_name(variant: Any) -> None:
    """Raise CheckpointError unless a variant is a plain part of a file name."""
    if variant is not None and (not isinstance(variant, str) or os.sep in variant or not variant):
        raise CheckpointError(f"variant={variant!r} must be a part of a file name, such as 'fp16'")


def _files(source: str | os.PathLike[str], variant: str | None, where: dict[str, Any]) -> list[Path]:
    """Return the files of weights that transformers would open."""

    def find(name: str) -> str | None:
        stem, dot, rest = name.partition(".")
        name = name if variant is None else f"{stem}.{variant}{dot}{rest}"
        try:
            return cached_file(
                source,
                name,
                **where,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:  # transformers' loading says what is missing
            return None

    if (single := find(SAFE_WEIGHTS_NAME)) is not None:
        return [Path(single)]
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return []
    return [shard for shard in _shards(Path(index)) if shard.exists()]


def _shards(index: Path) -> list[Path]:
    """Return the files that the index of a sharded checkpoint names; none lies outside its folder."""
    files: Any = read_json(index, remedy=INDEX_REMEDY).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index} has no weight_map, which says where each tensor is; {INDEX_REMEDY}")
    for tensor, file in files.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {tensor} in {file!r}, which is not a safetensors file of this folder; {INDEX_REMEDY}"
            )
    return [index.parent / file for file in sorted(set(files.values()))]
