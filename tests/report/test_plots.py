from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from loopformers.errors import ConfigError
from loopformers.report import plots
from loopformers.report.plots import (
    Curve,
    Panel,
    ResidualMap,
    figure_bytes,
    gradient_norm_panel,
    loss_panel,
    plot_budgets,
    plot_over_steps,
    plot_points,
    plot_residual_maps,
    plot_residual_norms,
    save_figure,
)
from loopformers.report.style import PALETTE

STEPS = list(range(1, 32))


def curve(label: str, factor: float = 1.0) -> Curve:
    return Curve(label, STEPS, [factor * (2 + math.sin(step)) for step in STEPS])


def over_steps(**options: Any) -> Figure:
    return plot_over_steps(
        [
            loss_panel([curve("lt"), curve("flt", 0.5)], unigram_cross_entropy=2.9, **options),
            gradient_norm_panel([curve("lt", 30.0), curve("flt", 0.1)]),
        ]
    )


def legend_texts(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def line(figure: Figure, label: str, axis: int = 0) -> Any:
    (found,) = [line for line in figure.axes[axis].lines if line.get_label() == label]
    return found


def tick_labels(figure: Figure, axis: str, index: int = 0) -> list[str]:
    figure_bytes(figure, "png")  # ticks are made when a figure is drawn
    shown = getattr(figure.axes[index], f"{axis}axis")
    low, high = shown.get_view_interval()
    labels = zip(shown.get_majorticklocs(), shown.get_majorticklabels(), strict=True)
    return [label.get_text() for position, label in labels if low <= position <= high]


def test_panels_over_steps_share_their_axis_and_legend_and_name_their_units() -> None:
    figure = over_steps()
    upper, lower = figure.axes
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert upper.get_ylabel() == "loss (nats per token)"
    assert lower.get_ylabel() == "L2 norm before clipping"
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "step (optimiser updates)")
    assert (upper.get_yscale(), lower.get_yscale()) == ("linear", "log")
    assert legend_texts(figure) == ["lt", "flt", "unigram level"]


def test_a_label_looks_the_same_in_all_panels_and_different_from_others_even_in_grey() -> None:
    figure = over_steps()
    for label, color in (("lt", PALETTE[0]), ("flt", PALETTE[1])):
        assert {line(figure, label, axis).get_color() for axis in (0, 1)} == {color}
    assert line(figure, "lt").get_linestyle() != line(figure, "flt").get_linestyle()


def test_more_curves_than_colours_still_differ_pairwise() -> None:
    figure = plot_over_steps([Panel(y_label="y", curves=[curve(f"model {i}", i + 1.0) for i in range(15)])])
    styles = {(line.get_color(), str(line._dash_pattern)) for line in figure.axes[0].lines}
    assert len(styles) == 15


def test_a_reference_level_is_drawn_at_its_value() -> None:
    assert set(line(over_steps(), "unigram level").get_ydata()) == {2.9}


def test_values_that_are_missing_or_not_finite_leave_gaps() -> None:
    figure = plot_over_steps([Panel(y_label="y", curves=[Curve("a", [1, 2, 3, 4], [1.0, None, math.inf, 4.0])])])
    np.testing.assert_array_equal(line(figure, "a").get_ydata(), [1.0, math.nan, math.nan, 4.0])


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    panel = Panel(y_label="y", curves=[Curve("a", [1, 2, 3], [0.0, -1.0, 5.0])], log=True)
    np.testing.assert_array_equal(line(plot_over_steps([panel]), "a").get_ydata(), [math.nan, math.nan, 5.0])


def test_a_logarithmic_panel_without_a_positive_value_is_drawn_empty() -> None:
    figure = plot_over_steps([gradient_norm_panel([Curve("a", [1, 2], [None, 0.0])])])
    assert figure.axes[0].get_yscale() == "linear"
    assert figure_bytes(figure)


def test_smoothing_draws_a_running_median_over_faded_raw_values_and_says_so() -> None:
    values = [1.0, 9.0, 2.0, 3.0, None, 4.0]
    figure = plot_over_steps([loss_panel([Curve("a", range(6), values)], smoothing=3)])
    raw, smooth = figure.axes[0].lines
    assert raw.get_alpha() < 0.5
    np.testing.assert_array_equal(raw.get_ydata(), [1.0, 9.0, 2.0, 3.0, math.nan, 4.0])
    np.testing.assert_array_equal(smooth.get_ydata(), [5.0, 2.0, 3.0, 2.5, math.nan, 4.0])
    assert figure.axes[0].get_title(loc="left") == "Loss, with a running median of 3 values"
    assert legend_texts(figure) == ["a"]


def test_residual_norms_are_one_line_a_model_over_whole_loops() -> None:
    figure = plot_residual_norms(
        [Curve("lt", [1, 2, 3], [8, 70, 240]), Curve("flt", [1, 2, 3, 4, 5], [31, 30, 30, 30, 30])]
    )
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("loop", "mean L2 norm of a token", "log")
    assert legend_texts(figure) == ["lt", "flt"]
    assert {line.get_marker() for line in ax.lines} == {"o", "s"}
    assert tick_labels(figure, "x") == ["1", "2", "3", "4", "5"]


def test_many_loops_are_ticked_at_whole_numbers() -> None:
    ticks = tick_labels(plot_residual_norms([Curve("lt", range(1, 41), [8.0] * 40)]), "x")
    assert 2 < len(ticks) < 16
    assert all(tick.isdigit() for tick in ticks)


