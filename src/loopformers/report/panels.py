"""Plots of many panels on the same axes: one panel a system, one line a number of loops, a band for the range over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopformers.errors import ConfigError
from loopformers.report.plots import ResidualMap, draw_residual_maps, positive_norms, same_depth
from loopformers.report.style import INK, MUTED, drawable, house_style, line_styles, log_axis, new_figure, shared_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Axis", "Line", "LinePanel", "plot_line_panels", "plot_map_panels"]

PANEL_INCHES = (3.0, 2.1)
"""Width and height of a panel."""

WITH_LEGEND_INCHES = (4.9, 2.7)
"""The same with a legend beside it."""

MOST_MARKED = 16
"""Points up to which a line marks each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One labelled line, with a band from `low` to `high` where they are given. None and what is not finite leaves a gap.

    Args:
        label: Legend text; it has one colour and line style in all panels.
        x: Steps, loops or budgets.
        y: As many values: the median over seeds, or one seed's.
        low: Least value over seeds; empty: no band.
        high: Largest value over seeds; empty: no band.

    Raises:
        ConfigError: Unequal numbers of values.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        bounds = [len(values) for values in (self.low, self.high) if values]
        if {len(self.y), *bounds} != {len(self.x)} or len(bounds) == 1:
            raise ConfigError(
                f"line {self.label!r} has {len(self.x)} positions, {len(self.y)} values and bands of {bounds}; give equally "
                "many, and both bounds or none"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePanel:
    """The lines of one panel.

    Args:
        title: Above it.
        lines: In order.
    """

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One of the two axes that all panels share.

    Args:
        label: What it shows, with its unit.
        log: Logarithmic.
        at_values: Ticks at the values themselves: counts of loops.
        levels: Reference lines across a y axis, from label to value.
        limits: Where a y axis is cut; None: at the data.
    """

    label: str
    log: bool = False
    at_values: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    limits: tuple[float, float] | None = None


def plot_line_panels(
    panels: Sequence[LinePanel],
    *,
    x: Axis,
    y: Axis,
    columns: int = 3,
    labels: Sequence[str] = (),
    own_legends: bool = False,
) -> Figure:
    """Draw lines in panels that share both axes, under one legend or each with its own.

    Args:
        panels: Row by row.
        x: Below the panels.
        y: Beside them.
        columns: Panels in a row.
        labels: In the order of their colours, so that figures agree on them; others follow in order of appearance.
        own_legends: For more lines than colours: each panel has a legend beside it and begins with the first colour again.
            Lines of `labels` are references: they have the colour of text in every panel.

    Raises:
        ConfigError: No panels.
    """
    if not panels:
        raise ConfigError("a figure of 0 panels shows nothing; give at least one")
    with house_style():
        size = WITH_LEGEND_INCHES if own_legends else PANEL_INCHES
        figure, axes = _grid(len(panels), columns, x.label, y.label, share_y=True, size=size)
        lines = [line for panel in panels for line in panel.lines]
        styles = line_styles([*labels, *(line.label for line in lines)])
        for panel, ax in zip(panels, axes, strict=True):
            ax.set_title(panel.title)
            if own_legends:
                styles = line_styles([line.label for line in panel.lines if line.label not in labels])
                styles |= {label: {**style, "color": INK} for label, style in line_styles(labels).items()}
            for line in panel.lines:
                _draw(ax, line, styles[line.label], log=y.log)
            for label, level in y.levels.items():
                ax.axhline(level, label=label, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
        positions = [position for line in lines for position in line.x]
        values = [v for line in lines for v in (*line.y, *line.low, *line.high) if v is not None]
        if x.log:
            log_axis(axes[0], "x", positions)
        elif x.at_values:
            from matplotlib.ticker import FixedLocator, MaxNLocator

            distinct = sorted(set(positions))
            axes[0].xaxis.set_major_locator(
                FixedLocator(distinct) if len(distinct) <= MOST_MARKED else MaxNLocator(nbins=8, integer=True)
            )
        if y.log:
            log_axis(axes[0], "y", [*values, *y.levels.values()])
        if y.limits is not None:
            axes[0].set_ylim(*y.limits)
        if own_legends:
            for ax in axes:
                ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), borderaxespad=0.2)
        else:
            shared_legend(figure, axes)
    return figure


def plot_map_panels(maps: Sequence[ResidualMap], *, columns: int = 3) -> Figure:
    """Draw residual norms by loop and step as heat maps on one logarithmic colour scale and the same axes.

    Raises:
        ConfigError: No maps, or no positive norm in any of them.
    """
    values = positive_norms(maps)
    with house_style():
        figure, axes = _grid(len(maps), columns, "step (optimiser updates)", "loop", share_y=same_depth(maps))
        draw_residual_maps(figure, axes, maps, values)
    return figure


def _grid(
    count: int,
    columns: int,
    x_label: str,
    y_label: str,
    *,
    share_y: bool,
    size: tuple[float, float] = PANEL_INCHES,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its first `count` axes; each panel without one below it carries the label of the x axis."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width, height = size
    figure, axes = new_figure(
        rows=rows,
        columns=columns,
        width=0.7 + width * max(columns, 1.5),
        height=0.8 + height * rows,
        share_y=share_y,
    )
    for number, ax in enumerate(axes[:count]):
        if number % columns == 0:
            ax.set_ylabel(y_label.replace(" (", "\n("))  # the unit on a line of its own: panels are low
        if number + columns >= count:
            ax.set_xlabel(x_label)
            ax.tick_params(labelbottom=True)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _draw(ax: Axes, line: Line, style: Mapping[str, Any], *, log: bool) -> None:
    y = [drawable(value, log) for value in line.y]
    if line.low:
        low, high = ([drawable(value, log) for value in values] for values in (line.low, line.high))
        if len(line.x) > 1:
            ax.fill_between(line.x, low, high, color=style["color"], alpha=0.2, linewidth=0)
        else:
            ax.vlines(line.x, low, high, color=style["color"], alpha=0.6)
    marker = style["marker"] if len(line.x) <= MOST_MARKED else ""
    ax.plot(line.x, y, label=line.label, **{**style, "marker": marker, "linewidth": 1.3})
