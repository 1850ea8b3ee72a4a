"""Cross entropy of some loops: the last, the last third, or every one (FLT's END, FEW and STEP)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from loopformers.laws import LoopPlan
from loopformers.objectives.contract import ObjectiveOutput, ObjectiveWeights, Targets, TrajectoryRunner

__all__ = ["every_loop", "last_loop", "last_third"]

Head = Callable[[Tensor], Tensor]


def last_loop(
    run: TrajectoryRunner, head: Head, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights
) -> ObjectiveOutput:
    """Cross entropy of the last loop (END)."""
    long = run(plan.long)
    loss = targets.cross_entropy(long.logits)
    return ObjectiveOutput(loss, long, {"cross_entropy": loss.detach()})


def every_loop(
    run: TrajectoryRunner, head: Head, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights
) -> ObjectiveOutput:
    """Mean over all loops of their cross entropy (STEP)."""
    return _mean_over_loops(run, head, targets, plan, first=0)


def last_third(
    run: TrajectoryRunner, head: Head, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights
) -> ObjectiveOutput:
    """Mean over the loops from floor(2T/3) on, counted from 0 (FEW)."""
    return _mean_over_loops(run, head, targets, plan, first=2 * plan.long.num_loops // 3)


def _mean_over_loops(
    run: TrajectoryRunner, head: Head, targets: Targets, plan: LoopPlan, *, first: int
) -> ObjectiveOutput:
    long = run(plan.long, every_loop=True)
    losses = [targets.cross_entropy(head(hidden)) for hidden in long.loop_hidden[first:-1]]
    losses.append(targets.cross_entropy(long.logits))
    loss = sum(losses[1:], start=losses[0]) / len(losses)
    parts = {f"cross_entropy_loop_{first + i + 1}": value.detach() for i, value in enumerate(losses)}
    return ObjectiveOutput(loss, long, parts)
