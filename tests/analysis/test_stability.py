from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from loopformers.analysis.stability import (
    VERDICTS,
    StabilityThresholds,
    assess_stability,
    gradient_oscillation,
    is_collapsed,
    residual_growth,
    verdict,
)
from loopformers.errors import ConfigError, DataError

UNIGRAM = 6.4
STEPS = 173


def smooth(steps: int = STEPS) -> list[float]:
    """A norm that falls tenfold and hardly swings."""
    return [3.0 * 10 ** (-step / steps) * (1 + 0.05 * math.sin(2.0 * step)) for step in range(steps)]


def swinging(steps: int = STEPS) -> list[float]:
    """A norm that is two and a half times as large at every other step."""
    return [2.5 if step % 2 else 1.0 for step in range(steps)]


def residuals(last: list[float], records: int = 41, first: float = 8.0) -> list[list[float]]:
    """Norms by loop that grow geometrically over training from `first` at the second tenth's middle."""
    start = 0.15 * records
    return [[first * (norm / first) ** ((i - start) / (records - 1 - start)) for norm in last] for i in range(records)]


def judge(**curves: Any) -> str:
    healthy: dict[str, Any] = {
        "validation_losses": [7.6, 6.3, 5.2],
        "unigram_cross_entropy": UNIGRAM,
        "gradient_norms": smooth(),
        "residual_norms": residuals([24.0, 25.0, 25.0, 26.0]),
    }
    return verdict(**{**healthy, **curves})


# -- verdicts -----------------------------------------------------------------------------------------------------


def test_a_run_that_learns_with_a_calm_gradient_and_residual_is_stable() -> None:
    assert judge() == "stable"


def test_a_gradient_norm_that_swings_from_step_to_step_is_oscillating() -> None:
    assert judge(gradient_norms=swinging()) == "oscillating"


@pytest.mark.parametrize(
    "norms",
    [residuals([8.0, 20.0, 50.0, 125.0], first=7.0), [[1.0, 2.5, 6.0, 15.0]] * 20],
    ids=["over training", "from loop to loop"],
)
def test_a_residual_norm_that_grows_without_bound_is_exploding(norms: list[list[float]]) -> None:
    assert judge(residual_norms=norms) == "exploding"


@pytest.mark.parametrize("loss", [6.11, 6.4, 9.0])
def test_a_last_loss_near_or_above_the_unigram_level_is_collapsed(loss: float) -> None:
    assert judge(validation_losses=[5.0, loss]) == "collapsed"


def test_the_level_is_judged_at_the_end_alone() -> None:
    assert judge(validation_losses=[7.6, 6.45, 6.4, 6.09]) == "stable"


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_last_loss_that_is_not_finite_is_exploding(loss: float | None) -> None:
    assert judge(validation_losses=[5.0, loss]) == "exploding"


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_norm_that_is_not_finite_is_exploding(bad: float | None) -> None:
    assert judge(gradient_norms=[*smooth(), bad]) == "exploding"
    assert judge(residual_norms=[*residuals([9.0, 9.0, 9.0]), [9.0, bad, 9.0]]) == "exploding"


def test_collapsed_wins_over_exploding_and_exploding_over_oscillating() -> None:
    explosion = residuals([900.0, 900.0])
    assert judge(gradient_norms=swinging(), residual_norms=explosion, validation_losses=[6.4]) == "collapsed"
    assert judge(gradient_norms=swinging(), residual_norms=explosion) == "exploding"


def test_spikes_alone_neither_collapse_a_run_nor_make_it_oscillate() -> None:
    norms = smooth(400)
    norms[100] = norms[200] = norms[300] = 20.0
    assert gradient_oscillation(norms).num_spikes == 3
    assert judge(gradient_norms=norms) == "stable"


def test_a_run_collapses_without_spikes() -> None:
    assert gradient_oscillation(smooth()).num_spikes == 0
    assert judge(validation_losses=[6.3]) == "collapsed"


def test_a_steep_fall_of_the_gradient_norm_is_no_oscillation() -> None:
    norms = [10 ** (2 - step / 40) for step in range(120)]
    assert gradient_oscillation(norms).windowed_log_std > StabilityThresholds().max_log_std
    assert judge(gradient_norms=norms) == "stable"


def test_curves_that_were_not_recorded_are_not_judged() -> None:
    assert judge(gradient_norms=(), residual_norms=()) == "stable"


def test_thresholds_are_the_callers_to_change() -> None:
    assert judge(validation_losses=[6.2], thresholds=StabilityThresholds(collapse_margin=0.1)) == "stable"
    assert judge(gradient_norms=swinging(), thresholds=StabilityThresholds(max_log_std=1.0)) == "stable"
    assert judge(thresholds=StabilityThresholds(max_training_growth=1.5)) == "exploding"


