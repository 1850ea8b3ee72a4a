"""Laws: how training draws the schedules of a run.

A draw is a pure function of (seed, step, microbatch), so that every rank draws the same plan and a resumed run draws
what the uninterrupted one would have. Laws are values; this module does not import torch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never, get_args

from loopformers.errors import ConfigError, check_count, shorten, unknown_name
from loopformers.limits import MAX_LOOPS, MAX_STEPS
from loopformers.schedule import Schedule, check_num_loops

__all__ = [
    "SHORT_SAMPLERS",
    "Curriculum",
    "Fixed",
    "Law",
    "LoopPlan",
    "PoissonLogNormal",
    "ShortSampler",
    "ShortTrajectory",
    "UniformRange",
    "derive_rng",
]

MAX_SIGMA = 10
"""Widest spread on a log scale: beyond it, rates leave the range of floats."""

ShortSampler = Literal["sequential", "uniform"]
SHORT_SAMPLERS: tuple[str, ...] = get_args(ShortSampler)


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What one microbatch runs: the long trajectory and, for shortcut consistency, a short one."""

    long: Schedule
    short: Schedule | None = None


class Law(Protocol):
    """Draws the plan of a microbatch."""

    def plan(self, *, seed: int, step: int, microbatch: int = 0) -> LoopPlan:
        """Return the plan; equal arguments give equal plans, on every machine."""
        ...


def derive_rng(purpose: str, *key: int) -> random.Random:
    """Return a generator that depends on the purpose and the key alone, whatever was drawn before."""
    return random.Random(":".join([purpose, *map(str, key)]))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `num_loops` uniform steps."""

    num_loops: int

    def __post_init__(self) -> None:
        check_num_loops(self.num_loops)

    def plan(self, *, seed: int, step: int, microbatch: int = 0) -> LoopPlan:
        """Return the same plan for every microbatch."""
        return LoopPlan(long=Schedule.uniform(self.num_loops))


@dataclass(frozen=True, slots=True)
class UniformRange:
    """A number of loops uniform on `min_loops`..`max_loops`, both included."""

    min_loops: int
    max_loops: int

    def __post_init__(self) -> None:
        if check_num_loops(self.min_loops) > check_num_loops(self.max_loops):
            raise ConfigError(f"min_loops={self.min_loops} is above max_loops={self.max_loops}; swap them")

    def plan(self, *, seed: int, step: int, microbatch: int = 0) -> LoopPlan:
        """Return uniform steps over the drawn number of loops."""
        rng = derive_rng("uniform-range", seed, step, microbatch)
        return LoopPlan(long=Schedule.uniform(rng.randint(self.min_loops, self.max_loops)))


@dataclass(frozen=True, slots=True)
class PoissonLogNormal:
    """Mostly near the mean, with a long tail of deep runs (Geiping et al. 2025, arXiv 2502.05171, section 3.3).

    r ~ Poisson(exp(tau)) + 1 with tau ~ Normal(log(mean_loops - 1) - sigma^2 / 2, sigma), so that E[r] = mean_loops; draws
    above `max_loops` are cut to it.

    Args:
        mean_loops: E[r] before the cut, above 1.
        max_loops: Largest number of loops; None: four times the mean.
        sigma: Spread of the rate on a log scale.
    """

    mean_loops: float
    max_loops: int | None = None
    sigma: float = 0.5

    def __post_init__(self) -> None:
        if not 1 < self.mean_loops <= MAX_LOOPS:
            raise ConfigError(
                f"mean_loops={shorten(self.mean_loops)} must be above 1, since one loop always runs, and at most {MAX_LOOPS}"
            )
        if not 0 <= self.sigma <= MAX_SIGMA:
            raise ConfigError(f"sigma={shorten(self.sigma)} must be a number from 0 to {MAX_SIGMA}")
        if self.max_loops is not None and check_num_loops(self.max_loops) < self.mean_loops:
            raise ConfigError(f"max_loops={self.max_loops} is below mean_loops={self.mean_loops}; raise it")

    def plan(self, *, seed: int, step: int, microbatch: int = 0) -> LoopPlan:
        """Return uniform steps over the drawn number of loops."""
        rng = derive_rng("poisson-log-normal", seed, step, microbatch)
        rate = math.exp(rng.gauss(math.log(self.mean_loops - 1) - self.sigma**2 / 2, self.sigma))
        limit = min(math.ceil(4 * self.mean_loops), MAX_LOOPS) if self.max_loops is None else self.max_loops
        # A Poisson draw counts how many exponential waits fit into one unit of time at this rate.
        num_loops, waited = 1, rng.expovariate(rate)
        while waited < 1 and num_loops < limit:
            num_loops += 1
            waited += rng.expovariate(rate)
        return LoopPlan(long=Schedule.uniform(num_loops))


@dataclass(frozen=True, slots=True)
class Curriculum:
    """A number of loops that moves linearly from `start_loops` to `end_loops` over `num_steps` updates, then stays."""

    start_loops: int
    end_loops: int
    num_steps: int

    def __post_init__(self) -> None:
        check_num_loops(self.start_loops)
        check_num_loops(self.end_loops)
        check_count("num_steps", self.num_steps, at_most=MAX_STEPS)

    def plan(self, *, seed: int, step: int, microbatch: int = 0) -> LoopPlan:
        """Return uniform steps over this step's number of loops."""
        share = min(step / self.num_steps, 1.0)
        return LoopPlan(long=Schedule.uniform(round(self.start_loops + share * (self.end_loops - self.start_loops))))


