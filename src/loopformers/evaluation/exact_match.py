"""Questions answered exactly, by difficulty: what a model makes of a task at each budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loopformers.evaluation.budget import Budget, BudgetResult, evaluate_budgets
from loopformers.schedule import Schedule

__all__ = ["TaskResult", "answered_exactly", "evaluate_task"]


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
    scores = evaluate_budgets(model, dataset, budgets, batch_size=batch_size, bytes_per_token=bytes_per_token)
    was_training = model.training
    model.eval()
    try:
        return [_result(model, dataset, score, batch_size) for score in scores]
    finally:
        model.train(was_training)


@torch.no_grad()
def _result(model: Any, dataset: Sequence[Mapping[str, Any]], score: BudgetResult, batch_size: int) -> TaskResult:
    schedule = Schedule.parse(score.schedule, num_loops=None, grid=model.config.num_loops)
    exact, difficulty = [], []
    for start in range(0, len(dataset), batch_size):
        rows = dataset[start : start + batch_size]
        ids, labels, questions, difficulties = (
            np.stack([row[name] for row in rows]) for name in ("input_ids", "labels", "questions", "difficulties")
        )
        logits = model(torch.as_tensor(ids, device=model.device), schedule=schedule, use_cache=False).logits
        right = logits[:, :-1].argmax(dim=-1).cpu().numpy() == labels[:, 1:]
        found = answered_exactly(right, questions[:, 1:], difficulties[:, 1:])
        exact.append(found[0])
        difficulty.append(found[1])
    solved, hardness = np.concatenate(exact), np.concatenate(difficulty)
    levels = np.unique(hardness)
    return TaskResult(
        **{field.name: getattr(score, field.name) for field in dataclasses.fields(score)},
        solved=float(solved.mean()),
        solved_by_difficulty={str(level): float(solved[hardness == level].mean()) for level in levels},
        questions_by_difficulty={str(level): int((hardness == level).sum()) for level in levels},
    )


def answered_exactly(
    right: npt.NDArray[np.bool_], questions: npt.NDArray[np.int64], difficulties: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return which questions are answered exactly, and how hard each is; both (questions of all rows,).

    Args:
        right: Whether the most likely token is the asked one, (rows, positions).
        questions: Question of the row that is asked there, -1 for none, same shape.
        difficulties: Difficulty of that question, same shape.
    """
    rows, columns = np.nonzero(questions >= 0)
    keys = rows * (questions.max(initial=0) + 1) + questions[rows, columns]
    _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    wrong = np.bincount(inverse, weights=~right[rows, columns])
    return wrong == 0, difficulties[rows, columns][firsts]