@pytest.mark.parametrize(
    ("curves", "reason"),
    [
        ({}, "the last loss 5.200 is 1.200 nats below the unigram level"),
        ({"validation_losses": [6.3]}, "the last loss 6.300 is not 0.3 nats below the unigram level 6.400"),
        ({"validation_losses": [None]}, "the last loss is nan"),
        ({"gradient_norms": [1.0, None]}, "1 gradient norms are not finite"),
        ({"residual_norms": [[1.0, 3.0]]}, "the residual norm grows 3-fold per loop, more than 2"),
        (
            {"gradient_norms": [1.0, 4.0] * 30},
            "the gradient norm's logarithm has a standard deviation of 0.69 in windows of 50 steps (more than 0.3), "
            "and the norm changes by 189% a step",
        ),
    ],
)
def test_a_verdict_says_why(curves: dict[str, Any], reason: str) -> None:
    result = assess_stability(**{"validation_losses": [5.2], "unigram_cross_entropy": UNIGRAM, **curves})
    assert result.reason == reason
    assert result.verdict in VERDICTS


# -- measures -----------------------------------------------------------------------------------------------------


def test_oscillation_is_measured_by_its_formulas() -> None:
    measured = gradient_oscillation([1.0, math.e, 1.0, math.e], window=2)
    assert measured.log_std == pytest.approx(0.5)
    assert measured.windowed_log_std == pytest.approx(0.5)
    changes = [math.e - 1, 1 - 1 / math.e, math.e - 1]
    assert measured.mean_relative_change == pytest.approx(sum(changes) / 3)


def test_a_trend_spreads_the_whole_curve_and_not_its_windows() -> None:
    measured = gradient_oscillation([math.exp(-step / 100) for step in range(500)], window=20)
    assert measured.log_std == pytest.approx(5 / math.sqrt(12), rel=1e-2)
    assert measured.windowed_log_std == pytest.approx(0.2 / math.sqrt(12), rel=1e-2)


def test_a_swing_in_less_than_a_tenth_of_training_is_left_out_of_the_windowed_spread() -> None:
    calm = [1.0] * 400
    assert gradient_oscillation(calm[:200] + [1.0, 9.0] * 5 + calm[:200], window=10).windowed_log_std == 0.0
    assert gradient_oscillation(calm[:200] + [1.0, 9.0] * 30 + calm[:200], window=10).windowed_log_std > 1.0


def test_a_spike_is_three_times_the_median_of_the_window_before_it() -> None:
    flat = [1.0] * 10
    assert gradient_oscillation([*flat, 2.9]).num_spikes == 0
    assert gradient_oscillation([*flat, 3.1]).num_spikes == 1
    assert gradient_oscillation([1.0, 1.0, 50.0]).num_spikes == 0  # too few values to compare with
    rise = [*flat, *[10.0] * 10]
    assert gradient_oscillation(rise, window=4).num_spikes == 2  # then the median has followed
    assert gradient_oscillation(rise, window=20).num_spikes == 10


def test_zero_and_missing_gradient_norms_are_left_out_of_the_spread() -> None:
    measured = gradient_oscillation([0.0, 2.0, None, math.inf, 2.0])
    assert (measured.log_std, measured.mean_relative_change, measured.num_non_finite) == (0.0, 0.0, 2)


@pytest.mark.parametrize("norms", [[0.0, 0.0], [None], [3.0]])
def test_curves_without_two_usable_values_have_no_spread(norms: list[float | None]) -> None:
    measured = gradient_oscillation(norms)
    assert (measured.log_std, measured.windowed_log_std, measured.mean_relative_change) == (0.0, 0.0, 0.0)


def test_growth_compares_the_last_tenth_with_the_second_so_that_initialisation_does_not_count() -> None:
    records = [[0.2, 0.2]] * 2 + [[3.0, 4.0]] * 2 + [[5.0, 7.0]] * 14 + [[6.0, 24.0]] * 2
    growth = residual_growth(records)
    assert growth.over_training == pytest.approx(6.0)
    assert growth.per_loop == pytest.approx(4.0)
    assert growth.last_norm == 24.0


def test_growth_per_loop_is_the_geometric_mean_and_one_loop_has_none() -> None:
    assert residual_growth([[2.0, 1.0, 7.0, 54.0]]).per_loop == pytest.approx(3.0)
    assert residual_growth([[2.0], [5.0]]).per_loop == 1.0


def test_one_record_has_no_growth_over_training() -> None:
    assert residual_growth([[2.0, 3.0]]).over_training == 1.0


def test_growth_survives_missing_norms_and_counts_them() -> None:
    growth = residual_growth([[2.0, 2.0], [2.0, None], [math.nan, 6.0]])
    assert growth.num_non_finite == 2
    assert growth.over_training == math.inf
    assert residual_growth([[0.0, 0.0], [0.0, 0.0]]).over_training == 1.0


