"""Which schedule of a budget scores best: all of them, or a stated sample, ranked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from loopformers.errors import ConfigError, check_count
from loopformers.evaluation.scoring import OnBatch, score_runs
from loopformers.laws import Law, ShortTrajectory, derive_rng
from loopformers.schedule import SCHEDULE_KINDS, Schedule, all_schedules, count_schedules

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = [
    "ScheduleScore",
    "ScheduleSearch",
    "check_searchable",
    "draw_probability",
    "named_schedules",
    "sample_schedules",
    "search_schedules",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleScore:
    """What one schedule scores."""

    schedule: str
    """Step sizes as fractions."""
    names: tuple[str, ...]
    """What it is called, if anything: uniform, coarse-first, fine-first."""
    loss: float
    """Nats per target."""
    accuracy: float
    """Share of targets that were the most likely token."""
    exact_match: float
    """Share of questions whose every target was the most likely token; see `loopformers.evaluation.scoring`."""
    mean_time: float
    """Mean over loops of the time that they start at: above (M - 1) / 2M the large steps come early, below it late."""
    law_probability: float | None
    """Probability that training drew it, among those of as many loops; None where training drew no schedules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSearch:
    """All scores of a search, the lowest loss first."""

    num_loops: int
    """M, the budget."""
    grid: int
    """T: step sizes are multiples of 1/T, except those of a uniform schedule where M does not divide T."""
    num_possible: int
    """Schedules of M steps on the grid."""
    seed: int | None
    """Of the sample; None: all of them were scored."""
    law: str
    """How training drew schedules."""
    law_loss: float | None
    """Mean loss of the schedules as training drew them; None where it drew none, or not all were scored."""
    num_targets: int
    """Tokens predicted by each."""
    scores: tuple[ScheduleScore, ...]
    """By loss."""

    @property
    def best(self) -> ScheduleScore:
        """The lowest loss."""
        return self.scores[0]

    @property
    def most_accurate(self) -> ScheduleScore:
        """The highest accuracy; among equals the lowest loss."""
        return max(self.scores, key=lambda score: score.accuracy)

    @property
    def loss_spread(self) -> float:
        """Highest less lowest loss, in nats."""
        return self.scores[-1].loss - self.scores[0].loss

    @property
    def accuracy_spread(self) -> float:
        """Highest less lowest accuracy."""
        values = [score.accuracy for score in self.scores]
        return max(values) - min(values)

    def named(self, name: str) -> ScheduleScore:
        """Return the score of a schedule by its name."""
        return next(score for score in self.scores if name in score.names)


def search_schedules(
    model: LoopedForCausalLM,
    windows: Iterable[Mapping[str, Any]],
    num_loops: int,
    *,
    law: Law | None = None,
    limit: int = 256,
    seed: int = 0,
    batch_size: int = 8,
    on_batch: OnBatch | None = None,
) -> ScheduleSearch:
    """Score the schedules of a budget.

    Args:
        model: A model that is told its time.
        windows: See `loopformers.evaluation.scoring.score_runs`.
        num_loops: M, the budget, at most T.
        law: What the model was trained with; default: its configuration's.
        limit: Score so many at most: where there are more, those of a name and a sample.
        seed: Of that sample.
        batch_size: Windows a forward.
        on_batch: Called after each batch.

    Raises:
        ConfigError: A model that does not know step sizes, a budget that the grid does not allow, or a limit below 1.
        DataError: A dataset without a target.
    """
    config = model.config
    check_searchable(config, num_loops)
    law = config.law if law is None else law
    names = named_schedules(num_loops, grid=config.num_loops)
    num_possible = count_schedules(num_loops, grid=config.num_loops)
    is_sampled = num_possible > limit
    runs = sample_schedules(num_loops, grid=config.num_loops, limit=limit, seed=seed)
    tallies = score_runs(model, windows, runs, batch_size=batch_size, on_batch=on_batch)
    scores = [
        ScheduleScore(
            schedule=str(run),
            names=tuple(name for name, schedule in names.items() if schedule == run),
            loss=tally.loss,
            accuracy=tally.accuracy,
            exact_match=tally.exact_match,
            mean_time=math.fsum(run.times) / run.num_loops,
            law_probability=draw_probability(law, run),
        )
        for run, tally in zip(runs, tallies, strict=True)
    ]
    drawn = [(s.law_probability, s.loss) for s in scores if s.law_probability is not None]
    return ScheduleSearch(
        num_loops=num_loops,
        grid=config.num_loops,
        num_possible=num_possible,
        seed=seed if is_sampled else None,
        law=describe_law(law),
        law_loss=math.fsum(p * loss for p, loss in drawn) if drawn and not is_sampled else None,
        num_targets=tallies[0].num_targets,
        scores=tuple(sorted(scores, key=lambda score: score.loss)),
    )


