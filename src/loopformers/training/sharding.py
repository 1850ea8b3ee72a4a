"""Sharding over ranks with FSDP2: parameters, gradients and optimiser states divided, each layer gathered when it runs.

A looped model calls its layers, its norm and its head many times in one step, and again when activations are recomputed.
So only layers are units of their own: `fully_shard` takes repeated calls of those. Everything else belongs to the model's own
unit, which is gathered once at the start of a forward pass and stays so until its backward pass is over, whatever runs in
between. Checkpoints are torch's distributed ones (DCP): written by any number of ranks, read by any other.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from loopformers.errors import CheckpointError, ConfigError, first_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["SHARDED", "export_sharded", "gather_weights", "is_sharded", "load_sharded", "save_sharded", "shard_model"]

SHARDED = "sharded"
"""Folder of a checkpoint that holds its shards."""


def shard_model(
    model: LoopedForCausalLM, *, mesh: DeviceMesh | None = None, reshard_after_forward: bool = True
) -> LoopedForCausalLM:
    """Divide a model's parameters over ranks, in place, and return it. Its forward call stays what it was.

    Call it before the optimiser is built, with the same weights on every rank.

    Args:
        model: The model, on this rank's device.
        mesh: Ranks to divide over; None: all.
        reshard_after_forward: Whether a layer's parameters are let go after each of its calls. False gathers them once
            for all loops of a forward pass, and holds a whole copy meanwhile.

    Raises:
        ConfigError: No process group.
    """
    if not dist.is_initialized():
        raise ConfigError("sharding divides a model over processes, and this is the only one; launch with torchrun")
    trunk = model.model
    policy = MixedPrecisionPolicy()  # autocast decides about precision, as it does without sharding
    for layer in (*trunk.prelude, *trunk.layers, *trunk.coda):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are divided over ranks."""
    return isinstance(model, FSDPModule)


def gather_weights(model: nn.Module) -> dict[str, Any]:
    """Return a sharded model's whole weights, on the CPU of the first rank (elsewhere: nothing); a collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def save_sharded(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write a model's and an optimiser's shards; a collective."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    with _one_process_is_enough():
        save(state, checkpoint_id=os.fspath(folder), no_dist=not dist.is_initialized())


def load_sharded(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what `save_sharded` wrote, on any number of ranks, also one without a process group; a collective.

    Raises:
        CheckpointError: The folder holds no shards, or those of another model.
    """
    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(
            f"{os.fspath(folder)!r} holds no shards (.metadata is missing); give the folder {SHARDED!r}"
        )
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    try:
        with _one_process_is_enough():
            load(state, checkpoint_id=os.fspath(folder), no_dist=not dist.is_initialized())
    except (RuntimeError, ValueError, CheckpointException) as error:
        raise CheckpointError(
            f"the shards in {os.fspath(folder)!r} do not fit this model: {first_line(error)}"
        ) from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def export_sharded(checkpoint: str | os.PathLike[str], output_dir: str | os.PathLike[str]) -> LoopedForCausalLM:
    """Turn a checkpoint of shards into a folder for `from_pretrained`, on one process, and return the model.

    Args:
        checkpoint: A run's checkpoint: `config.json` and the folder of shards.
        output_dir: Where `config.json` and `model.safetensors` go.

    Raises:
        CheckpointError: The checkpoint holds no shards, or those of another model.
    """
    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM

    shards = Path(checkpoint) / SHARDED
    model = LoopedForCausalLM(LoopConfig.from_pretrained(checkpoint))
    load_sharded(shards, model.to(_dtype_of(shards)))
    model.save_pretrained(output_dir)
    return model


def _dtype_of(folder: Path) -> torch.dtype | None:
    """Return the dtype that a model's shards have; None where there are none."""
    if not (folder / ".metadata").is_file():
        return None
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    dtypes = (
        e.properties.dtype for name, e in entries.items() if name.startswith("model.") and hasattr(e, "properties")
    )
    return next(dtypes, None)


@contextlib.contextmanager
def _one_process_is_enough() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
