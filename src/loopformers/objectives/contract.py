"""What an objective is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from loopformers.laws import LoopPlan
from loopformers.schedule import Schedule

__all__ = ["IGNORE", "Objective", "ObjectiveOutput", "ObjectiveWeights", "Targets", "Trajectory", "TrajectoryRunner"]

IGNORE = -100
"""Label of a position that is no target (transformers' convention)."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Next-token targets and the number that sums are divided by.

    Losses are sums divided by one count, so that gradient accumulation over microbatches with uneven masks equals one
    large batch: a mean of means does not.

    Args:
        labels: Target of each position, aligned with the logits, (batch, seq); IGNORE where there is none.
        count: Targets that all sums are divided by; the microbatch's own, or the whole step's.
    """

    labels: Tensor
    count: Tensor | int

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per target, a scalar. `logits`: (batch, seq, vocab)."""
        total = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return total / self.count

    @property
    def share(self) -> Tensor | float:
        """This microbatch's part of the count: weighs terms that are means over the microbatch."""
        own = (self.labels != IGNORE).sum()
        return own / self.count


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One run of the loop.

    Attributes:
        hidden: Final hidden state, after the final norm, (batch, seq, dim).
        loop_hidden: The same for every loop, when asked for.
        logits: Its logits, (batch, seq, vocab).
    """

    hidden: Tensor
    logits: Tensor
    loop_hidden: tuple[Tensor, ...] = ()


class TrajectoryRunner(Protocol):
    """Runs the model along a schedule."""

    def __call__(self, schedule: Schedule, *, every_loop: bool = False) -> Trajectory:
        """Return the trajectory, with every loop's final hidden state on request."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectiveWeights:
    """Weights of shortcut consistency's terms, and its target."""

    short: float
    consistency: float
    target: str


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """A scalar loss with gradients, its parts without, and the long trajectory."""

    loss: Tensor
    long: Trajectory
    parts: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """Computes the loss of one microbatch."""

    def __call__(
        self,
        run: TrajectoryRunner,
        head: Callable[[Tensor], Tensor],
        targets: Targets,
        plan: LoopPlan,
        weights: ObjectiveWeights,
    ) -> ObjectiveOutput:
        """Return the loss and its parts.

        Args:
            run: Runs the model along a schedule.
            head: Final hidden state (batch, seq, dim) -> logits (batch, seq, vocab).
            targets: What to predict.
            plan: The trajectories of this microbatch.
            weights: For objectives of several terms.
        """
        ...
