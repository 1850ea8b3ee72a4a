"""The files of official checkpoints: parameters by name, and what they say of their constructor's fields.

Nothing of a file is executed, and no file takes more memory than it has bytes. See `loopformers.model.convert`.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from loopformers.errors import CheckpointError, first_line
from loopformers.readers import read_json

__all__ = ["LOOPFORMER_SYSTEMS", "read_official"]

LOOPFORMER_SYSTEMS = {"base": "base", "base_loop": "base-loop", "tmlt": "tmlt", "loopformer": "loopformer"}
LOOPFORMER_FIELDS = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "intermediate_dim", "loops")
"""Fields of the LoopFormer family's constructors that shape a model."""


def read_official(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read an official checkpoint: its parameters, and what it says of its constructor's fields.

    Args:
        path: FLT's `model_000123.pt`, or the folder that holds it and `meta_000123.json` (the newest is taken);
            LoopFormer's `ckpt.pt`; a safetensors file, or a folder that holds one or several. Optimiser files are left
            alone.

    Raises:
        CheckpointError: Missing, truncated or foreign file, or one that would execute code.
    """
    files = _find_weights(Path(path))
    payload: dict[str, Any] = {}
    for file in files:
        payload |= _read_weights(file)
    case: dict[str, Any] = {}
    if "model" in payload and isinstance(payload["model"], Mapping):
        said = payload.get("model_args") or {}
        if not isinstance(said, Mapping):
            raise CheckpointError(
                f"{path} holds model_args of type {type(said).__name__}, and the constructor's fields must be there by name; "
                "give the original checkpoint"
            )
        case = {**{str(name): value for name, value in said.items()}, **_kind_of(payload.get("config"))}
        payload = dict(payload["model"])
    case |= _read_case(files[0])
    are_weights = all(isinstance(name, str) and isinstance(value, Tensor) for name, value in payload.items())
    if not payload or not are_weights:
        raise CheckpointError(f"{path} holds no state dict (names and tensors); give a checkpoint of FLT or LoopFormer")
    return payload, case


def _find_weights(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give a checkpoint file or the folder that holds it")
    for pattern in ("model_*.pt", "ckpt.pt"):
        if found := sorted(path.glob(pattern)):
            return found[-1:]
    if shards := sorted(path.glob("*.safetensors")):
        return shards
    raise CheckpointError(f"{path} holds neither model_*.pt, ckpt.pt nor *.safetensors; give the checkpoint file")


def _read_weights(file: Path) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        try:
            return dict(load_file(file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is not a readable safetensors file, perhaps truncated ({first_line(error)}); copy it again"
            ) from error
    _check_archive(file)
    stand_ins: list[Any] = [
        (type("GPTConfig", (_StandIn,), {"official_kind": kind}), f"models.{kind}.GPTConfig")
        for kind in LOOPFORMER_SYSTEMS
    ]
    try:
        with torch.serialization.safe_globals(stand_ins):
            payload = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a truncated or hostile pickle raises anything, with advice to trust it
        raise CheckpointError(
            f"{file} cannot be opened as plain weights, so it is truncated, foreign, or would execute code "
            f"({type(error).__name__}); give a checkpoint of FLT or LoopFormer from a source that you trust"
        ) from error
    if not isinstance(payload, Mapping):
        raise CheckpointError(f"{file} holds a {type(payload).__name__}, not a state dict")
    return dict(payload)


def _check_archive(file: Path) -> None:
    """Check that a file in torch's format, a zip archive, unpacks to no more bytes than it has.

    torch stores tensors as they are. Compressed or overlapping entries would turn a small file into a huge one in memory.

    Raises:
        CheckpointError: It unpacks to more, or its list of entries cannot be read.
    """
    if not zipfile.is_zipfile(file):
        return  # an older format, or no checkpoint: torch says
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, UnicodeDecodeError, NotImplementedError) as error:
        raise CheckpointError(f"{file} is damaged ({first_line(error)}); copy it again") from error
    if unpacked > file.stat().st_size:
        raise CheckpointError(
            f"{file} unpacks to {unpacked:,} bytes and has {file.stat().st_size:,}, but torch never compresses weights; give the "
            "original checkpoint"
        )


class _StandIn:
    """Takes the place of a configuration class that a checkpoint names: it holds fields and does nothing."""

    official_kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


def _kind_of(config: Any) -> dict[str, Any]:
    if not isinstance(config, _StandIn):
        return {}
    fields = {name: value for name, value in vars(config).items() if value is not None and not callable(value)}
    return {**fields, "kind": config.official_kind}


def _read_case(file: Path) -> dict[str, Any]:
    """Read the constructor's fields from the JSON file beside the weights, where there is one.

    FLT: `model_config` of the meta_*.json of the same step. Hub releases: the fields in config.json that are ours to know.
    """
    if step := re.fullmatch(r"model_(\d+)\.pt", file.name):
        description = file.with_name(f"meta_{step[1]}.json")
    elif file.suffix == ".safetensors":
        description = file.with_name("config.json")
    else:
        return {}
    if not description.exists():
        return {}
    remedy = f"it describes {file.name}: copy it again, or give the fields by --case after removing it"
    fields = read_json(description, dict, remedy=remedy)
    if step:
        case = fields.get("model_config")
        if not isinstance(case, dict):
            raise CheckpointError(f"{description} has no object model_config; {remedy}")
        return case
    name = fields.get("model_type")
    kind = {"kind": name} if isinstance(name, str) and name in LOOPFORMER_SYSTEMS else {}
    return kind | {name: fields[name] for name in LOOPFORMER_FIELDS if fields.get(name) is not None}