def test_a_loss_is_collapsed_within_the_margin_and_never_when_it_is_not_finite() -> None:
    assert is_collapsed(6.2, 6.4)
    assert not is_collapsed(6.2, 6.4, margin=0.1)
    assert not is_collapsed(math.nan, 6.4)
    assert not is_collapsed(math.inf, 6.4)


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: gradient_oscillation([]), DataError, "there are 0 gradient norms"),
        (lambda: gradient_oscillation([1.0, -2.0]), DataError, "gradient norms hold -2.0, and a norm is at least 0"),
        (lambda: gradient_oscillation([1.0], window=1), ConfigError, "window=1 must be at least 2 steps"),
        (lambda: residual_growth([]), DataError, r"0 records of residual norms have \[\] loops"),
        (lambda: residual_growth([[], []]), DataError, r"2 records of residual norms have \[0\] loops"),
        (lambda: residual_growth([[1.0], [1.0, 2.0]]), DataError, r"2 records of residual norms have \[1, 2\] loops"),
        (lambda: judge(validation_losses=[]), DataError, "there are 0 validation losses"),
        (lambda: judge(unigram_cross_entropy=math.nan), DataError, "unigram_cross_entropy=nan must be finite"),
        (lambda: StabilityThresholds(max_log_std=-1.0), ConfigError, "max_log_std=-1.0 must be a finite number"),
    ],
)
def test_what_is_no_curve_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_the_module_loads_no_torch() -> None:
    code = "import sys, loopformers.analysis.stability; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- one hand-made run of each kind -------------------------------------------------------------------------------

LOOPS = 6


def calm_residuals(records: int = STEPS) -> list[list[float]]:
    """Norms that leave their initialisation within the first tenth and then grow by half."""
    early = [[0.5 + 10 * i / records * 4] * LOOPS for i in range(records // 10)]
    return early + [[8.0 + 4.0 * i / records] * LOOPS for i in range(records - records // 10)]


def learning(end: float = 5.0, steps: int = STEPS) -> list[float]:
    return [end + (7.6 - end) * math.exp(-6 * step / steps) for step in range(steps)]


def one_loop_grows() -> list[list[float]]:
    """All loops but the last stay where they are."""
    return [[*[8.0] * (LOOPS - 1), 8.0 * 1.03**i] for i in range(STEPS)]


def late_swing(share: float) -> list[float]:
    """A norm that is calm at first and swings in the last `share` of training."""
    calm = round(STEPS * (1 - share))
    return [*smooth()[:calm], *swinging(STEPS - calm)]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "it learns": ("stable", {}),
    "it learns slowly, and just enough": ("stable", {"validation_losses": learning(end=6.06)}),
    "it never leaves the unigram level": ("collapsed", {"validation_losses": [7.6, 6.5, 6.41, 6.4]}),
    "it learns, and falls back": ("collapsed", {"validation_losses": [*learning(), 6.2]}),
    "it ends above the unigram level": ("collapsed", {"validation_losses": [7.6, 8.0]}),
    "it collapses with a calm gradient and residual stream": ("collapsed", {"validation_losses": [6.39]}),
    "its gradient swings at every step": ("oscillating", {"gradient_norms": swinging()}),
    "its gradient swings in the last third": ("oscillating", {"gradient_norms": late_swing(0.35)}),
    "its gradient swings for a moment": ("stable", {"gradient_norms": late_swing(0.05)}),
    "its gradient has three spikes": (
        "stable",
        {"gradient_norms": [8.0 if step in (60, 90, 120) else norm for step, norm in enumerate(smooth())]},
    ),
    "its gradient falls by a factor of a hundred": (
        "stable", {"gradient_norms": [5.0 * 0.01 ** (step / STEPS) for step in range(STEPS)]},
    ),
    "its residual stream doubles from loop to loop and more": (
        "exploding", {"residual_norms": [[2.1**loop for loop in range(LOOPS)]] * STEPS},
    ),
    "its residual stream grows by a third a loop": (
        "stable", {"residual_norms": [[1.33**loop for loop in range(LOOPS)]] * STEPS},
    ),
    "the residual stream of one loop grows a hundredfold": ("exploding", {"residual_norms": one_loop_grows()}),
    "its residual stream grows fiftyfold out of its initialisation alone": (
        "stable", {"residual_norms": [[0.16] * LOOPS] * 10 + [[8.0] * LOOPS] * (STEPS - 10)},
    ),
    "a gradient is missing": ("exploding", {"gradient_norms": [None, *smooth()]}),
    "a residual norm overflows once and comes back": (
        "exploding", {"residual_norms": [[8.0] * LOOPS, [math.inf] * LOOPS, *[[8.0] * LOOPS] * STEPS]},
    ),
    "its loss is not finite": ("exploding", {"validation_losses": [5.0, math.nan], "gradient_norms": swinging()}),
    "it has one loop": ("stable", {"residual_norms": [[8.0]] * STEPS}),
    "it made one update": (
        "collapsed", {"validation_losses": [7.6], "gradient_norms": [0.2], "residual_norms": [[3.0] * LOOPS]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_this_kind_gets_its_verdict(kind: str) -> None:
    expected, curves = KINDS[kind]
    run = {"validation_losses": learning(), "gradient_norms": smooth(), "residual_norms": calm_residuals(), **curves}
    assert verdict(unigram_cross_entropy=UNIGRAM, **run) == expected
