"""What the figures of studies are made of: medians over seeds as lines, their ranges as bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopformers.report.panels import Line
from loopformers.studies.groups import Groups, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["StudyFigure", "line_of", "unigram_level"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFigure:
    """A figure and what a reader needs to judge it."""

    name: str
    """Of its file."""
    figure: Figure
    alt: str
    """What it shows, for those who do not see it."""
    caption: str
    """What it means."""
    formula: str
    """How the shown quantity is computed."""

    @property
    def wide(self) -> bool:
        """Whether it has panels side by side."""
        return len(self.figure.axes) > 1


def line_of(label: str, x: Sequence[float], spreads: Sequence[Spread | None]) -> Line:
    """Return medians as a line, with a band from the least to the largest; what is not finite leaves a gap."""

    def values(bound: str) -> list[float | None]:
        return [None if s is None or math.isinf(getattr(s, bound)) else getattr(s, bound) for s in spreads]

    return Line(label=label, x=x, y=values("median"), low=values("low"), high=values("high"))


def unigram_level(groups: Groups) -> dict[str, float]:
    """Return the reference line of the unigram level, where all cells share one."""
    levels = {round(float(result.run["unigram_loss"]), 3) for group in groups for result in group.results}
    return {"unigram level": levels.pop()} if len(levels) == 1 else {}
