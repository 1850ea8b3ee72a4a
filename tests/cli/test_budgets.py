from __future__ import annotations

import argparse
import math

import pytest

from loopformers.cli.budgets import add_budget_arguments, check_finite, parse_budgets
from loopformers.errors import ConfigError, NonFiniteError
from loopformers.schedule import Schedule
from loopformers.testing import tiny_config


def test_numbers_of_loops_become_uniform_schedules_in_order() -> None:
    config = tiny_config("flt")
    assert parse_budgets("4, 1,12", None, config) == [Schedule.uniform(4), Schedule.uniform(1), Schedule.uniform(12)]


def test_the_default_is_the_trained_run() -> None:
    assert parse_budgets(None, None, tiny_config("flt", num_loops=5)) == [Schedule.uniform(5)]


def test_schedules_are_read_in_every_form_on_the_models_grid() -> None:
    config = tiny_config("loopformer", num_loops=8)
    runs = parse_budgets(None, ["coarse-first:4", "1/2,1/4,1/4", "uniform:2"], config)
    assert list(map(str, runs)) == ["4/8,2/8,1/8,1/8", "2/4,1/4,1/4", "1/2,1/2"]


@pytest.mark.parametrize(
    ("num_loops", "schedules", "text"),
    [
        (
            "1,two",
            None,
            "--num-loops '1,two': 'two' is not a number of loops; write whole numbers from 1, such as 1,4,12",
        ),
        ("", None, "'' is not a number of loops"),
        ("1,-2", None, "num_loops=-2 must be a whole number of at least 1"),
        ("3,0", None, "num_loops=0 must be a whole number of at least 1"),
        (None, ["2/3,1/3"], "does not know step sizes; give num_loops=2 instead"),
        (None, ["0.5,0.4"], "sum to 0.9, and must sum to 1"),
        (None, ["coarse:3"], "did you mean 'coarse-first'?"),
    ],
)
def test_what_is_no_budget_of_this_model_is_refused(
    num_loops: str | None, schedules: list[str] | None, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_budgets(num_loops, schedules, tiny_config("flt"))
    assert text in str(error.value)


def test_loops_and_schedules_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_budget_arguments(parser)
    assert parser.parse_args(["--schedule", "uniform:2", "--schedule", "uniform:3"]).schedule == [
        "uniform:2",
        "uniform:3",
    ]
    with pytest.raises(SystemExit):
        parser.parse_args(["--num-loops", "2", "--schedule", "uniform:2"])
    assert "not allowed with" in capsys.readouterr().err


def test_losses_that_are_not_finite_are_named_and_never_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    check_finite("lt", {"1/1": 2.5, "1/2,1/2": 3.5})
    assert capsys.readouterr() == ("", "")
    check_finite("lt", {"1/1": 2.5, "1/2,1/2": math.nan, "1/3,1/3,1/3": math.inf})
    said = "warning: lt has a loss that is not finite at 1/2,1/2, 1/3,1/3,1/3: its states overflow there; use other numbers\n"
    assert capsys.readouterr() == ("", said)
    with pytest.raises(
        NonFiniteError, match=r"lt has a loss that is not finite at every requested number of loops \(1/1\)"
    ):
        check_finite("lt", {"1/1": math.nan})
