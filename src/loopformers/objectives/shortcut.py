"""Shortcut consistency: short trajectories learn to end where the full one does (LoopFormer, section 3.2)."""

from __future__ import annotations

from typing import Literal, get_args

from loopformers.errors import ConfigError
from loopformers.laws import LoopPlan
from loopformers.objectives.contract import ObjectiveOutput, ObjectiveWeights, Targets, TrajectoryRunner

__all__ = ["CONSISTENCY_TARGETS", "ConsistencyTarget", "shortcut_consistency"]

ConsistencyTarget = Literal["hidden", "logits"]
CONSISTENCY_TARGETS: tuple[str, ...] = get_args(ConsistencyTarget)


def shortcut_consistency(
    run: TrajectoryRunner, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights
) -> ObjectiveOutput:
    """Return `CE(long) + w_s CE(short) + w_c MSE(stop_gradient(z_long), z_short)`.

    z is the state after the final norm (the paper's equation and code) or the logits (its prose); the MSE is a mean over
    all entries of the positions that have a target. In the paper's windows all have; elsewhere padding does not count, and
    microbatches and ranks with uneven masks add up to one batch. A plan without a short trajectory trains the long one
    alone.
    """
    if plan.short is not None and plan.short.num_loops > plan.long.num_loops:
        raise ConfigError(
            f"short_schedule has {plan.short.num_loops} loops and the long trajectory {plan.long.num_loops}; give a short one of "
            "at most as many"
        )
    long = run(plan.long)[-1]
    loss = targets.cross_entropy(long)
    parts = {"cross_entropy": loss.detach().clone()}  # a copy: trainers scale a loss in place
    if plan.short is None:
        return ObjectiveOutput(loss, long, parts)
    short = run(plan.short)[-1]
    cross_entropy = targets.cross_entropy(short)
    if weights.target == "hidden":
        consistency = targets.mean_square(short.hidden, long.hidden.detach())
    elif short.logits is not None and long.logits is not None:
        consistency = targets.mean_square(short.logits, long.logits.detach())
    else:
        raise ConfigError(
            "consistency_target='logits' compares whole logits, which a chunked loss never makes; set loss_chunk_tokens to "
            "None, or consistency_target='hidden'"
        )
    loss = loss + weights.short * cross_entropy + weights.consistency * consistency
    parts |= {"short_cross_entropy": cross_entropy.detach(), "consistency": consistency.detach()}
    return ObjectiveOutput(loss, long, parts)
