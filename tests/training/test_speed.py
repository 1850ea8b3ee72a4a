from __future__ import annotations

import pytest

from loopformers.training.speed import Speedometer, measured_peak


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_speed_counts_training_and_the_time_left_counts_all() -> None:
    clock = Clock()
    meter = Speedometer(peak_flops=1000.0, num_steps=10, clock=clock)
    for step in (1, 2):
        clock.now += 3.0  # a validation, or a checkpoint
        meter.begin()
        clock.now += 2.0
        speed = meter.end(step=step, tokens=50, flops=400.0)
    assert speed.seconds == 2.0
    assert speed.tokens_per_second == 25.0
    assert speed.mfu == pytest.approx(0.2)
    assert speed.seconds_left == pytest.approx(8 * 5.0)


def test_old_updates_are_forgotten() -> None:
    clock = Clock()
    meter = Speedometer(peak_flops=1.0, num_steps=99, clock=clock)
    for step in range(40):
        meter.begin()
        clock.now += 100.0 if step < 20 else 1.0
        speed = meter.end(step=step + 1, tokens=7, flops=0.0)
    assert speed.tokens_per_second == pytest.approx(7.0)


def test_the_peak_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "loopformers.training.speed.matmul_peak", lambda device, precision: calls.append(precision) or 5.0
    )
    measured_peak.cache_clear()
    assert [measured_peak("cpu", "float32", 1) for _ in range(3)] == [5.0] * 3
    assert calls == ["float32"]
    measured_peak.cache_clear()
