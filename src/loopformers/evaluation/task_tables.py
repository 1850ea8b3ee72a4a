"""Tables and a figure of task scores: rows are models at budgets, columns are tasks; and which differences are noise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loopformers.errors import ConfigError
from loopformers.evaluation.results import COST_SEQ_LEN, ModelInfo, Protocol, Results, Score
from loopformers.report.tables import MISSING, Column, Table, Value
from loopformers.schedule import is_uniform_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Difference", "Row", "difference_table", "differences", "plot_accuracy", "rows", "score_table"]

NOISE = 0.05
"""A difference is noise unless chance alone gives one as large less often than this."""

MANY = 50
"""Questions with different answers from which on a sum of coins is as good as normal."""

NUM_FLIPS = 20_000

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Row:
    """A model at a budget, with its scores by task."""

    model: ModelInfo
    scores: Mapping[str, Score]

    @property
    def first(self) -> Score:
        """Any of its scores: all have the same budget."""
        return next(iter(self.scores.values()))

    @property
    def budget(self) -> str:
        """Number of loops; with the step sizes where they are unequal, and the exit rule where there is one."""
        score = self.first
        if score.num_loops is None or score.schedule is None:
            return MISSING
        is_uniform = is_uniform_text(score.schedule)
        parts = [str(score.num_loops), "" if is_uniform else f"({score.schedule})", score.exit_rule or ""]
        return " ".join(part for part in parts if part)

    @property
    def label(self) -> str:
        """Name and budget, for tables of pairs."""
        if self.first.num_loops is None:
            return self.model.name
        return f"{self.model.name}, {self.budget} loop{'s' if self.first.num_loops > 1 else ''}"

    def mean(self, tasks: Sequence[str]) -> tuple[float | None, float | None]:
        """Return the weighted mean over tasks and its standard error; None where a task is missing."""
        scores = [self.scores.get(task) for task in tasks]
        if not scores or not all(scores):
            return None, None
        return _weighted([(s.weight, s.value, s.standard_error) for s in scores if s is not None])


def rows(results: Results) -> list[Row]:
    """Return a row for each model at each budget, in order of evaluation."""
    found: dict[Any, dict[str, Score]] = {}
    for score in results.scores:
        found.setdefault(score.key[:-1], {})[score.task] = score
    return [Row(results.model(key[0]), scores) for key, scores in found.items()]


def score_table(results: Results, *, as_text: bool = True) -> Table:
    """Return the table of scores.

    Args:
        results: Scores of one or several models.
        as_text: For readers: the metric of each task, in percent where it is a share, with its standard error in one cell.
            Otherwise for programs: every metric and every standard error as a number in a column of its own.
    """
    tasks = results.tasks()
    averaged = _averaged(results)
    columns = [Column(key="model", title="model"), Column(key="budget", title="loops", align="right")]
    for task in tasks:
        if as_text:
            columns.append(Column(key=task, title=task, unit=_metric(results, task), align="right"))
        else:
            columns += [Column(key=key, title=key) for name in _metrics(results, task) for key in _keys(task, name)]
    if averaged and as_text:
        columns.append(Column(key="mean", title="mean", unit="%", align="right"))
    elif averaged:
        columns += [Column(key=key, title=key) for key in ("mean", "mean_stderr")]
    columns += [
        Column(key="parameters", title="parameters", align="right", format=",d"),
        Column(key="flops_per_token", title="FLOPs per token", align="right", format=".3g" if as_text else ""),
        Column(key="training_flops", title="training FLOPs", align="right", format=".3g" if as_text else ""),
    ]
    if not as_text:
        columns += [Column(key=key, title=key) for key in ("num_loops", "schedule", "exit_rule", "model_hash")]
    entries = []
    for row in rows(results):
        entry: dict[str, Value] = {
            "model": row.model.name,
            "budget": row.budget,
            "parameters": row.model.num_parameters,
            "flops_per_token": row.first.flops_per_token,
            "training_flops": row.model.training_flops,
        }
        mean, mean_error = row.mean(averaged)
        if as_text:
            entry |= {task: _cell(s.value, s.standard_error, bool(s.weight)) for task, s in row.scores.items()}
            entry |= {"mean": _cell(mean, mean_error, True)} if averaged else {}
        else:
            for task, score in row.scores.items():
                for name, value in score.values.items():
                    entry |= zip(_keys(task, name), (value, score.standard_errors.get(name)), strict=True)
            entry |= {"mean": mean, "mean_stderr": mean_error} if averaged else {}
        if not as_text:
            entry |= {
                "num_loops": row.first.num_loops,
                "schedule": row.first.schedule,
                "exit_rule": row.first.exit_rule,
                "model_hash": row.model.hash,
            }
        entries.append(entry)
    return Table(title="Scores", columns=tuple(columns), rows=tuple(entries), note=_note(results))


def plot_accuracy(results: Results) -> Figure:
    """Draw the mean over tasks against the operations of a token, one line a model.

    Raises:
        ConfigError: No model has all the tasks.
    """
    from loopformers.report.plots import Curve, plot_budgets

    tasks = _averaged(results)
    points: dict[str, list[tuple[float, float]]] = {}
    trained: dict[str, float] = {}
    for row in rows(results):
        mean, _ = row.mean(tasks)
        if mean is not None and row.first.flops_per_token is not None:
            points.setdefault(row.model.name, []).append((row.first.flops_per_token, 100 * mean))
            if row.first.num_loops is not None and row.first.num_loops == row.model.trained_loops:
                trained[row.model.name] = row.first.flops_per_token
    if not points:
        raise ConfigError(
            "no model has a score on every task, and there is nothing to draw; evaluate the missing tasks"
        )
    curves = [Curve(name, *zip(*sorted(line), strict=True)) for name, line in points.items()]
    return plot_budgets(
        curves, y_label="mean score (%)", x_label="operations per token (FLOPs)", log_y=False, trained_loops=trained
    )


# -- differences -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A paired difference: the same questions, answered by two models or at two budgets."""

    task: str
    """Or `mean`, over tasks."""
    baseline: str
    """Which row is subtracted."""
    other: str
    """From which."""
    difference: float
    """Mean over questions."""
    standard_error: float
    """Of that mean, from the differences of single questions."""
    num_questions: int
    """Pairs."""
    p_value: float
    """How often chance alone gives a difference as large: a coin says for each question which model has which answer."""

    @property
    def is_noise(self) -> bool:
        """Whether chance alone gives a difference as large in more than one case of twenty."""
        return self.p_value >= NOISE


