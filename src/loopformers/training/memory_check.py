"""Whether a run can fit this machine at all, asked before its text is read and its model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopformers.model.memory_check import check_fits
from loopformers.training.launcher import world_size
from loopformers.training.memory import (
    FLOAT,
    ActivationMode,
    Microbatch,
    optimizer_state_bytes,
    saved_activation_bytes,
    trajectories_of,
)

if TYPE_CHECKING:
    from loopformers.laws import Law
    from loopformers.model.config import LoopConfig
    from loopformers.training.recipe import Recipe

__all__ = ["check_memory"]

ROOM = 4
"""How many times the memory of the machine the planned activations must exceed to be refused. What is kept is known to a few
per cent, but a compiled layer keeps less, and pages may be swapped out."""


def check_memory(recipe: Recipe, config: LoopConfig, law: Law) -> None:
    """Refuse a run that is clearly impossible here; `loopformers plan` says more about one that is not.

    Weights (built on the CPU, on every process), gradients and optimiser state are counted in full, activations of a step
    only where they are several times what there is.

    Args:
        recipe: The recipe.
        config: Its model.
        law: What training draws loops from.

    Raises:
        ConfigError: It needs more memory than the machine, or the GPU, has altogether.
    """
    training = recipe.training
    processes = world_size()
    weights = config.num_parameters() * FLOAT
    state = 2 * weights + optimizer_state_bytes(config, recipe.optimizer)
    smaller = "give a smaller model (model.hidden_size, model.num_hidden_layers, model.vocab_size)"
    check_fits(weights, f"a model of {config.num_parameters():,} parameters", smaller)
    has_gpu = torch.cuda.is_available()
    total = int(torch.cuda.get_device_properties(0).total_memory) if has_gpu else None
    share = state // (processes if training.shard else 1)
    what = f"training {config.num_parameters():,} parameters, with gradients and the optimiser's state,"
    remedy = (
        smaller if processes == 1 or training.shard else f"{smaller}, or divide it over processes: training.shard=true"
    )
    check_fits(share, what, remedy, available=total)
    batch = Microbatch(
        windows=max(1, training.batch_size // (processes * training.gradient_accumulation)),
        seq_len=recipe.seq_len,
        precision=training.precision,
        mode=ActivationMode(checkpointing=training.activation_checkpointing, kept_loops=training.kept_loops),
        loss_chunk_tokens=training.loss_chunk_tokens,
        num_grad_loops=training.num_grad_loops,
        device_type="cuda" if has_gpu else "cpu",
    )
    plan = law.plan(seed=config.loop_seed, step=0)
    activations = saved_activation_bytes(config, batch, trajectories_of(config, plan, training.num_grad_loops))
    check_fits(
        activations,
        f"keeping the activations of a step of {batch.windows:,} windows of {batch.seq_len:,} tokens",
        "raise training.gradient_accumulation, or lower training.batch_size or the length of windows",
        available=total,
        room=ROOM,
    )
