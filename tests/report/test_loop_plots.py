from __future__ import annotations

import math

import pytest

from loopformers import ConfigError
from loopformers.report.loop_plots import (
    LensGrid,
    PathPanel,
    SimilarityMap,
    plot_lens,
    plot_over_loops,
    plot_paths,
    plot_similarity_maps,
)
from loopformers.report.plots import Curve, figure_bytes

LENS = {
    "given": ["It", " was"],
    "following": [" was", "\n"],
    "answers": [[" is", " a"], [" was", " the"], [" was", " the"]],
    "probabilities": [[0.1, 0.2], [0.9, 0.3], [0.95, 0.4]],
    "settled": [2, 3],
}


def axes_with(figure, text):
    return [ax for ax in figure.axes if text in (ax.get_xlabel(), ax.get_ylabel())]


def test_curves_over_loops_leave_gaps_where_a_measure_is_not_defined():
    figure = plot_over_loops([Curve("flt", [1, 2, 3], [None, None, 0.5])], y_label="cosine")
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("loop", "cosine")
    y = ax.lines[0].get_ydata()
    assert [math.isnan(v) for v in y] == [True, True, False]
    assert figure_bytes(figure, "png").startswith(b"\x89PNG")


def test_similarity_maps_share_one_colour_scale_that_ends_at_one():
    maps = [SimilarityMap("one", [[1.0, 0.82], [0.82, 1.0]]), SimilarityMap("two", [[1.0]])]
    figure = plot_similarity_maps(maps)
    first, second = axes_with(figure, "loop")
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("one", "two")
    limits = [ax.collections[0].get_clim() for ax in (first, second)]
    assert limits == [(0.82, 1.0), (0.82, 1.0)]
    assert [text.get_text() for text in first.texts] == ["1", ".82", ".82", "1"]
    assert axes_with(figure, "linear CKA")
    assert figure_bytes(figure)


def test_maps_of_one_value_or_none_can_be_drawn_and_large_ones_have_no_numbers():
    assert figure_bytes(plot_similarity_maps([SimilarityMap("inert", [[1.0, 1.0], [1.0, 1.0]])]))
    figure = plot_similarity_maps([SimilarityMap("constant", [[math.nan, math.nan], [math.nan, math.nan]])] * 3)
    assert figure_bytes(figure)
    assert not figure.axes[0].texts
    large = plot_similarity_maps([SimilarityMap("twelve", [[1.0] * 12] * 12)])
    assert not large.axes[0].texts


def test_a_map_that_is_not_square_is_refused():
    with pytest.raises(ConfigError, match="has 2 rows of"):
        SimilarityMap("odd", [[1.0], [1.0]])
    with pytest.raises(ConfigError, match="0 maps"):
        plot_similarity_maps([])


def test_paths_of_compared_models_have_the_same_axes_of_equal_scale():
    near = PathPanel("near", [("8 loops", [(0.0, 0.0), (0.1, 0.0)])])
    far = PathPanel("far", [("8 loops", [(0.0, 0.0), (2.0, 1.0)])], [[(0.0, 0.0), (0.0, 3.0)]])
    figure = plot_paths([near, far], x_label="first direction", y_label="second direction")
    one, two = figure.axes
    assert (one.get_xlim(), one.get_ylim()) == (two.get_xlim(), two.get_ylim())
    (left, right), (low, high) = one.get_xlim(), one.get_ylim()
    assert right - left == pytest.approx(high - low)
    assert (left, low) < (0.0, 0.0)
    assert right > 2.0
    assert high > 3.0
    assert figure_bytes(figure)
    with pytest.raises(ConfigError, match="0 panels"):
        plot_paths([], x_label="x", y_label="y")


def test_a_model_that_does_not_move_can_be_drawn():
    still = PathPanel("still", [("8 loops", [(0.0, 0.0), (1e-17, 0.0)])])
    assert figure_bytes(plot_paths([still], x_label="x", y_label="y"))


def test_a_lens_shows_each_answer_and_frames_it_from_where_it_stays():
    figure = plot_lens(LensGrid(**LENS), title="flt")
    ax = figure.axes[0]
    assert [text.get_text() for text in ax.texts] == ["␣is", "␣a", "␣was", "␣the", "␣was", "␣the"]
    assert [(round(box.get_y() + 0.45), round(box.get_height() + 0.1)) for box in ax.patches] == [(2, 2), (3, 1)]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["It", "␣was"]
    assert figure_bytes(figure)
    with pytest.raises(ConfigError, match="0 loops and 2 positions"):
        plot_lens(LensGrid(**{**LENS, "answers": [], "probabilities": []}))


def test_tokens_that_a_font_lacks_or_that_look_like_mathematics_are_drawn_as_text():
    answers = [["$x^2$", "猫"], ["\x07", "𓀀"], ["a_very_long_token", "é"]]
    figure = plot_lens(LensGrid(**{**LENS, "answers": answers, "given": ["$", "\ufffd"]}))
    assert [text.get_text() for text in figure.axes[0].texts] == ["$x^2$", "□", "□", "□", "a_very_l…", "é"]
    assert figure_bytes(figure, "png")
