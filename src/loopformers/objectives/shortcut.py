"""Shortcut consistency: short trajectories learn to end where the full one does (LoopFormer, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from loopformers.laws import LoopPlan
from loopformers.objectives.contract import ObjectiveOutput, ObjectiveWeights, Targets, TrajectoryRunner

__all__ = ["CONSISTENCY_TARGETS", "ConsistencyTarget", "shortcut_consistency"]

ConsistencyTarget = Literal["hidden", "logits"]
CONSISTENCY_TARGETS: tuple[str, ...] = get_args(ConsistencyTarget)


def shortcut_consistency(
    run: TrajectoryRunner,
    head: Callable[[Tensor], Tensor],
    targets: Targets,
    plan: LoopPlan,
    weights: ObjectiveWeights,
) -> ObjectiveOutput:
    """Return `CE(long) + w_s CE(short) + w_c MSE(stop_gradient(z_long), z_short)`.

    z is the state after the final norm (the paper's equation and code) or the logits (its prose); the MSE is a mean over
    all entries. A plan without a short trajectory trains the long one alone.
    """
    long = run(plan.long)
    loss = targets.cross_entropy(long.logits)
    parts = {"cross_entropy": loss.detach()}
    if plan.short is None:
        return ObjectiveOutput(loss, long, parts)
    short = run(plan.short)
    cross_entropy = targets.cross_entropy(short.logits)
    pair = (short.hidden, long.hidden) if weights.target == "hidden" else (short.logits, long.logits)
    consistency = F.mse_loss(pair[0], pair[1].detach()) * targets.share
    loss = loss + weights.short * cross_entropy + weights.consistency * consistency
    parts |= {"short_cross_entropy": cross_entropy.detach(), "consistency": consistency.detach()}
    return ObjectiveOutput(loss, long, parts)