def differences(results: Results, *, baseline: int = 0) -> list[Difference]:
    """Return the differences of every row from one row, on each task that both have and in the mean over these.

    Args:
        results: Scores.
        baseline: Index of the row to subtract.

    Raises:
        ConfigError: No such row.
    """
    every = rows(results)
    if not 0 <= baseline < len(every):
        raise ConfigError(f"baseline={baseline} and there are {len(every)} rows; count them from 0")
    base, found = every[baseline], []
    for row in every:
        if row is base:
            continue
        names = {"baseline": base.label, "other": row.label}
        parts, singles = [], []
        for task, score in row.scores.items():
            other = base.scores.get(task)
            mine, theirs = score.questions.get(score.metric), other and other.questions.get(score.metric)
            if not score.weight or not mine or not theirs:
                continue
            single = [a - b for a, b in zip(mine, theirs, strict=True)]
            error = statistics.stdev(single) / math.sqrt(len(single)) if len(single) > 1 else math.inf
            parts.append((score.weight, statistics.fmean(single), error))
            singles.append([score.weight * difference / len(single) for difference in single])
            found.append(
                Difference(
                    task=task,
                    difference=parts[-1][1],
                    standard_error=error,
                    num_questions=len(single),
                    p_value=_p_value(single),
                    **names,
                )
            )
        if len(parts) > 1:
            mean, mean_error = _weighted(parts)
            assert mean is not None  # every task counts,
            assert mean_error is not None  # and each has an error
            found.append(
                Difference(
                    task="mean",
                    difference=mean,
                    standard_error=mean_error,
                    num_questions=sum(map(len, singles)),
                    p_value=_p_value([part for single in singles for part in single]),
                    **names,
                )
            )
    return found


