"""Is a training run of a looped model stable? Measures of its curves, and a verdict with stated thresholds.

The failures are those of arXiv 2605.18797: gradient oscillation (the gradient norm swings from step to step), residual
explosion (the norm of the residual stream grows), and the collapse that follows, where a model predicts token frequencies
and ignores its context. Pure numpy: curves in, numbers out.

The thresholds separate runs of this package at a size where each failure shows: 200 steps of 8 windows of 64 tokens of the
bundled corpus (unigram level 6.40), width 64 and N = 3 for lt, lt-input, flt-residual, flt and elastic-flt at T = 12, width
96 and N = 2 for base-loop, tmlt and loopformer at T = 8. Of these lt fails: at T = 12 it ends at 6.50 and 6.36 (two seeds),
at T = 6 at 5.76, worse than at T = 3 (5.38). The others train, to between 5.12 and 5.85. Each threshold gives both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from loopformers.errors import ConfigError, DataError

__all__ = [
    "SPIKE_FACTOR",
    "VERDICTS",
    "GradientOscillation",
    "ResidualGrowth",
    "Stability",
    "StabilityThresholds",
    "Verdict",
    "assess_stability",
    "gradient_oscillation",
    "is_collapsed",
    "judge",
    "residual_growth",
    "verdict",
]

Verdict = Literal["stable", "oscillating", "exploding", "collapsed"]
VERDICTS: tuple[str, ...] = get_args(Verdict)

SPIKE_FACTOR = 3.0
"""A spike exceeds this many times the running median."""

MIN_SPIKE_HISTORY = 5
"""Values that a running median needs before a value is judged by it."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityThresholds:
    """Where a run stops being stable."""

    collapse_margin: float = 0.3
    """Nats below the unigram cross entropy that a validation loss must reach to count as learned: what a model gains within
    tens of steps once it uses its context at all. lt at T = 12 ends within 0.1 of the level; of the runs that train, the
    worst ends 0.54 below it."""
    max_log_std: float = 0.3
    """Largest `windowed_log_std`: a swing by a factor of 1.35 about the mean. Runs that train: up to 0.23; lt: 0.38 at T = 6,
    0.71 and 0.86 at T = 12."""
    max_relative_change: float = 0.25
    """Largest `mean_relative_change`. Runs that train: up to 0.18; lt: 0.32 at T = 6, 0.43 and 0.61 at T = 12. A run
    oscillates when it exceeds both: a falling gradient norm spreads a window without swinging, and one spike lifts the mean
    change."""
    max_loop_growth: float = 2.0
    """Largest growth of the residual norm per loop: doubling makes 4,096 of 1 in twelve loops. A stream that is never
    normed between loops grows by 1.3 (base-loop) and trains."""
    max_training_growth: float = 10.0
    """Largest growth of the residual norm after the first tenth of training: an order of magnitude. Growth out of the
    initialisation is no failure (base-loop: by 50). Runs that train: up to 5.9; lt at T = 12: 6.8 and 10.2, so this limits
    the residual stream and does not stand in for the loss."""

    def __post_init__(self) -> None:
        for name in ("collapse_margin", "max_log_std", "max_relative_change", "max_loop_growth", "max_training_growth"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOscillation:
    """How a gradient norm g_1 .. g_S swings from step to step. Values that are zero or not finite are left out."""

    log_std: float
    """Standard deviation of ln g over all steps."""
    windowed_log_std: float
    """Standard deviation of ln g over `window` successive steps: the 90th percentile over all windows, so that a slow trend
    does not count, nor does a swing that fills less than a tenth of training."""
    mean_relative_change: float
    """Mean of |g_s - g_{s-1}| / g_{s-1}."""
    num_spikes: int
    """Values above three times the median of the `window` values before them."""
    num_non_finite: int
    """Values that are missing or not finite."""
    window: int
    """Steps of a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualGrowth:
    """How the residual norm r_{s,t} of loop t at record s grows. Medians over a tenth of the records each."""

    per_loop: float
    """(r_T / r_1)^(1 / (T - 1)) at the end of training; 1 for T = 1."""
    over_training: float
    """Largest over the loops of r at the end / r in the second tenth of training, when weights have left initialisation."""
    last_norm: float
    """r_T at the end."""
    num_non_finite: int
    """Norms that are missing or not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """A verdict and what it rests on; a measure is None where no curve was given."""

    verdict: Verdict
    reason: str
    """The deciding numbers in words."""
    final_loss: float
    """Last validation loss, nats per token."""
    unigram_cross_entropy: float
    """Loss of token frequencies on the same text."""
    oscillation: GradientOscillation | None
    residual: ResidualGrowth | None


def gradient_oscillation(gradient_norms: Sequence[float | None], *, window: int = 50) -> GradientOscillation:
    """Measure the oscillation of a run's gradient norm.

    Args:
        gradient_norms: (steps,) global L2 norm of every step, before clipping: clipping hides every spike.
        window: Steps of a window, and of the running median. A shorter run is one window.

    Raises:
        DataError: No values, or a negative one.
        ConfigError: A window below 2.
    """
    if window < 2:
        raise ConfigError(f"window={window} must be at least 2 steps; one value has no spread")
    norms = _curve(gradient_norms, "gradient norms")
    finite = np.isfinite(norms)
    usable = norms[finite & (norms > 0)]
    logs = np.log(usable)
    windows = np.lib.stride_tricks.sliding_window_view(logs, min(window, len(logs))) if len(logs) else logs[None]
    spreads = windows.std(axis=1) if len(logs) else np.zeros(1)
    changes = np.abs(np.diff(usable)) / usable[:-1]
    return GradientOscillation(
        log_std=float(logs.std()) if len(logs) else 0.0,
        windowed_log_std=float(np.quantile(spreads, 0.9)),
        mean_relative_change=float(changes.mean()) if len(changes) else 0.0,
        num_spikes=_num_spikes(usable, window),
        num_non_finite=int((~finite).sum()),
        window=window,
    )


def residual_growth(residual_norms: Sequence[Sequence[float | None]]) -> ResidualGrowth:
    """Measure how a run's residual norms grow, from loop to loop and over training.

    Args:
        residual_norms: (records, loops) mean L2 norm over tokens of the residual stream before each loop's closing norm, in
            the order of training.

    Raises:
        DataError: No records, no loops, records of unequal numbers of loops, or a negative norm.
    """
    depths = sorted({len(record) for record in residual_norms})
    if len(depths) != 1 or depths[0] == 0:
        raise DataError(
            f"{len(residual_norms)} records of residual norms have {depths} loops; give one norm for each loop in each record"
        )
    flat = _curve([norm for record in residual_norms for norm in record], "residual norms")
    norms = flat.reshape(len(residual_norms), depths[0])
    tenth = len(norms) // 10
    start = _medians(norms[tenth : max(tenth + 1, 2 * tenth)])
    end = _medians(norms[-max(1, tenth) :])
    per_loop = _ratio(end[-1], end[0]) ** (1 / (len(end) - 1)) if len(end) > 1 else 1.0
    growths = [_ratio(last, first) for last, first in zip(end, start, strict=True)]
    return ResidualGrowth(
        per_loop=per_loop,
        over_training=max(growths),
        last_norm=float(end[-1]),
        num_non_finite=int((~np.isfinite(norms)).sum()),
    )


def is_collapsed(loss: float, unigram_cross_entropy: float, *, margin: float = 0.3) -> bool:
    """Whether a validation loss lies within `margin` nats of the unigram cross entropy, or above it.

    Every run is there at its start, so this judges finished runs. A loss that is not finite is no level and does not count
    as collapsed.
    """
    return math.isfinite(loss) and loss > unigram_cross_entropy - margin


def assess_stability(
    *,
    validation_losses: Sequence[float | None],
    unigram_cross_entropy: float,
    gradient_norms: Sequence[float | None] = (),
    residual_norms: Sequence[Sequence[float | None]] = (),
    thresholds: StabilityThresholds | None = None,
    window: int = 50,
) -> Stability:
    """Judge a finished run. Collapsed wins over exploding, exploding over oscillating.

    - collapsed: the last validation loss is within the margin of the unigram level, or above it. Spikes decide nothing:
      runs collapse without them.
    - exploding: a last loss, a gradient norm or a residual norm that is missing or not finite, or a residual norm that grows
      by more than the thresholds.
    - oscillating: both measures of the gradient norm's swing exceed their thresholds.

    Args:
        validation_losses: In nats per token, in the order of training; the last one counts.
        unigram_cross_entropy: Of the same text, in nats per token.
        gradient_norms: As in `gradient_oscillation`; empty: not judged.
        residual_norms: As in `residual_growth`; empty: not judged.
        thresholds: Default: `StabilityThresholds()`.
        window: As in `gradient_oscillation`.

    Raises:
        DataError: No validation loss, a unigram level that is not finite, or curves that are none.
    """
    limits = thresholds or StabilityThresholds()
    if not validation_losses:
        raise DataError("there are 0 validation losses, and a verdict needs the last one; evaluate the model once")
    if not math.isfinite(unigram_cross_entropy):
        raise DataError(f"unigram_cross_entropy={unigram_cross_entropy!r} must be finite; compute it from token counts")
    last = validation_losses[-1]
    loss = math.nan if last is None else float(last)
    oscillation = gradient_oscillation(gradient_norms, window=window) if len(gradient_norms) else None
    residual = residual_growth(residual_norms) if len(residual_norms) else None
    found, reason = judge(loss, unigram_cross_entropy, oscillation, residual, limits)
    return Stability(
        verdict=found,
        reason=reason,
        final_loss=loss,
        unigram_cross_entropy=unigram_cross_entropy,
        oscillation=oscillation,
        residual=residual,
    )


def judge(
    loss: float,
    unigram_cross_entropy: float | None,
    oscillation: GradientOscillation | None,
    residual: ResidualGrowth | None,
    limits: StabilityThresholds,
) -> tuple[Verdict, str]:
    """Return the verdict on measures that are at hand, and its reason. Rules as in `assess_stability`.

    Args:
        loss: Nats per token.
        unigram_cross_entropy: Of the same text; None: unknown, and a collapse is not judged.
        oscillation: Of the gradient norm; None: not judged.
        residual: Of the residual norms; None: not judged.
        limits: Where a run stops being stable.
    """
    if unigram_cross_entropy is not None and is_collapsed(loss, unigram_cross_entropy, margin=limits.collapse_margin):
        return "collapsed", (
            f"the last loss {loss:.3f} is not {limits.collapse_margin:g} nats below the unigram level "
            f"{unigram_cross_entropy:.3f}"
        )
    if reason := _explosion(loss, oscillation, residual, limits):
        return "exploding", reason
    if reason := _swing(oscillation, limits):
        return "oscillating", reason
    if unigram_cross_entropy is None:
        return "stable", "neither gradient nor residual norms exceed their thresholds"
    return "stable", f"the last loss {loss:.3f} is {unigram_cross_entropy - loss:.3f} nats below the unigram level"


def verdict(
    *,
    validation_losses: Sequence[float | None],
    unigram_cross_entropy: float,
    gradient_norms: Sequence[float | None] = (),
    residual_norms: Sequence[Sequence[float | None]] = (),
    thresholds: StabilityThresholds | None = None,
) -> Verdict:
    """Return the verdict alone; see `assess_stability`.

    Example:
        >>> verdict(validation_losses=[6.4, 6.3], unigram_cross_entropy=6.4)
        'collapsed'
        >>> verdict(validation_losses=[6.4, 4.9], unigram_cross_entropy=6.4, gradient_norms=[0.5, 0.6, 0.5])
        'stable'
    """
    return assess_stability(
        validation_losses=validation_losses,
        unigram_cross_entropy=unigram_cross_entropy,
        gradient_norms=gradient_norms,
        residual_norms=residual_norms,
        thresholds=thresholds,
    ).verdict


def _explosion(
    loss: float, oscillation: GradientOscillation | None, residual: ResidualGrowth | None, limits: StabilityThresholds
) -> str:
    if not math.isfinite(loss):
        return f"the last loss is {loss}"
    for name, measured in (("gradient", oscillation), ("residual", residual)):
        if measured is not None and measured.num_non_finite:
            return f"{measured.num_non_finite} {name} norms are not finite"
    if residual is None:
        return ""
    if residual.per_loop > limits.max_loop_growth:
        return f"the residual norm grows {residual.per_loop:.3g}-fold per loop, more than {limits.max_loop_growth:g}"
    if residual.over_training > limits.max_training_growth:
        return (
            f"the residual norm grew {residual.over_training:.3g}-fold after the first tenth of training, more than "
            f"{limits.max_training_growth:g}"
        )
    return ""


def _swing(oscillation: GradientOscillation | None, limits: StabilityThresholds) -> str:
    if oscillation is None:
        return ""
    spread, change = oscillation.windowed_log_std, oscillation.mean_relative_change
    if spread > limits.max_log_std and change > limits.max_relative_change:
        return (
            f"the gradient norm's logarithm has a standard deviation of {spread:.2f} in windows of {oscillation.window} steps "
            f"(more than {limits.max_log_std:g}), and the norm changes by {change:.0%} a step"
        )
    return ""


def _num_spikes(norms: FloatArray, window: int) -> int:
    return sum(
        bool(norms[i] > SPIKE_FACTOR * np.median(norms[max(0, i - window) : i]))
        for i in range(MIN_SPIKE_HISTORY, len(norms))
    )


def _curve(values: Sequence[float | None], what: str) -> FloatArray:
    curve = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    if curve.size == 0:
        raise DataError(f"there are 0 {what}, and a measure needs at least one; record them during training")
    if (negative := curve[curve < 0]).size:
        raise DataError(f"{what} hold {negative[0]}, and a norm is at least 0; give norms, not their logarithms")
    return curve


def _medians(records: FloatArray) -> FloatArray:
    """Median of each loop's finite norms, (loops,); infinity for a loop that has none."""
    medians = [np.median(kept) if (kept := column[np.isfinite(column)]).size else math.inf for column in records.T]
    return np.array(medians, dtype=np.float64)


def _ratio(end: float, start: float) -> float:
    if math.isinf(end):
        return math.inf
    return float(end / start) if start > 0 and math.isfinite(start) else (1.0 if end == start else math.inf)
