"""Cells that differ in their seed alone, taken together: medians and ranges over seeds, and the one-pass group beside each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from loopformers.studies.grid import Label
from loopformers.studies.results import CellResult

__all__ = ["Group", "Groups", "Measure", "Spread", "Variant", "variant_name"]

Measure = Callable[[CellResult], float | None]
"""From a result to a number; None: not measured, which is left out. An infinite one counts: a run may have diverged."""

Variant = tuple[tuple[str, Label], ...]
"""A grid's further axes and what they are at; empty: none."""

CANONICAL = ("system", "loops", "seed")

LARGEST_DIFFERENCE = 0.25
"""How far, as a share, the parameters of a one-pass model may be from those of the looped one that it stands beside."""


def variant_name(variant: Variant) -> str:
    """Return a variant in words: `matrix_lr 0.03, gqa`."""
    return ", ".join(f"{axis.rpartition('.')[2]} {label}" if "." in axis else str(label) for axis, label in variant)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the values that are there, or None for none."""
        known = [value for value in values if value is not None and not math.isnan(value)]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    @property
    def width(self) -> float:
        """Largest less least."""
        return self.high - self.low


@dataclass(frozen=True)
class Group:
    """The results of one system, number of loops and variant, by seed."""

    system: str
    loops: int
    variant: Variant
    results: tuple[CellResult, ...]

    @property
    def variant_name(self) -> str:
        """The variant in words."""
        return variant_name(self.variant)

    @property
    def label(self) -> str:
        """System and variant."""
        return f"{self.system}, {self.variant_name}" if self.variant else self.system

    @cached_property
    def by_seed(self) -> dict[Label, CellResult]:
        """Results by seed."""
        return {result.axes["seed"]: result for result in self.results}

    @property
    def num_parameters(self) -> int:
        """Of its models."""
        return int(self.results[0].run["num_parameters"])

    def spread(self, measure: Measure) -> Spread | None:
        """Return a measure's spread over seeds."""
        return Spread.of(measure(result) for result in self.results)

    def verdicts(self) -> str:
        """Return how often each verdict fell: `3 stable`, or `2 collapsed, 1 stable`."""
        found = [str(result.run["verdict"]) for result in self.results]
        counts = {
            verdict: found.count(verdict) for verdict in dict.fromkeys(sorted(found, key=lambda v: -found.count(v)))
        }
        return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


class Groups:
    """All groups of a study, in the order of the grid, with loops ascending within a system.

    Args:
        results: Of cells that have an outcome.
    """

    def __init__(self, results: Sequence[CellResult]) -> None:
        found: dict[tuple[Variant, str, int], list[CellResult]] = {}
        for result in results:
            variant = tuple((axis, label) for axis, label in result.axes.items() if axis not in CANONICAL)
            found.setdefault((variant, str(result.axes["system"]), int(str(result.axes["loops"]))), []).append(result)
        self.variants = list(dict.fromkeys(variant for variant, _, _ in found))
        self.systems = list(dict.fromkeys(system for _, system, _ in found))
        order = sorted(found, key=lambda key: (self.variants.index(key[0]), self.systems.index(key[1]), key[2]))
        self.all = [
            Group(
                system,
                loops,
                variant,
                tuple(sorted(found[variant, system, loops], key=lambda r: int(str(r.axes["seed"])))),
            )
            for variant, system, loops in order
        ]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.all)

    def one_pass(self, group: Group) -> Group | None:
        """Return what stands beside a group: T = 1 of its own system and variant, else of its variant in the system that is
        nearest in parameters, at most a quarter apart.

        Systems that differ in their recurrence alone are the same model at T = 1, so one of them is enough; what a recurrence
        or a conditioning owns comes on top.
        """
        once = [other for other in self.all if other.loops == 1 and other.variant == group.variant]
        own = [other for other in once if other.system == group.system]
        matched = [
            other for other in once if abs(other.num_parameters / group.num_parameters - 1) <= LARGEST_DIFFERENCE
        ]
        nearest = sorted(matched, key=lambda other: abs(other.num_parameters - group.num_parameters))
        return next(iter([*own, *nearest]), None)

    def looped(self) -> list[Group]:
        """Return the groups of more than one loop."""
        return [group for group in self.all if group.loops > 1]

    def looped_of(self, system: str, variant: Variant) -> list[Group]:
        """Return the groups of more than one loop of a system and variant, in order of their loops."""
        return [group for group in self.looped() if (group.system, group.variant) == (system, variant)]

    def find(self, system: str, loops: int, variant: Variant = ()) -> Group | None:
        """Return one group, or None."""
        return next((g for g in self.all if (g.system, g.loops, g.variant) == (system, loops, variant)), None)