@dataclass(frozen=True, slots=True)
class ShortTrajectory:
    """T uniform steps, and a shorter trajectory beside them (LoopFormer, arXiv 2602.11451, section 3.2).

    M is uniform on 1..T-1; then a schedule of M steps on multiples of 1/T is drawn by `sampler`:

    - `sequential`, the released code's: one step size after the other, uniform among those that leave 1/T for each
      later step. It favours coarse-first schedules strongly (T = 8, M = 4: (5,1,1,1) twelve times as often as (2,2,2,2)).
    - `uniform`: uniform over all C(T-1, M-1) schedules.

    With `passes_only` the short trajectory is M equal passes, as fixed-depth models with early exit are trained.
    """

    num_loops: int
    sampler: ShortSampler = "sequential"
    passes_only: bool = False

    def __post_init__(self) -> None:
        if check_num_loops(self.num_loops) < 2:
            raise ConfigError(
                f"num_loops={self.num_loops} leaves no shorter trajectory to draw; shortcut consistency needs at least 2 loops"
            )
        if self.sampler not in SHORT_SAMPLERS:
            raise ConfigError(unknown_name("short_sampler", self.sampler, SHORT_SAMPLERS))

    def plan(self, *, seed: int, step: int, microbatch: int = 0) -> LoopPlan:
        """Return T uniform steps and the short trajectory of this microbatch."""
        rng = derive_rng("short-trajectory", seed, step, microbatch)
        return LoopPlan(long=Schedule.uniform(self.num_loops), short=self.draw(rng))

    def draw(self, rng: random.Random) -> Schedule:
        """Draw one short trajectory."""
        num_short = rng.randint(1, self.num_loops - 1)
        if self.passes_only:
            return Schedule.uniform(num_short)
        match self.sampler:
            case "sequential":
                left, numerators = self.num_loops, []
                for later in range(num_short - 1, 0, -1):
                    numerators.append(rng.randint(1, left - later))
                    left -= numerators[-1]
                numerators.append(left)
            case "uniform":
                cuts = sorted(rng.sample(range(1, self.num_loops), num_short - 1))
                numerators = [b - a for a, b in zip([0, *cuts], [*cuts, self.num_loops], strict=True)]
            case _:
                assert_never(self.sampler)
        return Schedule(tuple(numerators), self.num_loops)
