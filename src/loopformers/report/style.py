"""What every figure is drawn with: colours, line styles, axes and legends.

Colours are those of Okabe and Ito (2008), which stay apart under every common colour blindness, less black and yellow,
which vanish on dark and on light paper; line styles and markers tell curves apart where there is no colour. matplotlib is
imported inside functions. Figures are built on matplotlib's defaults, whatever a user's matplotlibrc says.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "GRID",
    "INK",
    "MUTED",
    "PALETTE",
    "PAPER",
    "WIDTH_INCHES",
    "cell_edges",
    "drawable",
    "house_style",
    "is_positive",
    "line_styles",
    "log_axis",
    "new_figure",
    "plain_ticks",
    "running_median",
    "shared_legend",
]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Blue, vermilion, bluish green, reddish purple, sky blue, orange."""

LINE_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
"""Text; ticks and reference lines; grid lines; background. A page in dark mode replaces these four by name."""

WIDTH_INCHES = 5.2
"""Narrow enough that text stays legible where a figure is scaled to a telephone."""

STYLE: Mapping[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": PAPER,
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "loopformers",  # equal figures are equal files
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Draw in the house style for as long as a block lasts."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(
    *,
    rows: int = 1,
    columns: int = 1,
    width: float = WIDTH_INCHES,
    height: float,
    share_x: bool = True,
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Return a figure that no global state knows of, and its axes, row by row. Sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, sharex=share_x, sharey=share_y, squeeze=False).flat)


def line_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give each label, in order of first appearance, its own colour, line style and marker."""
    styles = {}
    for i, label in enumerate(dict.fromkeys(labels)):
        turn = i + i // len(PALETTE)  # a second round of colours takes other line styles
        styles[label] = {
            "color": PALETTE[i % len(PALETTE)],
            "linestyle": LINE_STYLES[turn % len(LINE_STYLES)],
            "marker": MARKERS[turn % len(MARKERS)],
        }
    return styles


def log_axis(ax: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic, with plain numbers, where it has a positive value to show."""
    positive = [value for value in values if is_positive(value)]
    if not positive:
        return  # a logarithmic axis without a positive value cannot be drawn
    set_scale = ax.set_xscale if which == "x" else ax.set_yscale
    set_scale("log")
    plain_ticks(ax.xaxis if which == "x" else ax.yaxis, positive, at_values=which == "x")


def plain_ticks(axis: Any, values: Sequence[float], *, at_values: bool = False) -> None:
    """Label a logarithmic axis with plain numbers: at the values themselves when they are few, else at round numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    distinct = sorted(set(values))
    spread = math.log10(high / low) if high > low else 0.0
    if at_values and len(distinct) <= 10:
        axis.set_major_locator(FixedLocator(distinct))
    elif spread < 1:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    elif spread < 3:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_major_locator(LogLocator(numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 and value == round(value) else f"{value:g}"


def shared_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Put one legend above all axes, with each label once."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        longest = max(map(len, entries))
        characters = int(68 * figure.get_figwidth() / WIDTH_INCHES)
        columns = max(1, min(len(entries), characters // (longest + 9)))
        figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=columns)


def drawable(value: float | None, log: bool) -> float:
    """Return a value, or nan, which leaves a gap, where an axis cannot show it."""
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return math.nan
    return float(value)


def is_positive(value: float | None) -> TypeGuard[float]:
    """Whether a value has a place on a logarithmic axis."""
    return value is not None and math.isfinite(value) and value > 0


def running_median(values: Sequence[float], window: int) -> list[float]:
    """Return the median of the `window` values around each; nan stays nan, and counts in no other's median."""
    half = window // 2
    smoothed = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - half) : i + half + 1] if not math.isnan(v)]
        smoothed.append(math.nan if math.isnan(value) else statistics.median(near))
    return smoothed


def cell_edges(steps: Sequence[float]) -> list[float]:
    """Borders of cells around rising positions: halfway to each neighbour."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    return [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]
