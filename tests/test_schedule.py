from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformers.errors import ConfigError
from loopformers.schedule import Schedule, all_schedules, count_schedules, is_uniform_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("uniform:4", "1/4,1/4,1/4,1/4"),
        ("coarse-first:4", "4/8,2/8,1/8,1/8"),
        ("fine_first:4", "1/8,1/8,2/8,4/8"),
        ("coarse-first:2", "5/8,3/8"),
        ("1/2, 1/4, 1/4", "2/4,1/4,1/4"),
        ("[0.5, 0.25, 0.25]", "2/4,1/4,1/4"),
        ("2,1,1", "2/4,1/4,1/4"),
        ("1", "1/1"),
        ("1.0", "1/1"),
        ([0.125, 0.125, 0.25, 0.5], "1/8,1/8,2/8,4/8"),
        ([1 / 3, 2 / 3], "1/3,2/3"),
        ([0.3333333, 0.6666667], "1/3,2/3"),
        ((3, 1), "3/4,1/4"),
        (Schedule((2, 2), 4), "1/2,1/2"),
    ],
)
def test_a_schedule_is_read_in_every_form_that_users_write(value, expected):
    assert str(Schedule.parse(value, num_loops=None, grid=8)) == expected


def test_no_schedule_means_uniform_over_the_budget_or_the_trained_loops():
    assert Schedule.parse(None, num_loops=None, grid=5) == Schedule.uniform(5)
    assert Schedule.parse(None, num_loops=3, grid=5) == Schedule.uniform(3)
    assert Schedule.parse("fine-first", num_loops=3, grid=8) == Schedule((1, 2, 5), 8)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("coarse-frist:4", r"schedule='coarse-frist:4' is not known; did you mean 'coarse-first'\?"),
        ("spiral", r"schedule='spiral' is not known; choose one of: coarse-first, fine-first, uniform"),
        ("uniform:x", "'x' is not a number of loops"),
        ([0.5, 0.4], r"sum to 0\.9, and must sum to 1"),
        ("1/2,1/4", r"sum to 0\.75, and must sum to 1"),
        ([1.5, -0.5], "must all be positive"),
        ([0.5, "half"], "'half', which is not a number"),
        ([math.nan, 1.0], "nan, which is not a number"),
        ("", "not known"),
        ([], "must sum to 1"),
        ("coarse-first:9", "does not fit a grid of 1/8"),
        ("uniform:0", "num_loops=0 must be a whole number of at least 1"),
        (7, "must be a Schedule, text such as"),
    ],
)
def test_a_bad_schedule_is_refused_with_value_rule_and_remedy(value, message):
    with pytest.raises(ConfigError, match=message):
        Schedule.parse(value, num_loops=None, grid=8)


@pytest.mark.parametrize("num_loops", [0, -1, True, 2.0, "3"])
def test_a_number_of_loops_is_a_whole_number_of_at_least_one(num_loops):
    with pytest.raises((ConfigError, TypeError), match="num_loops"):
        Schedule.parse(None, num_loops=num_loops, grid=8)


def test_two_different_numbers_of_loops_contradict_each_other():
    with pytest.raises(ConfigError, match="contradict"):
        Schedule.parse("uniform:3", num_loops=4, grid=8)
    assert Schedule.parse("uniform:3", num_loops=3, grid=8).num_loops == 3


def test_numerators_must_sum_to_the_grid():
    with pytest.raises(ConfigError, match="sum to 5/8"):
        Schedule((2, 3), 8)
    with pytest.raises(ConfigError, match="at least 1"):
        Schedule((0, 8), 8)
    with pytest.raises(ConfigError, match="0 loops"):
        Schedule((), 0)


def test_equality_ignores_the_grid():
    assert Schedule((2, 2), 4) == Schedule.uniform(2)
    assert hash(Schedule((4, 2, 2), 8)) == hash(Schedule((2, 1, 1), 4))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=24))
def test_times_are_correctly_rounded_and_steps_sum_to_one(numerators):
    """Fault 17: accumulating 1/24 in bfloat16 ends at 1.008."""
    grid = sum(numerators)
    schedule = Schedule(tuple(numerators), grid)
    assert schedule.times == tuple(sum(numerators[:i]) / grid for i in range(len(numerators)))
    assert schedule.times[0] == 0.0
    assert schedule.times[-1] + schedule.step_sizes[-1] == pytest.approx(1.0, abs=1e-15)
    assert Schedule.parse(str(schedule), num_loops=None, grid=8) == schedule
    assert Schedule.explicit(schedule.step_sizes) == schedule
    assert schedule.reversed().reversed() == schedule


@pytest.mark.parametrize("grid", [1, 6, 8])
def test_a_schedule_is_uniform_when_all_its_steps_are_equal_and_not_when_the_first_has_the_mean_size(grid):
    for num_loops in range(1, grid + 1):
        for schedule in all_schedules(num_loops, grid=grid):
            equal = all(size == schedule.step_sizes[0] for size in schedule.step_sizes)
            assert schedule.is_uniform == is_uniform_text(str(schedule)) == equal
    assert not Schedule((2, 1, 3), 6).is_uniform


@given(grid=st.integers(1, 40), data=st.data())
def test_coarse_first_falls_and_fine_first_rises(grid, data):
    num_loops = data.draw(st.integers(1, grid))
    coarse = Schedule.coarse_first(num_loops, grid=grid)
    assert coarse.num_loops == num_loops
    assert list(coarse.step_sizes) == sorted(coarse.step_sizes, reverse=True)
    assert Schedule.fine_first(num_loops, grid=grid) == coarse.reversed()
    if 1 < num_loops < grid / 2:
        assert not coarse.is_uniform


@pytest.mark.parametrize(("grid", "num_loops"), [(8, 4), (5, 1), (6, 6), (7, 3)])
def test_all_schedules_are_all_compositions_once(grid, num_loops):
    schedules = list(all_schedules(num_loops, grid=grid))
    assert (
        len(schedules)
        == len(set(schedules))
        == count_schedules(num_loops, grid=grid)
        == math.comb(grid - 1, num_loops - 1)
    )
    assert all(s.num_loops == num_loops for s in schedules)


def test_more_loops_than_the_grid_have_no_schedules():
    with pytest.raises(ConfigError, match="at most 3 loops"):
        list(all_schedules(4, grid=3))


def test_schedules_and_laws_import_no_torch():
    code = "import sys, loopformers.laws, loopformers.schedule\nprint([m in sys.modules for m in ('torch', 'transformers')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[False, False]\n"
    )
