"""What an objective is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from loopformers.errors import ConfigError
from loopformers.laws import LoopPlan
from loopformers.objectives.cross_entropy import IGNORE, chunked_cross_entropy_sum, cross_entropy_sum
from loopformers.schedule import Schedule

__all__ = [
    "IGNORE",
    "Objective",
    "ObjectiveOutput",
    "ObjectiveWeights",
    "Prediction",
    "Targets",
    "TrajectoryRunner",
    "check_smoothing",
]


def check_smoothing(value: object, *, name: str = "smoothing") -> None:
    """Raise ConfigError unless a value is a share from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"{name}={value!r} must be a number from 0 to below 1: at 1 the targets would count for nothing"
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says after one loop.

    Attributes:
        hidden: Final hidden state, after the final norm, (batch, seq, dim).
        logits: Its logits, (batch, seq, vocab); None where they are made in chunks and never whole.
    """

    hidden: Tensor
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Targets:
    """Next-token targets and the number that sums are divided by.

    Losses are sums divided by one count, so that gradient accumulation over microbatches with uneven masks equals one
    large batch: a mean of means does not.

    Args:
        labels: Target of each position, aligned with the logits, (batch, seq); IGNORE where there is none.
        count: Targets that all sums are divided by; the microbatch's own, or the whole step's.
        head: Final hidden state (.., dim) -> logits (.., vocab).
        chunk_tokens: Tokens whose logits are made at a time, where a prediction has none.
        smoothing: Share of a target's probability that is spread evenly over the vocabulary.
    """

    labels: Tensor
    count: Tensor | float
    head: Callable[[Tensor], Tensor]
    chunk_tokens: int | None = None
    smoothing: float = 0.0

    def cross_entropy(self, prediction: Prediction) -> Tensor:
        """Return the mean cross entropy in nats per target, a scalar."""
        labels = self.labels.flatten()
        if prediction.logits is not None:
            logits = prediction.logits.flatten(0, 1)
            return cross_entropy_sum(logits, labels, smoothing=self.smoothing) / self.count
        assert self.chunk_tokens is not None, "a prediction without logits is made for chunks"
        hidden = prediction.hidden.flatten(0, 1)
        total = chunked_cross_entropy_sum(
            hidden, labels, self.head, chunk_tokens=self.chunk_tokens, smoothing=self.smoothing
        )
        return total / self.count

    def mean_square(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """Return the mean square difference over all entries of positions that have a target, a scalar.

        Args:
            ours: (batch, seq, dim).
            theirs: Same shape.
        """
        by_position = (ours - theirs).square().mean(dim=-1)
        return by_position.masked_fill(self.labels == IGNORE, 0.0).sum() / self.count


class TrajectoryRunner(Protocol):
    """Runs the model along a schedule."""

    def __call__(self, schedule: Schedule, *, first_loop: int | None = None) -> list[Prediction]:
        """Return the predictions after each loop from `first_loop` on, counted from 0; default: after the last alone."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectiveWeights:
    """Weights of shortcut consistency's terms, and its target."""

    short: float
    consistency: float
    target: str


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """A scalar loss with gradients, its parts without, and what the long trajectory ends with."""

    loss: Tensor
    long: Prediction
    parts: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """Computes the loss of one microbatch."""

    def __call__(
        self, run: TrajectoryRunner, targets: Targets, plan: LoopPlan, weights: ObjectiveWeights
    ) -> ObjectiveOutput:
        """Return the loss and its parts.

        Args:
            run: Runs the model along a schedule.
            targets: What to predict.
            plan: The trajectories of this microbatch.
            weights: For objectives of several terms.
        """
        ...
