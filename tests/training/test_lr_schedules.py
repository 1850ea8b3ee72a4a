from __future__ import annotations

import pytest
import torch

from loopformers.errors import ConfigError
from loopformers.training.lr_schedules import ConstantThenLinear, WarmupCosine


def test_flt_schedule_is_constant_for_four_fifths_and_ends_at_zero() -> None:
    values = [ConstantThenLinear()(step, 200) for step in range(201)]
    assert values[:161] == [1.0] * 161
    assert values[180] == pytest.approx(0.5)
    assert values[200] == 0.0
    assert values == sorted(values, reverse=True)


def test_flt_schedule_without_decay_stays_constant() -> None:
    assert {ConstantThenLinear(decay_fraction=0.0)(step, 7) for step in range(8)} == {1.0}


def test_loopformer_schedule_warms_up_and_falls_to_a_tenth() -> None:
    schedule = WarmupCosine(warmup_steps=5)
    values = [schedule(step, 25) for step in range(26)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[15] == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert values[25] == pytest.approx(0.1)
    assert schedule(1000, 25) == pytest.approx(0.1)


def test_warmup_longer_than_the_run_never_divides_by_zero() -> None:
    assert WarmupCosine(warmup_steps=9)(8, 9) == 1.0
    assert WarmupCosine(warmup_steps=9)(9, 9) == 1.0
    assert WarmupCosine(warmup_steps=0)(0, 3) == 1.0


@pytest.mark.parametrize("schedule", [ConstantThenLinear(), WarmupCosine(warmup_steps=3)])
def test_torch_scheduler_gives_each_group_its_own_base_rate_times_the_multiplier(
    schedule: ConstantThenLinear | WarmupCosine,
) -> None:
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 2.0}])
    scheduler = schedule.build(optimizer, 10)
    for step in range(10):
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(
            [0.5 * schedule(step, 10), 2.0 * schedule(step, 10)]
        )
        optimizer.step()
        scheduler.step()
    resumed = schedule.build(torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 2.0}]), 10)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay_fraction=1\.5"):
        ConstantThenLinear(decay_fraction=1.5)
    with pytest.raises(ConfigError, match="warmup_steps=-1"):
        WarmupCosine(warmup_steps=-1)
    with pytest.raises(ConfigError, match=r"floor=-0\.1"):
        WarmupCosine(floor=-0.1)
    with pytest.raises(ConfigError, match="num_steps=0"):
        ConstantThenLinear().build(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 0)
