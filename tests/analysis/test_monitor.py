from __future__ import annotations

import math

import numpy as np
import pytest

from loopformers.analysis.monitor import JUDGED_EVERY, StabilityMonitor, cross_entropy_of
from loopformers.analysis.stability import gradient_oscillation
from loopformers.errors import ConfigError

UNIGRAM = 6.4


def follow(losses, *, norms=None, residuals=None, unigram=UNIGRAM, num_steps=None, window=20):
    monitor = StabilityMonitor(num_steps=num_steps or len(losses), unigram_cross_entropy=unigram, window=window)
    seen = []
    for i, loss in enumerate(losses):
        live = monitor.add(
            step=i + 1,
            loss=loss,
            gradient_norm=0.5 if norms is None else norms[i],
            residual_norms=() if residuals is None else residuals[i],
        )
        seen.append(live)
    return monitor, seen


def falling(count, start=6.4, end=5.0):
    return list(np.linspace(start, end, count))


def test_a_run_that_learns_is_stable_once_a_window_is_full():
    _, seen = follow(falling(100))
    assert seen[8].verdict is None
    assert "no update" in seen[8].reason
    assert "10 of the 20 updates" in seen[9].reason
    assert seen[-1].verdict == "stable"
    assert seen[-1].since_step < 60


def test_a_run_that_stays_at_the_unigram_level_has_collapsed_after_half_of_its_updates():
    _, seen = follow([6.39] * 100)
    assert seen[38].verdict is None
    assert "too early to call it collapsed" in seen[38].reason
    assert seen[-1].verdict == "collapsed"
    assert seen[-1].since_step == 50
    assert "unigram level 6.400" in seen[-1].reason


def test_a_run_that_falls_back_to_the_unigram_level_has_collapsed_at_once():
    _, seen = follow(falling(30, end=4.0) + [6.4] * 30, num_steps=1000)
    assert seen[29].verdict == "stable"
    assert seen[-1].verdict == "collapsed"
    assert 40 <= seen[-1].since_step <= 50


def test_without_a_unigram_level_a_collapse_is_not_judged():
    _, seen = follow([6.39] * 60, unigram=None)
    assert seen[-1].verdict == "stable"
    assert "neither" in seen[-1].reason


def test_a_swinging_gradient_norm_oscillates_and_spikes_are_counted():
    norms = [0.5, 1.5] * 30
    _, seen = follow(falling(60), norms=norms)
    assert seen[-1].verdict == "oscillating"
    spiked = [0.5] * 60
    spiked[30] = spiked[40] = 5.0
    monitor, _ = follow(falling(60), norms=spiked)
    assert monitor.num_spikes == gradient_oscillation(spiked, window=20).num_spikes == 2


def test_the_swing_of_a_window_is_that_of_the_finished_runs_measure():
    norms = list(np.random.default_rng(3).lognormal(size=70))
    monitor, _ = follow(falling(70), norms=norms)
    whole = gradient_oscillation(norms[-20:], window=20)
    assert monitor.oscillation().log_std == pytest.approx(whole.log_std)
    assert monitor.oscillation().mean_relative_change == pytest.approx(whole.mean_relative_change)


@pytest.mark.parametrize(
    ("residual", "reason"),
    [
        (lambda step: [1.0, 3.0, 9.0], "per loop"),
        (lambda step: [8.0 + step**2, 9.0 + step**2], "after the first tenth"),
        (lambda step: [8.0, None], "not finite"),
    ],
)
def test_a_growing_residual_stream_explodes(residual, reason):
    _, seen = follow(falling(200), residuals=[residual(step) for step in range(200)])
    assert seen[-1].verdict == "exploding"
    assert reason in seen[-1].reason


def test_runs_of_varying_depth_are_judged_by_the_loops_that_all_have():
    rows = [[8.0] * (1 + step % 3) for step in range(60)]
    _, seen = follow(falling(60), residuals=rows)
    assert seen[-1].verdict == "stable"


def test_memory_does_not_grow_with_the_run():
    monitor, _ = follow([5.0] * 3000, residuals=[[8.0, 8.0]] * 3000)
    assert len(monitor._references) <= 64
    assert len(monitor._residuals) == len(monitor._norms) == 20


def test_replayed_records_give_the_verdict_of_an_uninterrupted_run():
    losses, norms = falling(90), list(np.random.default_rng(0).lognormal(size=90))
    whole, _ = follow(losses, norms=norms, residuals=[[8.0, 9.0]] * 90)
    records = [
        {"step": i + 1, "loss": losses[i], "gradient_norm": norms[i], "residual_norms": [8.0, 9.0]} for i in range(90)
    ]
    resumed = StabilityMonitor(num_steps=90, unigram_cross_entropy=UNIGRAM, window=20)
    resumed.replay([*records[:50], {"step": 50, "loss": None, "gradient_norm": None}, *records[50:]])
    assert resumed.live == whole.live
    assert resumed.oscillation() == whole.oscillation()


def test_the_loss_that_is_judged_is_the_deepest_loops_cross_entropy():
    assert cross_entropy_of({"loss": 3.0, "loss_parts": {"cross_entropy": 2.0, "short_cross_entropy": 9.0}}) == 2.0
    parts = {f"cross_entropy_loop_{loop}": float(loop) for loop in (8, 9, 10)}
    assert cross_entropy_of({"loss": 3.0, "loss_parts": parts}) == 10.0
    assert cross_entropy_of({"loss": 3.0}) == 3.0
    assert math.isnan(cross_entropy_of({"loss": None}))


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="window=1"):
        StabilityMonitor(num_steps=9, window=1)
    with pytest.raises(ConfigError, match="unigram_cross_entropy=nan"):
        StabilityMonitor(num_steps=9, unigram_cross_entropy=math.nan)
    assert JUDGED_EVERY >= 1
