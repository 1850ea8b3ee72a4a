from __future__ import annotations

import itertools

import pytest
import torch

from loopformers import ConfigError, Schedule
from loopformers.evaluation.timing import time_runs
from loopformers.testing import tiny_model


def test_times_are_medians_over_rounds_that_take_turns_after_one_that_warms_up() -> None:
    model = tiny_model("loopformer", max_position_embeddings=8)
    windows = [{"input_ids": torch.arange(7)}, {"input_ids": torch.arange(7, 14)}]
    ticks = itertools.count()
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["schedule"].num_loops), with_kwargs=True
    )
    runs = [Schedule.uniform(2), Schedule.uniform(3)]
    done: list[int] = []
    times = time_runs(
        model, runs, windows, repeats=2, new_tokens=3, clock=lambda: float(next(ticks)), on_run=lambda: done.append(1)
    )
    assert [time.decode_seconds for time in times] == [1.0, 1.0]
    assert [time.tokens_per_second for time in times] == [14.0, 14.0]
    # a prompt, three tokens and a batch of windows each
    assert seen == ([2] * 5 + [3] * 5) * 3
    assert len(done) == 6


def test_no_rounds_and_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeats=0"):
        time_runs(tiny_model("flt"), [Schedule.uniform(1)], [{"input_ids": torch.arange(3)}], repeats=0)
    with pytest.raises(ConfigError, match="new_tokens=0"):
        time_runs(tiny_model("flt"), [Schedule.uniform(1)], [{"input_ids": torch.arange(3)}], new_tokens=0)
