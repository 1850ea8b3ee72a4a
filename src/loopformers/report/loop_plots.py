"""Plots of what loops do: curves over loops, similarity maps, trajectories and the logit lens; on the house style of `plots`.

Panels of one figure share their axes and colour scale, so that compared models are read against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopformers.errors import ConfigError
from loopformers.report.plots import Curve, plot_counts
from loopformers.report.style import INK, MUTED, PALETTE, house_style, line_styles, new_figure, shared_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "LensGrid",
    "PathPanel",
    "SimilarityMap",
    "plot_lens",
    "plot_over_loops",
    "plot_paths",
    "plot_similarity_maps",
]

MOST_NUMBERED = 8
"""Loops up to which a similarity map shows its numbers; more would not be legible."""

DARK_TEXT, LIGHT_TEXT = "#101418", "#fdfdfd"
"""Text on coloured cells. Not INK: a page in dark mode changes that, and the cells stay."""

Path = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class SimilarityMap:
    """Similarity of every two loops of one run.

    Args:
        label: Of the run.
        values: (loops, loops); nan where there is none.

    Raises:
        ConfigError: Not square, or empty.
    """

    label: str
    values: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if not self.values or any(len(row) != len(self.values) for row in self.values):
            raise ConfigError(
                f"similarity map {self.label!r} has {len(self.values)} rows of {sorted({len(row) for row in self.values})} "
                "values; give one row and one column a loop"
            )


@dataclass(frozen=True, slots=True)
class PathPanel:
    """Ways through a plane, of one model.

    Args:
        title: Above the panel.
        paths: By label, the mean token's way: a point a loop.
        token_paths: Single tokens' ways, drawn faintly: those of the first path.
    """

    title: str
    paths: Sequence[tuple[str, Path]]
    token_paths: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LensGrid:
    """What each loop would answer at some positions.

    Args:
        given: The token at each position.
        following: The token that really comes next.
        answers: Likeliest next token, (loops, positions).
        probabilities: Its probability, same shape.
        settled: Loop, counted from 1, from which on each position's answer stays.
    """

    given: Sequence[str]
    following: Sequence[str]
    answers: Sequence[Sequence[str]]
    probabilities: Sequence[Sequence[float]]
    settled: Sequence[int]


def plot_over_loops(curves: Sequence[Curve], *, y_label: str, log: bool = False) -> Figure:
    """Draw a measure of each loop, one line a run.

    Args:
        curves: `x` holds loops, 1 .. M.
        y_label: The measure, with its unit.
        log: Logarithmic y axis.

    Raises:
        ConfigError: No curves.
    """
    return plot_counts(curves, x_label="loop", y_label=y_label, log_x=False, log_y=log, marked={})


def plot_similarity_maps(maps: Sequence[SimilarityMap], *, label: str = "linear CKA") -> Figure:
    """Draw maps of loops against loops, two in a row, on one colour scale, which ends at 1.

    Args:
        maps: Row by row.
        label: Of the colour scale.

    Raises:
        ConfigError: No maps.
    """
    if not maps:
        raise ConfigError("a figure of 0 maps shows nothing; give at least one")
    with house_style():
        import numpy as np
        from matplotlib.ticker import MaxNLocator

        columns = min(2, len(maps))
        rows = -(-len(maps) // columns)
        known = [value for m in maps for row in m.values for value in row if math.isfinite(value)]
        lowest = min(known, default=0.0)
        low = min(math.floor(lowest * 100) / 100, 0.99)  # a scale that ends at round numbers, and is never empty
        figure, axes = new_figure(rows=rows, columns=columns, share_x=False, height=0.6 + rows * (0.65 + 4.4 / columns))
        image: Any = None
        for m, ax in zip(maps, axes, strict=False):
            size = len(m.values)
            grid = np.ma.masked_invalid(np.array(m.values, dtype=float))
            edges = np.arange(size + 1) + 0.5
            image = ax.pcolormesh(edges, edges, grid, vmin=low, vmax=1.0, cmap="cividis", rasterized=True)
            ax.set_aspect("equal")
            ax.set_title(m.label)
            ax.set_xlabel("loop")
            ax.set_ylabel("loop")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            ax.grid(visible=False)
            if size <= MOST_NUMBERED:
                for i, row in enumerate(m.values, start=1):
                    for j, value in enumerate(row, start=1):
                        if math.isfinite(value):
                            text = f"{value:.2f}".removeprefix("0")
                            _cell(ax, j, i, "1" if text == "1.00" else text, (value - low) / (1 - low), size=7)
        for ax in axes[len(maps) :]:
            ax.set_visible(False)
        figure.colorbar(image, ax=list(axes), label=label, location="bottom", pad=0.03, shrink=0.6, aspect=30)
    return figure


def plot_paths(panels: Sequence[PathPanel], *, x_label: str, y_label: str) -> Figure:
    """Draw ways through a plane, one panel a model, on the same axes of equal scale. A ring marks where a way ends.

    Raises:
        ConfigError: No panels.
    """
    if not panels:
        raise ConfigError("a figure of 0 panels shows nothing; give at least one")
    with house_style():
        figure, axes = new_figure(columns=len(panels), height=1.4 + 4.1 / len(panels), share_y=True)
        styles = line_styles([label for panel in panels for label, _ in panel.paths])
        for panel, ax in zip(panels, axes, strict=True):
            for path in panel.token_paths:
                ax.plot(*zip(*path, strict=True), color=MUTED, linewidth=0.6, alpha=0.5)
            for label, path in panel.paths:
                style = styles[label]
                ax.plot(*zip(*path, strict=True), label=label, **{**style, "markersize": 3.5})
                ax.plot(*path[-1], marker="o", markersize=9, markerfacecolor="none", color=style["color"])
            if panel.token_paths:
                ax.plot([], [], color=MUTED, linewidth=0.6, label="single tokens")
            ax.plot(
                [], [], color=MUTED, marker="o", markersize=9, markerfacecolor="none", linestyle="none", label="end"
            )
            ax.set_title(panel.title)
            ax.set_aspect("equal")
            ax.set_xlabel(x_label)
        axes[0].set_ylabel(y_label)
        axes[0].set(
            **_square([path for panel in panels for path in (*panel.token_paths, *(way for _, way in panel.paths))])
        )  # the others share its limits
        shared_legend(figure, axes)
    return figure


def plot_lens(grid: LensGrid, *, title: str = "") -> Figure:
    """Draw a logit lens: a row a loop, the last at the top, a column a position; a frame marks from where an answer stays.

    Args:
        grid: What to draw.
        title: Above the figure.

    Raises:
        ConfigError: No loops or no positions.
    """
    if not grid.answers or not grid.given:
        raise ConfigError(
            f"a lens of {len(grid.answers)} loops and {len(grid.given)} positions shows nothing; give both"
        )
    with house_style():
        import numpy as np
        from matplotlib.patches import Rectangle

        loops, positions = len(grid.answers), len(grid.given)
        figure, (ax,) = new_figure(height=1.5 + 0.3 * loops)
        colours = np.array(grid.probabilities, dtype=float)
        image = ax.pcolormesh(
            np.arange(positions + 1) - 0.5, np.arange(loops + 1) + 0.5, colours, vmin=0, vmax=1, cmap="cividis",
            rasterized=True,
        )  # fmt: skip
        for t, (answers, shares) in enumerate(zip(grid.answers, grid.probabilities, strict=True), start=1):
            for i, (answer, share) in enumerate(zip(answers, shares, strict=True)):
                _cell(ax, i, t, _shown(answer), share, size=7)
        for i, settled in enumerate(grid.settled):
            box = Rectangle((i - 0.47, settled - 0.45), 0.94, loops - settled + 0.9)
            box.set(fill=False, edgecolor=PALETTE[1], linewidth=1.6)
            ax.add_patch(box)
        ax.set_xticks(range(positions), [_shown(token) for token in grid.given], parse_math=False)
        ax.set_yticks(range(1, loops + 1, -(-loops // 12)))
        ax.set_xlabel("token that the model is given")
        ax.set_ylabel("loop")
        ax.grid(visible=False)
        top = ax.secondary_xaxis("top")
        top.set_xticks(range(positions), [_shown(token) for token in grid.following], parse_math=False)
        top.set_xlabel("token that comes next")
        top.tick_params(length=0)
        for axis in (ax.xaxis, top.xaxis):
            for label in axis.get_ticklabels():
                label.set_fontfamily("monospace")
                label.set_fontsize(7)
        figure.colorbar(image, ax=ax, label="probability of the answer", pad=0.02)
        if title:
            figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
    return figure


# -- parts -------------------------------------------------------------------------------------------------------


def _square(paths: Sequence[Path]) -> dict[str, tuple[float, float]]:
    """Limits of both axes, of equal length, that hold all points with a margin."""
    spans = [(min(values), max(values)) for values in zip(*(point for path in paths for point in path), strict=True)]
    span = max(high - low for low, high in spans)
    half = 0.55 * span if span > 1e-6 else 0.5
    (x, y) = ((low + high) / 2 for low, high in spans)
    return {"xlim": (x - half, x + half), "ylim": (y - half, y + half)}


def _cell(ax: Axes, x: float, y: float, text: str, share: float, *, size: float) -> None:
    """Write on a coloured cell; `share` is where its colour stands on the scale from 0 to 1."""
    color = DARK_TEXT if share > 0.55 else LIGHT_TEXT
    ax.text(
        x, y, text, ha="center", va="center", fontsize=size, color=color, family="monospace", parse_math=False,
        clip_on=True,
    )  # fmt: skip


def _shown(token: str, most: int = 9) -> str:
    """A token as a cell has it: spaces and line ends visible, nothing that the font lacks, cut to `most` characters."""
    text = "".join(_characters(token))
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _characters(token: str) -> Iterator[str]:
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("monospace")).get_charmap()
    for character in token:
        character = {" ": "\N{OPEN BOX}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"}.get(character, character)
        yield character if ord(character) in known and character.isprintable() else "\N{WHITE SQUARE}"
