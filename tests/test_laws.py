from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformers.errors import ConfigError
from loopformers.laws import Curriculum, Fixed, PoissonLogNormal, ShortTrajectory, UniformRange, derive_rng
from loopformers.schedule import Schedule, all_schedules


@given(seed=st.integers(0, 99), step=st.integers(0, 10**6), microbatch=st.integers(0, 63), loops=st.integers(2, 24))
def test_a_draw_is_a_function_of_seed_step_and_microbatch(seed, step, microbatch, loops):
    """Faults 10 and 12: the same on every rank and after every resume."""
    for sampler in ("sequential", "uniform"):
        law = ShortTrajectory(loops, sampler)
        plan = law.plan(seed=seed, step=step, microbatch=microbatch)
        assert plan == law.plan(seed=seed, step=step, microbatch=microbatch)
        assert plan.long == Schedule.uniform(loops)
        assert 1 <= plan.short.num_loops < loops
        assert loops % plan.short.grid == 0


def test_draws_differ_between_steps_microbatches_and_seeds():
    law = ShortTrajectory(24)
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]
    assert len({law.plan(seed=a, step=b, microbatch=c).short for a, b, c in keys}) > 3


def draws(sampler, number=20_000, loops=8):
    law, rng = ShortTrajectory(loops, sampler), derive_rng("test", 0)
    return Counter(law.draw(rng) for _ in range(number))


def test_the_sequential_sampler_favours_coarse_first_twelve_to_one():
    counts = draws("sequential", 60_000)
    coarse, even = counts[Schedule((5, 1, 1, 1), 8)], counts[Schedule((2, 2, 2, 2), 8)]
    # (5,1,1,1) has probability 1/7 * 1/5, (2,2,2,2) 1/7 * 1/5 * 1/4 * 1/3; but (2,2,2,2) = (1,1,1,1)/4 is one schedule
    assert coarse / 60_000 == pytest.approx(1 / 35, rel=0.1)
    assert even / 60_000 == pytest.approx(1 / 420, rel=0.35)
    assert 8 < coarse / even < 18


def test_the_uniform_sampler_draws_every_schedule_of_a_length_alike():
    counts = draws("uniform", 70_000)
    by_length = [counts[schedule] for schedule in all_schedules(4, grid=8)]
    assert len(by_length) == 35
    assert sum(by_length) / 70_000 == pytest.approx(1 / 7, rel=0.05)
    assert max(by_length) < 1.35 * min(by_length)


@pytest.mark.parametrize("sampler", ["sequential", "uniform"])
def test_short_lengths_are_uniform_on_one_to_t_minus_one(sampler):
    lengths = Counter()
    for schedule, count in draws(sampler, 14_000).items():
        lengths[schedule.num_loops] += count
    assert set(lengths) == set(range(1, 8))
    assert max(lengths.values()) < 1.15 * min(lengths.values())


def test_fixed_depth_models_draw_passes_alone():
    law = ShortTrajectory(6, passes_only=True)
    assert all(law.plan(seed=0, step=step).short.is_uniform for step in range(50))


def test_a_fixed_law_always_plans_the_same():
    assert Fixed(3).plan(seed=1, step=2).long == Schedule.uniform(3)
    assert Fixed(3).plan(seed=1, step=2).short is None


def loops_of(law, steps=8000):
    return [law.plan(seed=5, step=step).long.num_loops for step in range(steps)]


def test_a_uniform_range_draws_every_count_alike_and_both_ends():
    counts = Counter(loops_of(UniformRange(2, 6)))
    assert set(counts) == {2, 3, 4, 5, 6}
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_a_log_normal_poisson_has_its_mean_a_tail_and_a_limit():
    loops = loops_of(PoissonLogNormal(6.0, max_loops=60), 20_000)
    assert sum(loops) / len(loops) == pytest.approx(6.0, rel=0.02)
    assert min(loops) == 1
    assert max(loops) > 18
    # Var[r] = E[rate] + Var[rate], and Var[rate] = E[rate]^2 (exp(sigma^2) - 1)
    variance = sum((r - 6.0) ** 2 for r in loops) / len(loops)
    assert variance == pytest.approx(5 + 25 * (2.718281828**0.25 - 1), rel=0.1)
    assert max(loops_of(PoissonLogNormal(6.0, max_loops=9))) == 9


def test_a_curriculum_moves_linearly_and_stays():
    law = Curriculum(2, 10, 100)
    assert [law.plan(seed=0, step=step).long.num_loops for step in (0, 50, 100, 900)] == [2, 6, 10, 10]


@pytest.mark.parametrize("law", [UniformRange(1, 24), PoissonLogNormal(8.0), Curriculum(1, 12, 40)])
def test_every_law_is_a_function_of_seed_step_and_microbatch(law):
    for key in ({"seed": 1, "step": 2, "microbatch": 3}, {"seed": 0, "step": 10**6}):
        assert law.plan(**key) == law.plan(**key)


def test_illegal_laws_are_refused():
    with pytest.raises(ConfigError, match="min_loops=5 is above max_loops=3"):
        UniformRange(5, 3)
    with pytest.raises(ConfigError, match="mean_loops=1"):
        PoissonLogNormal(1.0)
    with pytest.raises(ConfigError, match="max_loops=3 is below mean_loops=4"):
        PoissonLogNormal(4.0, max_loops=3)
    with pytest.raises(ConfigError, match="num_steps=0"):
        Curriculum(1, 2, 0)
    with pytest.raises(ConfigError, match="num_loops=1 leaves no shorter trajectory"):
        ShortTrajectory(1)
    with pytest.raises(ConfigError, match=r"short_sampler='sequental' is not known; did you mean 'sequential'\?"):
        ShortTrajectory(4, "sequental")
    with pytest.raises(ConfigError, match="num_loops=0"):
        Fixed(0)
