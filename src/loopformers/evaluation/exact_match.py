"""Questions answered exactly, by difficulty: what a model makes of a task at each budget."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopformers.evaluation.budget import Budget, BudgetResult, sweep_budgets
from loopformers.evaluation.scoring import answered_exactly

__all__ = ["TaskResult", "evaluate_task", "task_results"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult(BudgetResult):
    """What a model scores on a task at one budget."""

    solved: float
    """Share of questions whose every asked token was the most likely one: exact match, a question counting once."""
    solved_by_difficulty: Mapping[str, float]
    """The same by difficulty, easiest first."""
    questions_by_difficulty: Mapping[str, int]
    """Questions of each difficulty."""


def evaluate_task(
    model: Any,
    dataset: Sequence[dict[str, Any]],
    budgets: Sequence[Budget],
    *,
    batch_size: int = 8,
    bytes_per_token: float | None = None,
) -> list[TaskResult]:
    """Score a model on rows of a task at each budget.

    Args:
        model: A `LoopedForCausalLM`.
        dataset: Rows of one length, as `TaskRows.row` has them: `input_ids`, `labels`, `questions` and `difficulties`.
        budgets: See `evaluate_budgets`, like the other arguments and the errors.
        batch_size: Rows a forward.
        bytes_per_token: For bits per byte, which tasks have none of.

    Returns:
        One result a budget, in order.
    """
    scores = sweep_budgets(model, dataset, budgets, batch_size=batch_size, bytes_per_token=bytes_per_token)
    return task_results(scores, dataset)


def task_results(scores: Sequence[BudgetResult], dataset: Sequence[Mapping[str, Any]]) -> list[TaskResult]:
    """Return scores on rows of a task with its words, and with the number of questions that they rest on."""
    questions, difficulties = (np.stack([row[name] for row in dataset]) for name in ("questions", "difficulties"))
    _, levels = answered_exactly(np.ones(questions.shape, dtype=bool), questions, difficulties)
    counts = {str(level): count for level, count in sorted(Counter(levels.tolist()).items())}
    return [
        TaskResult(
            **{field.name: getattr(score, field.name) for field in dataclasses.fields(BudgetResult)},
            solved=score.exact_match or 0.0,
            solved_by_difficulty=score.exact_match_by_difficulty or {},
            questions_by_difficulty=counts,
        )
        for score in scores
    ]
