"""How training tells others where it stands: a small picklable value a step, able to cross a process border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ProgressListener", "TrainingProgress"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """Where a run stands after an update."""

    step: int
    """Updates done."""
    num_steps: int
    """Updates of the whole run."""
    loss: float
    """Training objective of the last update, in nats per token."""
    gradient_norm: float
    """Global L2 norm of the gradient of the last update, before clipping."""
    tokens_per_second: float | None = None
    """Training tokens, all processes together, over the last updates."""
    mfu: float | None = None
    """Operations, every loop and both trajectories, as a share of the measured peak of matrix products."""
    seconds_left: float | None = None
    """Until the last update."""
    verdict: str | None = None
    """Whether the run is stable so far; None: too early to say."""
    verdict_reason: str = ""
    """What that rests on."""


ProgressListener = Callable[[TrainingProgress], None]
"""Called after each update, from the training thread."""
