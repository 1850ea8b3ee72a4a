"""Learning-rate schedules as multipliers: pure functions of the step, so that a resumed run cannot drift.

A step is 0-based: the multiplier of the first update is `schedule(0, num_steps)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from loopformers.errors import ConfigError

__all__ = ["ConstantThenLinear", "LearningRateSchedule", "WarmupCosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantThenLinear:
    """No warm-up, constant, and linear to 0 over the last part of the run (arXiv 2605.18797, released recipe).

    Example:
        >>> schedule = ConstantThenLinear()
        >>> [schedule(step, 10) for step in (0, 8, 9, 10)]
        [1.0, 1.0, 0.5, 0.0]
    """

    decay_fraction: float = 0.2
    """Share of the run over which the rate falls."""

    def __post_init__(self) -> None:
        check_fraction("decay_fraction", self.decay_fraction)

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the multiplier of the base rate, in [0, 1]."""
        decay_steps = round(self.decay_fraction * num_steps)
        return 1.0 if step <= num_steps - decay_steps else max(0.0, (num_steps - step) / decay_steps)

    def build(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
        """Return the torch scheduler of a run of `num_steps` updates."""
        return build_lambda_lr(self, optimizer, num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosine:
    """Linear warm-up, then a cosine down to a floor (arXiv 2602.11451: 6e-4 to 6e-5, 2,000 steps of warm-up).

    Example:
        >>> schedule = WarmupCosine(warmup_steps=2)
        >>> [round(schedule(step, 10), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    warmup_steps: int = 2000
    """Updates until the full rate: the first has 1 / warmup_steps of it."""
    floor: float = 0.1
    """Multiplier at the end of the run."""

    def __post_init__(self) -> None:
        check_fraction("floor", self.floor)
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps={self.warmup_steps!r} must be a whole number of at least 0")

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the multiplier of the base rate, in [0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        share = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))

    def build(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
        """Return the torch scheduler of a run of `num_steps` updates."""
        return build_lambda_lr(self, optimizer, num_steps)


LearningRateSchedule = ConstantThenLinear | WarmupCosine
"""Any schedule of this module."""


def build_lambda_lr(schedule: LearningRateSchedule, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """Apply a schedule to every group of an optimiser."""
    if num_steps < 1:
        raise ConfigError(f"num_steps={num_steps} must be at least 1; give the number of updates of the run")

    def multiplier(step: int) -> float:  # a plain function: LambdaLR would put an object's fields into the state dict
        return schedule(step, num_steps)

    return LambdaLR(optimizer, multiplier)


def check_fraction(name: str, value: float) -> None:
    """Raise ConfigError unless a value lies in [0, 1]."""
    if not (isinstance(value, int | float) and 0 <= value <= 1):
        raise ConfigError(f"{name}={value!r} must lie between 0 and 1")