def check_searchable(config: Any, num_loops: int) -> None:
    """Raise ConfigError unless a model has schedules of so many loops to choose among."""
    if not config.understands_time:
        raise ConfigError(
            f"a model with conditioning={config.conditioning!r} does not know step sizes, so each budget has one run and no "
            "schedule to choose; compare budgets with `loopformers evaluate budget`, or train with "
            "conditioning='time_and_step'"
        )
    if count_schedules(num_loops, grid=config.num_loops) == 0:
        raise ConfigError(
            f"a budget of {num_loops} loops does not fit the grid of this model's T = {config.num_loops}: each step is at "
            f"least 1/{config.num_loops}; use at most {config.num_loops} loops"
        )


def named_schedules(num_loops: int, *, grid: int) -> Mapping[str, Schedule]:
    """Return the schedules of a budget that have a name, by name."""
    return {kind: Schedule.parse(kind, num_loops=num_loops, grid=grid) for kind in SCHEDULE_KINDS}


def sample_schedules(num_loops: int, *, grid: int, limit: int, seed: int) -> list[Schedule]:
    """Return all schedules of a budget and those of a name, or of more than `limit` those of a name and a sample.

    Args:
        num_loops: M.
        grid: T.
        limit: Return so many at most; those of a name are always among them.
        seed: Of the sample, which is uniform over the schedules, without repetition.
    """
    check_count("limit", limit)
    chosen = dict.fromkeys(named_schedules(num_loops, grid=grid).values())
    if count_schedules(num_loops, grid=grid) <= limit:
        return list(dict.fromkeys((*all_schedules(num_loops, grid=grid), *chosen)))
    rng = derive_rng("schedule-search", seed)
    while len(chosen) < limit:
        cuts = sorted(rng.sample(range(1, grid), num_loops - 1))
        chosen[Schedule(tuple(b - a for a, b in zip([0, *cuts], [*cuts, grid], strict=True)), grid)] = None
    return list(chosen)


def draw_probability(law: Law, schedule: Schedule) -> float | None:
    """Return how likely a law draws a schedule, given its number of loops; None for laws that draw no short schedules."""
    if not isinstance(law, ShortTrajectory) or law.passes_only:
        return None
    if law.num_loops % schedule.grid or schedule.num_loops > law.num_loops:
        return 0.0  # not on the law's grid
    if law.sampler == "uniform":
        return 1 / count_schedules(schedule.num_loops, grid=law.num_loops)
    probability, left = Fraction(1), law.num_loops
    for later, numerator in zip(range(schedule.num_loops - 1, 0, -1), schedule.numerators, strict=False):
        probability /= left - later  # uniform among the step sizes that leave 1/T for each later one
        left -= numerator * (law.num_loops // schedule.grid)
    return float(probability)


def describe_law(law: Law) -> str:
    """Say in words how training drew schedules."""
    if not isinstance(law, ShortTrajectory):
        return f"no schedules were drawn: {law}"
    if law.passes_only:
        return f"uniform schedules of 1 to {law.num_loops - 1} loops"
    return f"{law.sampler} sampler on a grid of 1/{law.num_loops}"
