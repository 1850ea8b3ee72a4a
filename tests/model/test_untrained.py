"""The warning for runs that the training of a conditioned model has never drawn."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path

import pytest
import torch

from loopformers import Schedule
from loopformers.errors import ScheduleWarning
from loopformers.model.untrained import schedule_warning
from loopformers.testing import tiny_config, tiny_model

IDS = torch.tensor([[3, 1, 4, 1, 5]])

RUNS = [
    # preset, its overrides, the run, and what the warning says has been seen; None: no warning
    ("flt", {}, "uniform:5", None),
    ("base-loop-exit", {}, "uniform:7", None),
    ("loopformer", {}, "uniform:8", None),
    ("loopformer", {}, "uniform:4", None),
    ("loopformer", {}, "5/8,1/8,2/8", None),
    ("loopformer", {}, "1/2,1/4,1/4", None),
    ("loopformer", {}, "uniform:3", "3 steps of 1/3 .*has seen steps on multiples of 1/8; .*coarse-first:3"),
    ("loopformer", {}, "1/16,15/16", "steps 1/16,15/16 .*multiples of 1/8"),
    ("loopformer", {}, "uniform:16", "16 steps of 1/16 .*run at most 8 loops"),
    ("loopformer", {"objective": "last_loop"}, "uniform:8", None),
    (
        "loopformer",
        {"objective": "last_loop"},
        "uniform:4",
        "4 steps of 1/4 .*has seen 8 steps of 1/8; run num_loops=8",
    ),
    ("elastic-flt", {"objective": "every_loop"}, "uniform:2", "has seen 8 steps of 1/8"),
    ("loopformer", {"conditioning": "time"}, "3/8,5/8", None),
    (
        "loopformer",
        {"conditioning": "time"},
        "uniform:5",
        "this model is told the time of each loop, .*multiples of 1/8",
    ),
    ("tmlt", {}, "uniform:8", None),
    (
        "tmlt",
        {},
        "uniform:4",
        "4 passes were never drawn .*the index of each loop, and has seen 8 passes; run num_loops=8",
    ),
    ("tmlt", {}, "uniform:9", "9 passes were never drawn"),
    ("tmlt-exit", {}, "uniform:1", None),
    ("tmlt-exit", {}, "uniform:5", None),
    ("tmlt-exit", {}, "uniform:9", "has seen 1 to 8 passes; run at most 8 loops"),
    ("tmlt", {"objective": "every_loop"}, "uniform:3", None),
    ("tmlt", {"objective": "last_third"}, "uniform:6", None),
    ("tmlt", {"objective": "last_third"}, "uniform:5", "has seen 6 to 8 passes"),
]


@pytest.mark.parametrize(("preset", "overrides", "run", "seen"), RUNS, ids=str)
def test_a_run_is_warned_of_where_training_has_not_drawn_it(preset, overrides, run, seen):
    config = tiny_config(preset, num_loops=8, **overrides)
    text = schedule_warning(config, config.resolve_schedule(schedule=run))
    if seen is None:
        assert text is None
    else:
        with pytest.warns(ScheduleWarning, match=seen):
            warnings.warn(text, ScheduleWarning, stacklevel=1)


@pytest.mark.parametrize("preset", ["loopformer", "elastic-flt", "tmlt-exit", "tmlt"])
@pytest.mark.parametrize("num_loops", [3, 6])
def test_nothing_that_the_law_draws_is_warned_of(preset, num_loops):
    config = tiny_config(preset, num_loops=num_loops)
    for step in random.Random(0).sample(range(10_000), 60):
        plan = config.law.plan(seed=1, step=step)
        for run in (plan.long, plan.short or plan.long):
            assert schedule_warning(config, run) is None, run


def calls(model):
    """Every way into a run."""
    return {
        "forward": lambda run: model(IDS, schedule=run),
        "trunk": lambda run: model.model(IDS, schedule=run),
        "generate": lambda run: model.generate(IDS, schedule=run, max_new_tokens=3, do_sample=False),
        "loss": lambda run: model(IDS, labels=IDS, schedule=run),
    }


@pytest.mark.parametrize("way", ["forward", "trunk", "generate", "loss"])
def test_each_untrained_run_is_warned_of_once(way):
    model = tiny_model("elastic-flt", num_loops=4)
    call = calls(model)[way]
    with pytest.warns(ScheduleWarning, match=r"3 steps of 1/3 were never drawn in training") as seen:
        call("uniform:3")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        call("uniform:3")
        call("uniform:2")
    with pytest.warns(ScheduleWarning, match="steps 1/5,4/5"):
        call("1/5,4/5")


def test_what_training_runs_here_is_trained_here():
    """A recipe's law may draw more than the configuration says."""
    model = tiny_model("tmlt", num_loops=3).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        model(IDS, num_loops=2)  # a loop of somebody's own: training mode, and its loss is computed elsewhere
        model(IDS, labels=IDS, num_loops=5).loss.backward()
        model.eval()
        model(IDS, num_loops=5)
    with pytest.warns(ScheduleWarning, match="2 passes"):
        model(IDS, num_loops=2)


def test_a_copy_of_a_model_warns_for_itself():
    model = tiny_model("loopformer", num_loops=4)
    other = copy.deepcopy(model)
    for each in (model, other):
        with pytest.warns(ScheduleWarning, match="multiples of 1/4"):
            each(IDS, schedule=Schedule.uniform(3))


def test_the_warning_names_the_line_that_made_the_call():
    model = tiny_model("loopformer", num_loops=4)
    for call in (lambda: model(IDS, num_loops=3), lambda: model.generate(IDS, num_loops=5, max_new_tokens=2)):
        with pytest.warns(ScheduleWarning) as seen:
            call()
        assert [warning.filename for warning in seen] == [__file__]


def test_the_readme_shows_no_warning_of_ours():
    """Its first lines are what a newcomer copies."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = readme.partition("```python\n")[2].partition("```")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, "README.md", "exec"), {})
