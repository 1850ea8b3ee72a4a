from __future__ import annotations

from typing import Any

import pytest

from loopformers.errors import ConfigError
from loopformers.report.panels import Axis, Line, LinePanel, plot_line_panels, plot_map_panels
from loopformers.report.plots import ResidualMap, figure_bytes
from loopformers.report.style import INK, PALETTE

X, Y = Axis(label="step"), Axis(label="loss (nats)", levels={"unigram level": 6.4})


def panel(title: str, *lines: Line) -> LinePanel:
    return LinePanel(title=title, lines=lines)


def line(label: str, y: list[Any], **bands: Any) -> Line:
    return Line(label=label, x=list(range(1, len(y) + 1)), y=y, **bands)


def test_panels_share_axes_and_one_legend_and_lines_their_colour() -> None:
    figure = plot_line_panels(
        [
            panel("lt", line("T = 3", [7.0, 6.5]), line("T = 6", [7.0, 6.9])),
            panel("flt", line("T = 6", [7.0, 5.0], low=[6.9, 4.9], high=[7.1, 5.1])),
            panel("other", line("T = 3", [6.0, 2.0, None])),
        ],
        x=X,
        y=Y,
        columns=2,
    )
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["lt", "flt", "other"]
    assert len({ax.get_xlim() for ax in figure.axes}) == len({ax.get_ylim() for ax in figure.axes}) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["T = 3", "T = 6", "unigram level"]
    colours = {(drawn.get_label(), drawn.get_color()) for ax in figure.axes for drawn in ax.get_lines()}
    assert colours == {("T = 3", PALETTE[0]), ("T = 6", PALETTE[1]), ("unigram level", "#59636e")}
    assert len(figure.axes[1].collections) == 1  # the band
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss\n(nats)", "", "loss\n(nats)"]
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "step", "step"]
    assert figure_bytes(figure, "png").startswith(b"\x89PNG")


def test_labels_that_are_given_keep_their_colour_where_one_is_missing() -> None:
    figure = plot_line_panels([panel("lt", line("T = 6", [1.0, 2.0]))], x=X, y=Y, labels=["T = 3", "T = 6"])
    assert figure.axes[0].get_lines()[0].get_color() == PALETTE[1]


def test_logarithmic_axes_and_ticks_at_counts() -> None:
    figure = plot_line_panels(
        [panel("", line("a", [0.0, 0.01, 100.0]))], x=Axis(label="M", log=True), y=Axis(label="norm", log=True)
    )
    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    counts = plot_line_panels([panel("", line("a", [3.0, 2.0, 1.0]))], x=Axis(label="loop", at_values=True), y=Y)
    assert list(counts.axes[0].get_xticks()) == [1, 2, 3]


def test_maps_share_one_scale_and_may_have_gaps() -> None:
    maps = [ResidualMap(name, [1, 2, 3], [[1.0, 2.0], [2.0, None], [4.0, 50.0]]) for name in ("lt", "flt", "other")]
    figure = plot_map_panels(maps, columns=2)
    *panels, bar = figure.axes
    assert [ax.get_title(loc="left") for ax in panels] == ["lt", "flt", "other"]
    assert {mesh.get_clim() for ax in panels for mesh in ax.collections} == {(1.0, 50.0)}
    assert "L2 norm" in bar.get_ylabel()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plot_line_panels([], x=X, y=Y), "a figure of 0 panels shows nothing"),
        (lambda: plot_map_panels([]), "0 residual maps hold no positive norm"),
        (lambda: Line(label="a", x=[1, 2], y=[1.0]), "line 'a' has 2 positions, 1 values"),
        (lambda: Line(label="a", x=[1], y=[1.0], low=[1.0]), "both bounds or none"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


def test_panels_with_own_legends_begin_with_the_first_colour_again_and_keep_references_in_ink() -> None:
    values = [3.0, 2.0]
    panels = [panel(t, line("whole", values), line(f"{t}-1", values), line(f"{t}-2", values)) for t in ("a", "b")]
    figure = plot_line_panels(panels, x=X, y=Axis(label="loss (nats)"), labels=["whole"], own_legends=True)
    drawn = [[str(curve.get_color()) for curve in ax.get_lines()] for ax in figure.axes]
    assert drawn == [[INK, *PALETTE[:2]]] * 2
    legends = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in figure.axes]
    assert legends == [["whole", "a-1", "a-2"], ["whole", "b-1", "b-2"]]
    assert not figure.legends
