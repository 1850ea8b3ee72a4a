"""The verdict while a run goes on: the measures of `stability`, kept up to date at a cost that does not grow with the run.

A monitor is a pure function of the records it was given, in order: a resumed run that replays them judges as an
uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopformers.analysis.stability import (
    MIN_SPIKE_HISTORY,
    SPIKE_FACTOR,
    GradientOscillation,
    ResidualGrowth,
    StabilityThresholds,
    Verdict,
    judge,
    residual_growth,
)
from loopformers.errors import ConfigError

__all__ = ["JUDGED_EVERY", "LiveVerdict", "StabilityMonitor"]

JUDGED_EVERY = 10
"""Updates between verdicts."""

MAX_REFERENCES = 64
"""Records kept of the second tenth of training, which growth over training is measured against."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveVerdict:
    """What a run looks like so far."""

    verdict: Verdict | None
    """None: too early to say."""
    reason: str
    """The deciding numbers in words."""
    since_step: int
    """Update at which this verdict was reached and has held since."""


class StabilityMonitor:
    """Follows a run record by record.

    The loss is the mean of the training cross entropy over the window. At the unigram level a run counts as collapsed
    when it was below that level before, or when half of its updates are done; every run starts there.

    Args:
        num_steps: Updates of the whole run.
        unigram_cross_entropy: Of the training text, nats per token; None: unknown, and a collapse is not judged.
        thresholds: Default: `StabilityThresholds()`.
        window: Updates that swings and losses are measured over.

    Raises:
        ConfigError: A window below 2, or a unigram level that is not finite.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        unigram_cross_entropy: float | None = None,
        thresholds: StabilityThresholds | None = None,
        window: int = 50,
    ) -> None:
        if window < 2:
            raise ConfigError(f"window={window} must be at least 2 steps; one value has no spread")
        if unigram_cross_entropy is not None and not math.isfinite(unigram_cross_entropy):
            raise ConfigError(
                f"unigram_cross_entropy={unigram_cross_entropy!r} must be finite; compute it from token counts"
            )
        self.num_steps, self.unigram_cross_entropy, self.window = num_steps, unigram_cross_entropy, window
        self.limits = thresholds or StabilityThresholds()
        self.num_spikes = 0
        self.has_learned = False
        self.live = LiveVerdict(verdict=None, reason="no update has been made", since_step=0)
        self._norms: deque[float] = deque(maxlen=window)
        self._losses: deque[float] = deque(maxlen=window)
        self._residuals: deque[Sequence[float | None]] = deque(maxlen=window)
        self._references: list[Sequence[float | None]] = []

    def add(
        self, *, step: int, loss: float, gradient_norm: float, residual_norms: Sequence[float | None] = ()
    ) -> LiveVerdict:
        """Take in an update and return the verdict so far, which is made anew every `JUDGED_EVERY` updates and at the end.

        Args:
            step: Updates done, this one included.
            loss: Training cross entropy, nats per token.
            gradient_norm: Global L2 norm before clipping.
            residual_norms: By loop; None where a norm is not finite.
        """
        known = list(self._norms)
        if len(known) >= MIN_SPIKE_HISTORY and gradient_norm > SPIKE_FACTOR * statistics.median(known):
            self.num_spikes += 1
        self._norms.append(gradient_norm)
        self._losses.append(loss)
        if residual_norms:
            self._residuals.append(residual_norms)
            tenth = self.num_steps // 10
            if tenth < step <= max(2 * tenth, tenth + 1) and step % (tenth // MAX_REFERENCES + 1) == 0:
                self._references.append(residual_norms)
        if step % JUDGED_EVERY == 0 or step == self.num_steps:
            self._judge(step)
        return self.live

    def replay(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in the records of updates that an earlier process made, as `metrics.jsonl` holds them."""
        for record in records:
            if record.get("gradient_norm") is not None:
                self.add(
                    step=record["step"],
                    loss=cross_entropy_of(record),
                    gradient_norm=record["gradient_norm"],
                    residual_norms=record.get("residual_norms", ()),
                )

    def oscillation(self) -> GradientOscillation:
        """Return the swing of the gradient norm in the last window; spikes are those of the whole run."""
        norms = np.array(self._norms, dtype=np.float64)
        usable = norms[np.isfinite(norms) & (norms > 0)]
        spread = float(np.log(usable).std()) if len(usable) else 0.0
        return GradientOscillation(
            log_std=spread,
            windowed_log_std=spread,
            mean_relative_change=float((np.abs(np.diff(usable)) / usable[:-1]).mean()) if len(usable) > 1 else 0.0,
            num_spikes=self.num_spikes,
            num_non_finite=int((~np.isfinite(norms)).sum()),
            window=self.window,
        )

    def loss(self) -> float:
        """Return the mean training cross entropy of the last window, nats per token."""
        return statistics.fmean(self._losses)

    def _growth(self) -> ResidualGrowth | None:
        if not self._residuals:
            return None
        # A law may draw other depths: judge the loops that all have.
        depth = min(map(len, [*self._residuals, *self._references]))
        now = residual_growth([row[:depth] for row in self._residuals])
        per_loop, over_training = now.per_loop, 1.0
        if self._references:
            before = np.median(_as_array(self._references, depth), axis=0)
            after = np.median(_as_array(self._residuals, depth), axis=0)
            with np.errstate(invalid="ignore"):  # infinity over infinity; such norms are counted by themselves
                over_training = float(np.max(after / np.maximum(before, np.finfo(np.float64).tiny)))
        return ResidualGrowth(
            per_loop=per_loop,
            over_training=over_training,
            last_norm=now.last_norm,
            num_non_finite=now.num_non_finite,
        )

    def _judge(self, step: int) -> None:
        loss, unigram = self.loss(), self.unigram_cross_entropy
        found, reason = judge(loss, unigram, self.oscillation(), self._growth(), self.limits)
        verdict: Verdict | None = found
        if len(self._norms) < min(self.window, self.num_steps) and found != "exploding":
            verdict, reason = None, f"{len(self._norms)} of the {self.window} updates that a verdict needs"
        elif found == "collapsed" and not self.has_learned and 2 * step < self.num_steps:
            verdict = None
            reason = f"the loss {loss:.3f} is still at the unigram level {unigram:.3f}: too early to call it collapsed"
        if unigram is not None and loss <= unigram - self.limits.collapse_margin:
            self.has_learned = True
        since = self.live.since_step if verdict == self.live.verdict and self.live.since_step else step
        self.live = LiveVerdict(verdict=verdict, reason=reason, since_step=since)


def cross_entropy_of(record: Mapping[str, Any]) -> float:
    """Return the cross entropy of a record's deepest trained loop; its whole loss where it names none."""
    parts: Mapping[str, float] = record.get("loss_parts") or {}
    deepest = max((name for name in parts if name.startswith("cross_entropy")), key=_loop_of, default=None)
    value = record["loss"] if deepest is None else parts[deepest]
    return math.nan if value is None else float(value)


def _loop_of(name: str) -> int:
    tail = name.rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0


def _as_array(rows: Iterable[Sequence[float | None]], depth: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([[math.inf if v is None else v for v in row[:depth]] for row in rows], dtype=np.float64)