def test_residual_maps_share_one_colour_scale_and_show_loops_upwards() -> None:
    maps = [
        ResidualMap("lt", [10, 20, 30], [[8, 9], [20, 40], [60, 240]]),
        ResidualMap("flt", [10, 20, 30], [[8, 8], [9, 9], [None, 10]]),
    ]
    figure = plot_residual_maps(maps)
    first, second, bar = figure.axes
    meshes = [ax.collections[0] for ax in (first, second)]
    assert all(isinstance(mesh.norm, LogNorm) and mesh.get_clim() == (8, 240) for mesh in meshes)
    np.testing.assert_array_equal(meshes[0].get_array(), [[8, 20, 60], [9, 40, 240]])
    assert meshes[1].get_array().mask.sum() == 1
    assert first.get_xlim() == (5, 35)
    assert [ax.get_title(loc="left") for ax in (first, second)] == ["lt", "flt"]
    assert (first.get_ylabel(), second.get_xlabel()) == ("loop", "step (optimiser updates)")
    assert bar.get_ylabel() == "mean L2 norm of a token"


def test_residual_maps_of_one_record_and_one_norm_are_drawn() -> None:
    assert figure_bytes(plot_residual_maps([ResidualMap("lt", [1], [[8.0]])]), "png")


def test_quality_against_budget_marks_the_trained_budget_and_ticks_the_budgets() -> None:
    curves = [
        Curve("loopformer", [1, 2, 4, 8], [150, 140, 138, 137]),
        Curve("tmlt", [1, 2, 4, 8], [2000, 280, 148, 136]),
    ]
    figure = plot_budgets(curves, trained_loops={"tmlt": 8})
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("loops run (M)", "perplexity")
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert legend_texts(figure) == ["loopformer", "tmlt", "trained budget"]
    (ring,) = [line for line in ax.lines if line.get_markersize() == 11 and len(line.get_xdata())]
    assert (list(ring.get_xdata()), list(ring.get_ydata()), ring.get_color()) == ([8], [136], PALETTE[1])
    assert tick_labels(figure, "x") == ["1", "2", "4", "8"]


@pytest.mark.parametrize(
    ("values", "some_labels"),
    [([5.0, 6.0, 8.0], {"6"}), ([2.0, 90.0, 300.0], {"5", "10", "100"}), ([1.0, 1e4, 1e8], {"10,000"})],
)
def test_logarithmic_axes_are_labelled_with_plain_numbers(values: Sequence[float], some_labels: set[str]) -> None:
    figure = plot_budgets([Curve("a", [1, 2, 3], values)])
    assert some_labels <= set(tick_labels(figure, "y"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Curve("lt", [1, 2], [1.0]), "curve 'lt' has 2 positions and 1 values"),
        (lambda: plot_over_steps([]), "a figure of 0 panels shows nothing"),
        (lambda: plot_budgets([]), "a figure of 0 curves shows nothing"),
        (lambda: plot_residual_maps([]), "0 residual maps hold no positive norm"),
        (lambda: ResidualMap("lt", [1, 2], [[1.0], [1.0, 2.0]]), r"has 2 steps and 2 records of \[1, 2\] loops"),
        (lambda: loss_panel([], smoothing=4), "smoothing=4 must be an odd number"),
        (
            lambda: plot_budgets([curve("lt")], trained_loops={"tl": 3}),
            "trained_loops='tl' is not known; choose one of: lt",
        ),
        (lambda: figure_bytes(over_steps(), "pdf"), "kind='pdf' is not known"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_drawn_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


# -- files --------------------------------------------------------------------------------------------------------


def test_an_svg_is_well_formed_and_points_nowhere() -> None:
    root = ElementTree.fromstring(figure_bytes(over_steps()))
    references = [
        value for element in root.iter() for name, value in element.attrib.items() if name.rpartition("}")[2] == "href"
    ]
    assert references
    assert all(value.startswith("#") for value in references)


def test_equal_figures_are_equal_files() -> None:
    assert figure_bytes(over_steps()) == figure_bytes(over_steps())


def test_files_are_written_by_their_ending(tmp_path: Path) -> None:
    figure = over_steps()
    assert save_figure(figure, tmp_path / "new" / "loss.svg").read_bytes().startswith(b"<?xml")
    assert save_figure(figure, tmp_path / "new" / "loss.PNG").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["loss.PNG", "loss.svg"]


def test_another_ending_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in '\.pdf'; figures are written as \.svg or \.png"):
        save_figure(over_steps(), tmp_path / "loss.pdf")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "loss.svg"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(plots.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_figure(over_steps(), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# -- global state -------------------------------------------------------------------------------------------------


def test_settings_of_the_user_neither_leak_in_nor_are_changed() -> None:
    plain = figure_bytes(over_steps())
    with matplotlib.rc_context({"font.size": 30.0, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        assert figure_bytes(over_steps()) == plain
        assert dict(matplotlib.rcParams) == before


def test_the_module_loads_matplotlib_on_use_and_pyplot_never() -> None:
    code = (
        "import sys; from loopformers.report import plots as p\n"
        "assert 'matplotlib' not in sys.modules\n"
        "p.figure_bytes(p.plot_budgets([p.Curve('a', [1], [2.0])]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_points_stand_out_from_the_crowd_by_colour_and_marker() -> None:
    crowd = Curve("a schedule", [0.1, 0.2, 0.4], [3.0, 2.0, None])
    figure = plot_points([crowd, Curve("best", [0.2], [2.0]), Curve("uniform", [0.1], [3.0])], x_label="x", y_label="y")
    (ax,) = figure.axes
    assert [line.get_label() for line in ax.lines] == ["a schedule", "best", "uniform"]
    assert all(line.get_linestyle() in ("None", "none") for line in ax.lines)
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == 3
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "y")
    assert figure_bytes(figure).startswith(b"<?xml")
    with pytest.raises(ConfigError, match="0 curves"):
        plot_points([], x_label="x", y_label="y")
