"""Plots of training and evaluation, each a matplotlib `Figure` that no global state knows of.

See `style` for what they are drawn with. matplotlib is imported inside functions.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loopformers.errors import ConfigError, unknown_name
from loopformers.files import write_whole
from loopformers.report.style import (
    MUTED,
    cell_edges,
    drawable,
    house_style,
    is_positive,
    line_styles,
    log_axis,
    new_figure,
    plain_ticks,
    running_median,
    shared_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FIGURE_FORMATS",
    "Curve",
    "FigureFormat",
    "Panel",
    "ResidualMap",
    "figure_bytes",
    "gradient_norm_panel",
    "loss_panel",
    "plot_budgets",
    "plot_over_steps",
    "plot_points",
    "plot_residual_maps",
    "plot_residual_norms",
    "save_figure",
]

RING: Mapping[str, Any] = {
    "marker": "o",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgewidth": 1.4,
    "linestyle": "none",
}
"""Marks the budget that a model was trained at."""

FigureFormat = Literal["svg", "png"]
FIGURE_FORMATS = ("svg", "png")

PNG_DPI = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """One labelled line. Values that are None or not finite leave a gap.

    Args:
        label: Legend text. A label has one colour and line style in all panels of a figure.
        x: Steps, loops or budgets.
        y: As many values.

    Raises:
        ConfigError: Another number of values than of positions.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ConfigError(
                f"curve {self.label!r} has {len(self.x)} positions and {len(self.y)} values; give equally many"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes in a figure over steps.

    Args:
        y_label: What is measured, with its unit.
        curves: In order.
        title: Above the panel.
        log: Logarithmic y axis.
        levels: Horizontal reference lines, from label to value.
        smoothing: Steps of a centred running median that is drawn over the raw values, which fade; the panel's title
            says so. 1: raw values alone.

    Raises:
        ConfigError: A smoothing window that is not an odd number of at least 1.
    """

    y_label: str
    curves: Sequence[Curve]
    title: str = ""
    log: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    smoothing: int = 1

    def __post_init__(self) -> None:
        if self.smoothing < 1 or self.smoothing % 2 == 0:
            raise ConfigError(
                f"smoothing={self.smoothing} must be an odd number of steps of at least 1; 1 smooths nothing"
            )


@dataclass(frozen=True, slots=True)
class ResidualMap:
    """Residual norms of one model over training.

    Args:
        label: Name of the model.
        steps: (records,) steps.
        norms: (records, loops) mean L2 norm over tokens of the residual stream before each loop's closing norm.

    Raises:
        ConfigError: No records, records of unequal numbers of loops, or another number of records than of steps.
    """

    label: str
    steps: Sequence[float]
    norms: Sequence[Sequence[float | None]]

    def __post_init__(self) -> None:
        if not self.norms or len(self.norms) != len(self.steps) or len({len(row) for row in self.norms}) != 1:
            raise ConfigError(
                f"residual map {self.label!r} has {len(self.steps)} steps and {len(self.norms)} records of "
                f"{sorted({len(row) for row in self.norms})} loops; give one record a step, all of one number of loops"
            )


# -- what a report shows -----------------------------------------------------------------------------------------


def loss_panel(
    curves: Sequence[Curve], *, unigram_cross_entropy: float | None = None, smoothing: int = 1, title: str = "Loss"
) -> Panel:
    """Return a panel of losses in nats per token, with the level of a model that ignores its context."""
    levels = {} if unigram_cross_entropy is None else {"unigram level": unigram_cross_entropy}
    return Panel(y_label="loss (nats per token)", curves=curves, title=title, levels=levels, smoothing=smoothing)


def gradient_norm_panel(curves: Sequence[Curve], *, smoothing: int = 1, title: str = "Gradient norm") -> Panel:
    """Return a panel of global gradient norms before clipping, on a logarithmic axis."""
    return Panel(y_label="L2 norm before clipping", curves=curves, title=title, log=True, smoothing=smoothing)


def plot_over_steps(panels: Sequence[Panel], *, x_label: str = "step (optimiser updates)") -> Figure:
    """Draw panels one above the other, over the same steps, under one legend.

    Args:
        panels: Top to bottom.
        x_label: Of the shared axis.

    Raises:
        ConfigError: No panels.
    """
    if not panels:
        raise ConfigError("a figure of 0 panels shows nothing; give at least one")
    with house_style():
        figure, axes = new_figure(rows=len(panels), height=0.6 + 2.1 * len(panels))
        styles = line_styles([curve.label for panel in panels for curve in panel.curves])
        for panel, ax in zip(panels, axes, strict=True):
            _draw_panel(ax, panel, styles)
        axes[-1].set_xlabel(x_label)
        shared_legend(figure, axes)
    return figure


def plot_residual_norms(
    curves: Sequence[Curve], *, y_label: str = "mean L2 norm of a token", log: bool = True
) -> Figure:
    """Draw the residual norm of each loop, one line a model.

    Args:
        curves: `x` holds loops, 1 .. T.
        y_label: Of the norm.
        log: Logarithmic y axis.

    Raises:
        ConfigError: No curves.
    """
    return plot_counts(curves, x_label="loop", y_label=y_label, log_x=False, log_y=log, marked={})


def plot_residual_maps(maps: Sequence[ResidualMap]) -> Figure:
    """Draw the residual norm by loop and step as heat maps, one a model, on one logarithmic colour scale.

    Raises:
        ConfigError: No maps, or no positive norm in any of them.
    """
    values = positive_norms(maps)
    with house_style():
        figure, axes = new_figure(rows=len(maps), height=0.7 + 1.7 * len(maps), share_y=same_depth(maps))
        draw_residual_maps(figure, axes, maps, values)
        for ax in axes:
            ax.set_ylabel("loop")
        axes[-1].set_xlabel("step (optimiser updates)")
    return figure


def positive_norms(maps: Sequence[ResidualMap]) -> list[float]:
    """Return the norms that a logarithmic scale can show.

    Raises:
        ConfigError: There are none.
    """
    values = [value for m in maps for row in m.norms for value in row if is_positive(value)]
    if not values:
        raise ConfigError(f"{len(maps)} residual maps hold no positive norm, so there is nothing to draw; give records")
    return values


def same_depth(maps: Sequence[ResidualMap]) -> bool:
    """Whether all maps have as many loops."""
    return len({len(m.norms[0]) for m in maps}) == 1


def draw_residual_maps(
    figure: Figure, axes: Sequence[Axes], maps: Sequence[ResidualMap], values: Sequence[float]
) -> None:
    """Draw one map on each of the axes, and the scale of all of them, which holds `values`, beside these."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = min(values), max(values)
    norm = LogNorm(vmin=low, vmax=high if high > low else low * 1.01)
    image: Any = None
    for m, ax in zip(maps, axes, strict=True):
        grid = np.array([[v if is_positive(v) else math.nan for v in row] for row in m.norms], dtype=float).T
        image = ax.pcolormesh(
            cell_edges(m.steps),
            np.arange(len(grid) + 1) + 0.5,
            np.ma.masked_invalid(grid),
            norm=norm,
            cmap="cividis",
            rasterized=True,
        )
        ax.set_title(m.label)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        ax.grid(visible=False)
    bar = figure.colorbar(image, ax=list(axes), label="mean L2 norm of a token", pad=0.02)
    plain_ticks(bar.ax.yaxis, values)
    bar.ax.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def plot_budgets(
    curves: Sequence[Curve],
    *,
    y_label: str = "perplexity",
    x_label: str = "loops run (M)",
    log_y: bool = True,
    trained_loops: Mapping[str, float] | None = None,
) -> Figure:
    """Draw quality against budget, one line a model.

    Args:
        curves: `x` holds budgets: loops, or FLOPs per token.
        y_label: The measure, with its unit.
        x_label: The budget, with its unit.
        log_y: Logarithmic y axis.
        trained_loops: By label, the budget that the model was trained at; a ring marks it.

    Raises:
        ConfigError: No curves, or a trained budget of a label that no curve has.
    """
    marked = dict(trained_loops or {})
    if unknown := sorted(marked.keys() - {curve.label for curve in curves}):
        raise ConfigError(unknown_name("trained_loops", unknown[0], [curve.label for curve in curves]))
    return plot_counts(curves, x_label=x_label, y_label=y_label, log_x=True, log_y=log_y, marked=marked)


def plot_points(curves: Sequence[Curve], *, x_label: str, y_label: str) -> Figure:
    """Draw points without lines, each curve's in its own colour and marker; the first, the crowd, small and faint.

    Args:
        curves: The crowd, then points that are to stand out, drawn as open marks around those of the crowd.
        x_label: With its unit.
        y_label: With its unit.

    Raises:
        ConfigError: No curves.
    """
    if not curves:
        raise ConfigError("a figure of 0 curves shows nothing; give at least one")
    with house_style():
        figure, (ax,) = new_figure(height=3.1)
        styles = line_styles([curve.label for curve in curves[1:]])
        crowd = curves[0]
        ax.plot(crowd.x, [drawable(y, False) for y in crowd.y], "o", color=MUTED, alpha=0.6, label=crowd.label)
        for curve in curves[1:]:
            style = {"color": styles[curve.label]["color"], "marker": styles[curve.label]["marker"]}
            y = [drawable(value, False) for value in curve.y]
            ax.plot(curve.x, y, label=curve.label, **{**RING, **style, "markersize": 9})
        ax.set_xlabel(x_label)
        ax.set_ylabel(y_label)
        shared_legend(figure, [ax])
    return figure


# -- files -------------------------------------------------------------------------------------------------------


def figure_bytes(figure: Figure, kind: FigureFormat = "svg") -> bytes:
    """Return a figure as a file's bytes. An SVG holds text as outlines and no date; a PNG has 200 dots an inch.

    Raises:
        ConfigError: Unknown format.
    """
    if kind not in FIGURE_FORMATS:
        raise ConfigError(unknown_name("kind", kind, FIGURE_FORMATS))
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else {"Software": None}
    with house_style():  # ticks are made when a figure is drawn
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as .svg or .png, by the ending of the name. The file appears whole or not at all.

    Raises:
        ConfigError: Another ending.
    """
    target = Path(path)
    kind = target.suffix.lower().lstrip(".")
    if kind not in FIGURE_FORMATS:
        raise ConfigError(f"path={os.fspath(path)!r} ends in {target.suffix!r}; figures are written as .svg or .png")
    return write_whole(target, figure_bytes(figure, "svg" if kind == "svg" else "png"))


# -- parts -------------------------------------------------------------------------------------------------------


def _draw_panel(ax: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]]) -> None:
    title = panel.title
    values: list[float] = list(panel.levels.values())
    for curve in panel.curves:
        style = {**styles[curve.label], "marker": "" if len(curve.x) > 1 else styles[curve.label]["marker"]}
        y = [drawable(value, panel.log) for value in curve.y]
        values += y
        if panel.smoothing > 1:
            ax.plot(curve.x, y, color=style["color"], linewidth=0.7, alpha=0.35)
            y = running_median(y, panel.smoothing)
        ax.plot(curve.x, y, label=curve.label, **style)
    if panel.smoothing > 1:
        title = f"{title}, with a running median of {panel.smoothing} values".removeprefix(", ")
    for label, level in panel.levels.items():
        ax.axhline(level, label=label, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
    if panel.log:
        log_axis(ax, "y", values)
    ax.set_title(title)
    ax.set_ylabel(panel.y_label)


def plot_counts(
    curves: Sequence[Curve], *, x_label: str, y_label: str, log_x: bool, log_y: bool, marked: Mapping[str, float]
) -> Figure:
    """Draw curves over counts. `marked`: by label, the place of a ring."""
    if not curves:
        raise ConfigError("a figure of 0 curves shows nothing; give at least one")
    with house_style():
        from matplotlib.ticker import FixedLocator, MaxNLocator

        figure, (ax,) = new_figure(height=3.1)
        styles = line_styles([curve.label for curve in curves])
        for curve in curves:
            y = [drawable(value, log_y) for value in curve.y]
            ax.plot(curve.x, y, label=curve.label, **styles[curve.label])
            trained = marked.get(curve.label)
            if trained is not None and trained in curve.x:
                reached = y[list(curve.x).index(trained)]
                ax.plot([trained], [reached], color=styles[curve.label]["color"], **RING)
        if any(curve.label in marked for curve in curves):
            ax.plot([], [], color=MUTED, label="trained budget", **RING)
        if log_x:
            log_axis(ax, "x", [x for curve in curves for x in curve.x])
        else:
            deepest = max((x for curve in curves for x in curve.x), default=1)
            every_loop = FixedLocator(range(1, int(deepest) + 1))
            ax.xaxis.set_major_locator(every_loop if deepest <= 16 else MaxNLocator(nbins=12, integer=True))
        if log_y:
            log_axis(ax, "y", [value for curve in curves for value in curve.y if value is not None])
        ax.set_xlabel(x_label)
        ax.set_ylabel(y_label)
        shared_legend(figure, [ax])
    return figure