def difference_table(found: Sequence[Difference]) -> Table:
    """Return a table of differences, each with what to make of it."""
    columns = (
        Column(key="other", title="model"),
        Column(key="baseline", title="minus"),
        Column(key="task", title="task"),
        Column(key="difference", title="difference", unit="points", align="right", format="+.2f"),
        Column(key="standard_error", title="standard error", unit="points", align="right", format=".2f"),
        Column(key="num_questions", title="questions", align="right", format=",d"),
        Column(key="p_value", title="p", align="right", format=".2g"),
        Column(key="verdict", title="verdict"),
    )
    entries = [
        {
            "other": d.other,
            "baseline": d.baseline,
            "task": d.task,
            "difference": 100 * d.difference,
            "standard_error": 100 * d.standard_error,
            "num_questions": d.num_questions,
            "p_value": d.p_value,
            "verdict": "within noise" if d.is_noise else ("better" if d.difference > 0 else "worse"),
        }
        for d in found
    ]
    note = (
        "Differences on the same questions. p: how often chance alone gives one as large, when a coin says for each question "
        f"which model has which answer. Within noise: p of {NOISE} or more; of twenty comparisons, one is below by chance."
    )
    return Table(title="Differences", columns=columns, rows=tuple(entries), note=note)


# -- parts -------------------------------------------------------------------------------------------------------


def _averaged(results: Results) -> list[str]:
    """Tasks that the mean is over: those that count, in order."""
    return list(dict.fromkeys(score.task for score in results.scores if score.weight))


def _metric(results: Results, task: str) -> str:
    score = next(s for s in results.scores if s.task == task)
    return f"{score.metric}, %" if score.weight else score.metric


def _metrics(results: Results, task: str) -> list[str]:
    return list(dict.fromkeys(name for score in results.scores if score.task == task for name in score.values))


def _keys(task: str, metric: str) -> tuple[str, str]:
    return f"{task}/{metric}", f"{task}/{metric}_stderr"


def _cell(value: float | None, error: float | None, is_share: bool) -> str | None:
    if value is None:
        return None
    if not is_share:
        return f"{value:.4g}" + ("" if error is None else f" {PLUS_MINUS}{error:.2g}")
    return f"{100 * value:.1f}" + ("" if error is None else f" {PLUS_MINUS}{100 * error:.1f}")


def _weighted(parts: Sequence[tuple[float, float, float | None]]) -> tuple[float | None, float | None]:
    """Return the weighted mean of (weight, value, standard error) and its standard error, errors being independent."""
    total = sum(weight for weight, _, _ in parts)
    if total == 0:
        return None, None
    mean = sum(weight * value for weight, value, _ in parts) / total
    if any(error is None for _, _, error in parts):
        return mean, None
    return mean, math.sqrt(sum((weight * (error or 0.0)) ** 2 for weight, _, error in parts)) / total


def _p_value(differences: Sequence[float]) -> float:
    """Return how often random signs of these differences give a sum as large as theirs (paired permutation test).

    With few differences from zero, signs are drawn (or all tried, where they are at most 2^12); a sum of many is normal.
    """
    parts = np.array([d for d in differences if d])
    if not len(parts):
        return 1.0
    total = abs(parts.sum())
    if len(parts) > MANY:
        return math.erfc(total / math.sqrt(2 * float((parts**2).sum())))
    if len(parts) <= 12:
        signs = np.array(list(itertools.product((-1, 1), repeat=len(parts))))
    else:  # what was observed is one of the draws
        drawn = np.random.default_rng(0).choice((-1, 1), size=(NUM_FLIPS, len(parts)))
        signs = np.concatenate([drawn, np.sign(parts)[None]])
    return float((abs(signs @ abs(parts)) >= total * (1 - 1e-9)).mean())


def _note(results: Results) -> str:
    said = [f"{PLUS_MINUS}: one standard error over questions"]
    for text, names in _shared(results.protocols).items():
        said.append(f"{text}: {', '.join(names)}")
    said.append(f"operations per token in a sequence of {COST_SEQ_LEN}")
    cut = sum(score.num_cut for score in results.scores)
    if cut:
        said.append(f"{cut} requests were cut on the left to what the model sees at once")
    return "; ".join(said) + "."


def _shared(protocols: Sequence[Protocol]) -> dict[str, list[str]]:
    """Group tasks by how they were asked."""
    found: dict[str, list[str]] = {}
    for p in protocols:
        limited = "all questions" if p.limit is None else f"the first {p.limit} questions alone"
        shots = f"{p.num_fewshot} shots" + (", chat template" if p.chat_template else "")
        text = f"lm-eval {p.harness}, {p.source}, {p.split} split, {limited}, {shots}"
        found.setdefault(text, []).append(p.task)
    return found
