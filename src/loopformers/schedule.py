"""Schedules: how a run cuts normalised time 0 -> 1 into loops.

A looped model is run as a trajectory of step sizes Δ_1..Δ_M with ΣΔ = 1 (LoopFormer, arXiv 2602.11451, section 3).
Step sizes are kept as integers on a grid, so that times are exact: t_{i-1} = (n_1 + .. + n_{i-1}) / grid is rounded once,
where accumulating 1/24 in bfloat16 ends at 1.008. This module does not import torch.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from loopformers.errors import ConfigError, LoopformersError, shorten, unknown_name
from loopformers.limits import MAX_LOOPS

__all__ = ["SCHEDULE_KINDS", "Schedule", "all_schedules", "count_schedules", "is_uniform_text"]

MAX_GRID = 1 << 16
"""Finest grid that explicit step sizes are rounded to."""

STEP_SIZE = re.compile(
    r"[-+]?([0-9]{1,12}/[0-9]{1,12}|([0-9]{1,12}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][-+]?[0-9]{1,2})?)"
)
"""A step size as text. Without bounds, `1e1000000000` alone fills the memory."""

SUM_TOLERANCE = 1e-6
"""How far explicit step sizes may be from a sum of 1 before they are refused."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Step sizes of one run: loop i advances time by `numerators[i] / grid`.

    Two schedules are equal when their step sizes are, whatever the grid: `Schedule((2, 2), 4) == Schedule((1, 1), 2)`.

    Args:
        numerators: One positive integer a loop.
        grid: Their sum.

    Raises:
        ConfigError: A schedule without loops, a numerator below 1, or numerators that do not sum to the grid.

    Example:
        >>> Schedule.coarse_first(4, grid=8)
        Schedule('4/8,2/8,1/8,1/8')
        >>> Schedule.uniform(4).times
        (0.0, 0.25, 0.5, 0.75)
    """

    numerators: tuple[int, ...]
    grid: int

    def __post_init__(self) -> None:
        if not self.numerators:
            raise ConfigError("a schedule of 0 loops runs nothing; give at least one step size")
        check_num_loops(len(self.numerators), name="loops of a schedule")
        if min(self.numerators) < 1:
            raise ConfigError(
                f"step sizes {shorten(self.numerators)} on a grid of {shorten(self.grid)}: each must be a "
                "whole number of at least 1"
            )
        if sum(self.numerators) != self.grid:
            raise ConfigError(
                f"step sizes {shorten(self.numerators)} sum to {shorten(sum(self.numerators))}/{shorten(self.grid)} and must "
                f"sum to 1; change them so that they add up to {shorten(self.grid)}"
            )
        divisor = math.gcd(*self.numerators)
        if divisor > 1:  # lowest terms make equality and hashing independent of the grid
            object.__setattr__(self, "numerators", tuple(n // divisor for n in self.numerators))
            object.__setattr__(self, "grid", self.grid // divisor)

    # -- kinds -------------------------------------------------------------------------------------------------

    @classmethod
    def uniform(cls, num_loops: int) -> Schedule:
        """`num_loops` equal steps."""
        return cls((1,) * check_num_loops(num_loops), num_loops)

    @classmethod
    def coarse_first(cls, num_loops: int, *, grid: int) -> Schedule:
        """Large steps early, small ones late: each step is about twice the next, on multiples of 1/grid.

        Step i takes the share 2^(M-i) / (2^(M-i+1) - 1) of the time that is left, rounded to the grid, so that each
        later step keeps at least 1/grid.
        """
        check_num_loops(grid, name="grid")
        if check_num_loops(num_loops) > grid:
            raise ConfigError(
                f"num_loops={num_loops} does not fit a grid of 1/{grid}: each step is at least 1/{grid}; "
                f"use at most {grid} loops, a finer grid, or a uniform schedule"
            )
        left, numerators = grid, []
        for later in range(num_loops - 1, -1, -1):
            share = Fraction(2**later, 2 ** (later + 1) - 1)
            numerators.append(max(1, min(round(left * share), left - later)))
            left -= numerators[-1]
        return cls(tuple(sorted(numerators, reverse=True)), grid)

    @classmethod
    def fine_first(cls, num_loops: int, *, grid: int) -> Schedule:
        """Small steps early, large ones late: `coarse_first` reversed."""
        return cls.coarse_first(num_loops, grid=grid).reversed()

    @classmethod
    def explicit(cls, step_sizes: Sequence[float | Fraction]) -> Schedule:
        """The schedule with these step sizes, each rounded to the nearest fraction of denominator <= 65536.

        Raises:
            ConfigError: They do not sum to 1 within 1e-6, or one is not positive.
        """
        try:
            check_num_loops(max(1, len(step_sizes)), name="number of step sizes")
            shown, total = shorten(list(map(float, step_sizes))), float(sum(step_sizes))
        except LoopformersError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"step sizes {shorten(step_sizes)} must be numbers that sum to 1") from error
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ConfigError(f"step sizes {shown} sum to {total:.6g}, and must sum to 1")
        if min(step_sizes) <= 0:
            raise ConfigError(f"step sizes {shown} must all be positive")
        for limit in (256, 4096, MAX_GRID):  # the coarsest grid that meets the sum exactly: 0.333333 is one third
            exact = [Fraction(step).limit_denominator(limit) for step in step_sizes]
            grid = math.lcm(*(step.denominator for step in exact))
            if sum(exact) == 1 and grid <= MAX_GRID and all(exact):
                return cls(tuple(int(step * grid) for step in exact), grid)
        raise ConfigError(
            f"step sizes {shown} are not fractions of a common grid up to 1/{MAX_GRID}; "
            "write them as fractions ('1/3,2/3') or integers ('1,2')"
        )

    @classmethod
    def parse(cls, value: Schedule | str | Sequence[Any] | None, *, num_loops: int | None, grid: int) -> Schedule:
        """Read a schedule in any of the forms that users write.

        Args:
            value: A `Schedule`; a kind (`uniform`, `coarse-first`, `fine-first`), optionally with its number of loops
                (`coarse-first:4`); step sizes as numbers or as one string (`0.5,0.25,0.25`, `1/2,1/4,1/4`, or integers
                `2,1,1` that are divided by their sum); or None for uniform.
            num_loops: Number of loops; where `value` fixes it too, the two must agree. None: `value`'s, else `grid`.
            grid: T, the number of loops that the model was trained with.

        Raises:
            ConfigError: Unknown kind, step sizes that do not sum to 1, or two different numbers of loops.
        """
        schedule = cls._parse(value, num_loops, grid)
        if num_loops is not None and check_num_loops(num_loops) != schedule.num_loops:
            raise ConfigError(
                f"num_loops={num_loops} and a schedule of {schedule.num_loops} loops ({schedule}) contradict each other; "
                "give one of them"
            )
        return schedule

    @classmethod
    def _parse(cls, value: Schedule | str | Sequence[Any] | None, num_loops: int | None, grid: int) -> Schedule:
        if isinstance(value, Schedule):
            return value
        if value is None:
            return cls.uniform(grid if num_loops is None else num_loops)
        if isinstance(value, str):
            kind, _, count = value.strip().replace("_", "-").partition(":")
            if kind in SCHEDULE_KINDS:
                if count and not re.fullmatch("[0-9]{1,20}", count.strip()):
                    raise ConfigError(
                        f"schedule={shorten(value)}: {shorten(count)} is not a number of loops; write for example {kind}:4"
                    )
                loops = int(count) if count else (grid if num_loops is None else num_loops)
                match kind:
                    case "uniform":
                        return cls.uniform(loops)
                    case "coarse-first":
                        return cls.coarse_first(loops, grid=grid)
                    case _:
                        return cls.fine_first(loops, grid=grid)
            if not value.strip() or value.strip()[0].isalpha():
                raise ConfigError(
                    unknown_name("schedule", value, SCHEDULE_KINDS) + ", or step sizes such as 1/2,1/4,1/4"
                )
            parts: Sequence[Any] = [part.strip() for part in value.strip().strip("()[]").split(",")]
        elif isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping | Set):
            parts = list(itertools.islice(value, MAX_LOOPS + 1))
        else:
            raise ConfigError(
                f"schedule={shorten(value)} must be a Schedule, text such as coarse-first:4, or a list of step sizes"
            )
        check_num_loops(max(1, len(parts)), name="number of step sizes")
        steps = [_step_size(step, value) for step in parts]
        if len(steps) > 1 and all(step.denominator == 1 and step >= 1 for step in steps):
            return cls(tuple(int(step) for step in steps), int(sum(steps)))
        return cls.explicit(steps)

    # -- values ------------------------------------------------------------------------------------------------

    @property
    def num_loops(self) -> int:
        """M, the number of loops."""
        return len(self.numerators)

    @property
    def step_sizes(self) -> tuple[float, ...]:
        """Δ_1..Δ_M as correctly rounded floats."""
        return tuple(n / self.grid for n in self.numerators)

    @property
    def times(self) -> tuple[float, ...]:
        """t_0..t_{M-1}: the time at which each loop starts, as correctly rounded floats."""
        return tuple(n / self.grid for n in (0, *itertools.accumulate(self.numerators[:-1])))

    @property
    def is_uniform(self) -> bool:
        """Whether all steps are equal."""
        return len(set(self.numerators)) == 1

    def reversed(self) -> Schedule:
        """The same steps in the opposite order."""
        return Schedule(self.numerators[::-1], self.grid)

    def __str__(self) -> str:
        return ",".join(f"{n}/{self.grid}" for n in self.numerators)

    def __repr__(self) -> str:
        return f"Schedule({str(self)!r})"


def _step_size(step: Any, schedule: Any) -> Fraction:
    """Return a step size as a fraction; integers are shares that are divided by their sum."""
    try:
        if not STEP_SIZE.fullmatch(text := str(step)):
            raise ValueError
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as error:  # ValueError also: str of a whole number of thousands of digits
        raise ConfigError(
            f"schedule={shorten(schedule)} has the step size {shorten(step)}, which is not a number of at most 12 digits; "
            "write fractions such as 1/2,1/4,1/4, or integers such as 2,1,1"
        ) from error


SCHEDULE_KINDS = ("uniform", "coarse-first", "fine-first")


def check_num_loops(num_loops: int, *, name: str = "num_loops") -> int:
    """Return a number of loops, or raise ConfigError when it is not a whole number from 1 to MAX_LOOPS."""
    try:
        count = 0 if isinstance(num_loops, bool) else operator.index(num_loops)
    except (TypeError, RuntimeError):  # a tensor has an index method, and refuses to use it on several numbers
        count = 0
    if count < 1:
        raise ConfigError(
            f"{name}={shorten(num_loops)} must be a whole number of at least 1; give the number of passes to run"
        )
    if count > MAX_LOOPS:
        raise ConfigError(f"{name}={shorten(num_loops)} must be at most {MAX_LOOPS:,}; give fewer passes to run")
    return count


def all_schedules(num_loops: int, *, grid: int) -> Iterator[Schedule]:
    """Yield every schedule of `num_loops` steps on multiples of 1/grid: the compositions of `grid`, coarse first.

    Example:
        >>> [str(s) for s in all_schedules(2, grid=3)]
        ['2/3,1/3', '1/3,2/3']
    """
    if count_schedules(num_loops, grid=grid) == 0:
        raise ConfigError(f"num_loops={num_loops} does not fit a grid of 1/{grid}; use at most {grid} loops")
    for cuts in itertools.combinations(range(grid - 1, 0, -1), num_loops - 1):
        bounds = (0, *reversed(cuts), grid)
        yield Schedule(tuple(b - a for a, b in itertools.pairwise(bounds)), grid)


def count_schedules(num_loops: int, *, grid: int) -> int:
    """Number of schedules of `num_loops` steps on the grid: C(grid - 1, num_loops - 1)."""
    return math.comb(grid - 1, check_num_loops(num_loops) - 1)


def is_uniform_text(text: str) -> bool:
    """Whether the steps of a schedule that `str` has written are all equal; what records keep is text."""
    return len(set(text.split(","))) == 1
