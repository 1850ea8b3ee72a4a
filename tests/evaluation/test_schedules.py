from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from loopformers import ConfigError, Schedule
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.evaluation.schedules import draw_probability, named_schedules, sample_schedules, search_schedules
from loopformers.laws import Fixed, ShortTrajectory
from loopformers.schedule import all_schedules, count_schedules
from loopformers.testing import tiny_model


def windows(count: int = 5, length: int = 7) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(61, (length,), generator=generator)} for _ in range(count)]


@pytest.mark.parametrize("preset", ["elastic-flt", "loopformer"])
def test_a_search_ranks_every_composition_by_the_loss_that_the_reference_gives(preset: str) -> None:
    model = tiny_model(preset, num_loops=6).double()
    search = search_schedules(model, windows(), 3, batch_size=2)
    expected = {str(schedule) for schedule in all_schedules(3, grid=6)}
    assert {score.schedule for score in search.scores} == expected
    assert (search.num_possible, search.seed, search.grid) == (10, None, 6)
    reference = evaluate_budgets(model, windows(), [score.schedule for score in search.scores])
    for ours, theirs in zip(search.scores, reference, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.accuracy == theirs.accuracy
    losses = [score.loss for score in search.scores]
    assert losses == sorted(losses)
    assert search.loss_spread == losses[-1] - losses[0] > 0
    assert search.best.loss == losses[0]
    assert search.most_accurate.accuracy == max(score.accuracy for score in search.scores)
    assert search.accuracy_spread == search.most_accurate.accuracy - min(score.accuracy for score in search.scores)


def test_named_schedules_are_found_and_ordered_by_when_their_loops_start() -> None:
    search = search_schedules(tiny_model("elastic-flt", num_loops=6), windows(2), 3)
    uniform, coarse, fine = (search.named(name) for name in ("uniform", "coarse-first", "fine-first"))
    assert (uniform.schedule, coarse.schedule, fine.schedule) == ("1/3,1/3,1/3", "3/6,2/6,1/6", "1/6,2/6,3/6")
    assert fine.mean_time < uniform.mean_time < coarse.mean_time
    assert uniform.mean_time == pytest.approx(1 / 3)


def test_uniform_is_scored_even_where_it_is_not_on_the_grid() -> None:
    search = search_schedules(tiny_model("elastic-flt", num_loops=5), windows(2), 2)
    assert search.num_possible == 4
    assert len(search.scores) == 5
    assert search.named("uniform").schedule == "1/2,1/2"
    assert search.named("uniform").law_probability == 0.0


def test_a_budget_with_more_schedules_than_the_limit_is_sampled_by_a_stated_seed() -> None:
    first, again, other = (sample_schedules(5, grid=12, limit=20, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert set(first) != set(other)
    assert len(set(first)) == len(first) == 20
    assert set(named_schedules(5, grid=12).values()) <= set(first)
    assert all(run.num_loops == 5 for run in first)
    search = search_schedules(tiny_model("elastic-flt", num_loops=6), windows(2), 3, limit=4, seed=9)
    assert (search.seed, len(search.scores), search.law_loss) == (9, 4, None)


@pytest.mark.parametrize("sampler", ["sequential", "uniform"])
def test_the_probability_of_a_draw_is_how_often_the_law_draws_it(sampler: str) -> None:
    law = ShortTrajectory(6, sampler)
    rng = random.Random(5)
    drawn = Counter(run for _ in range(6000) if (run := law.draw(rng)).num_loops == 3)
    schedules = list(all_schedules(3, grid=6))
    probabilities = {schedule: draw_probability(law, schedule) for schedule in schedules}
    assert sum(p for p in probabilities.values() if p) == pytest.approx(1)
    for schedule, probability in probabilities.items():
        assert drawn[schedule] / drawn.total() == pytest.approx(probability, abs=0.035)


def test_the_sequential_sampler_draws_a_coarse_first_schedule_twelve_times_as_often_as_the_uniform_one() -> None:
    law = ShortTrajectory(8, "sequential")
    coarse, even = (draw_probability(law, Schedule(steps, 8)) for steps in ((5, 1, 1, 1), (2, 2, 2, 2)))
    assert coarse is not None
    assert even is not None
    assert coarse == pytest.approx(12 * even)
    assert draw_probability(law, Schedule.uniform(3)) == 0.0
    assert draw_probability(ShortTrajectory(8, passes_only=True), Schedule.uniform(4)) is None
    assert draw_probability(Fixed(8), Schedule.uniform(4)) is None


def test_the_mean_loss_as_training_drew_schedules_is_weighted_by_their_probability() -> None:
    model = tiny_model("elastic-flt", num_loops=5)
    by_law = {
        law: search_schedules(model, windows(2), 3, law=ShortTrajectory(5, law)) for law in ("sequential", "uniform")
    }
    for search in by_law.values():
        weighted = sum((score.law_probability or 0) * score.loss for score in search.scores)
        assert search.law_loss == pytest.approx(weighted)
    on_grid = [score.loss for score in by_law["uniform"].scores if score.law_probability]
    assert by_law["uniform"].law_loss == pytest.approx(sum(on_grid) / len(on_grid))
    assert len(on_grid) == count_schedules(3, grid=5)
    assert by_law["sequential"].law_loss != by_law["uniform"].law_loss
    assert search_schedules(model, windows(1), 3, law=Fixed(5)).law_loss is None


def test_what_has_no_schedules_to_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not know step sizes"):
        search_schedules(tiny_model("flt"), windows(1), 2)
    with pytest.raises(ConfigError, match="does not know step sizes"):
        search_schedules(tiny_model("tmlt"), windows(1), 2)
    with pytest.raises(ConfigError, match="at most 3 loops"):
        search_schedules(tiny_model("elastic-flt", num_loops=3), windows(1), 4)
    with pytest.raises(ConfigError, match="limit=0"):
        search_schedules(tiny_model("elastic-flt"), windows(1), 2, limit=0)
