"""Cross entropy of some loops: the last, the last third, or every one (FLT's END, FEW and STEP)."""

from __future__ import annotations

from loopformers.laws import LoopPlan
from loopformers.objectives.contract import ObjectiveOutput, ObjectiveWeights, Targets, TrajectoryRunner

__all__ = ["every_loop", "last_loop", "last_third"]


def last_loop(run: TrajectoryRunner, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights) -> ObjectiveOutput:
    """Cross entropy of the last loop (END)."""
    long = run(plan.long)[-1]
    loss = targets.cross_entropy(long)
    # A copy: trainers scale a loss in place.
    return ObjectiveOutput(loss, long, {"cross_entropy": loss.detach().clone()})


def every_loop(run: TrajectoryRunner, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights) -> ObjectiveOutput:
    """Mean over all loops of their cross entropy (STEP)."""
    return _mean_over_loops(run, targets, plan, first=0)


def last_third(run: TrajectoryRunner, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights) -> ObjectiveOutput:
    """Mean over the loops from floor(2T/3) on, counted from 0 (FEW)."""
    return _mean_over_loops(run, targets, plan, first=2 * plan.long.num_loops // 3)


def _mean_over_loops(run: TrajectoryRunner, targets: Targets, plan: LoopPlan, *, first: int) -> ObjectiveOutput:
    predictions = run(plan.long, first_loop=first)
    losses = [targets.cross_entropy(prediction) for prediction in predictions]
    loss = sum(losses[1:], start=losses[0]) / len(losses)
    parts = {f"cross_entropy_loop_{first + i + 1}": value.detach() for i, value in enumerate(losses)}
    return ObjectiveOutput(loss, predictions[-1], parts)
