"""Numbers of a cell's result that reports show: each a function from a result to a number, or None where it has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loopformers.schedule import is_uniform_text
from loopformers.studies.results import CellResult

__all__ = [
    "below_unigram",
    "budget_difficulties",
    "budget_flops",
    "budget_losses",
    "budget_solved",
    "last_of",
    "loss",
    "loss_at",
    "loss_by_compute",
    "measure_of",
    "replaced_costs",
    "solved",
    "solved_by_difficulty",
    "uniform_budgets",
    "verdict_step",
]

ROUNDING = 1e-5
"""Relative: results keep six digits of a number."""


def loss(result: CellResult) -> float:
    """Validation loss at T loops, nats per token; infinite for a run that diverged."""
    value = result.run["loss"]
    return math.inf if value is None else float(value)


def below_unigram(result: CellResult) -> float:
    """How far the loss is below the unigram level, nats per token."""
    return float(result.run["unigram_loss"]) - loss(result)


def budget_losses(result: CellResult) -> dict[int, float]:
    """Loss by number of loops run, M; schedules of unequal steps are left out."""
    return {
        int(budget["num_loops"]): math.inf if budget["loss"] is None else float(budget["loss"])
        for budget in uniform_budgets(result.run["budgets"])
    }


def loss_at(num_loops: int) -> Callable[[CellResult], float | None]:
    """Return the measure of the loss at M loops; infinite for a run that diverged."""
    return lambda result: budget_losses(result).get(num_loops, math.inf if result.status == "diverged" else None)


def loss_by_compute(num_loops: int, training_flops: float) -> Callable[[CellResult], float | None]:
    """Return the measure of the loss at M loops by the last validation that so much training compute reached.

    It is None where no validation was made by then.
    """

    def measure(result: CellResult) -> float | None:
        reached = [
            record for record in result.validation if record["training_flops"] <= training_flops * (1 + ROUNDING)
        ]
        return reached[-1]["losses"].get(str(num_loops)) if reached else None

    return measure


def budget_flops(result: CellResult) -> dict[int, float]:
    """Operations of a forward by number of loops run, per token."""
    return _by_loops(result, "flops_per_token")


def budget_solved(result: CellResult) -> dict[int, float]:
    """Share of a task's questions that are answered exactly, by number of loops run; empty for text."""
    return _by_loops(result, "solved")


def budget_difficulties(result: CellResult) -> dict[int, Mapping[str, float]]:
    """Share of a task's questions that are answered exactly by difficulty, by number of loops run; empty for text."""
    return {num_loops: shares for num_loops, shares in _by_loops(result, "solved_by_difficulty").items() if shares}


def solved(result: CellResult) -> float | None:
    """Share of a task's questions that are answered exactly, at T loops; None for text."""
    return budget_solved(result).get(int(str(result.axes["loops"])))


def solved_by_difficulty(result: CellResult) -> Mapping[str, float]:
    """The same by difficulty."""
    at_trained = result.run["budgets"][0] if result.run["budgets"] else {}
    found: Mapping[str, float] = at_trained.get("solved_by_difficulty") or {}
    return found


def verdict_step(result: CellResult) -> float | None:
    """Update at which the verdict of the whole run fell during training; None where training judged otherwise."""
    last = result.verdicts[-1] if result.verdicts else None
    return float(last["step"]) if last is not None and last["verdict"] == result.run["verdict"] else None


def measure_of(group: str, name: str) -> Callable[[CellResult], float | None]:
    """Return the measure of `gradient_oscillation` (group `oscillation`) or `residual_growth` (`residual`) of that name."""

    def measure(result: CellResult) -> float | None:
        value = (result.stability.get(group) or {}).get(name)
        return None if value is None else float(value)

    return measure


def replaced_costs(kind: str) -> Callable[[CellResult], float | None]:
    """Return the measure of what an ablation of the recurrent signal costs, nats per token: `swapped` or `zeroed`."""

    def measure(result: CellResult) -> float | None:
        use = result.loop_use
        replaced = use.get(f"{kind}_loss")
        return None if replaced is None or use["loss"] is None else float(replaced) - float(use["loss"])

    return measure


def last_of(values: Sequence[float | None] | None) -> float | None:
    """Return the last value of a list by loop, or None for an empty one."""
    return values[-1] if values else None


def uniform_budgets(budgets: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the scores of runs of equal step sizes, by number of loops."""
    return sorted((b for b in budgets if is_uniform_text(b["schedule"])), key=lambda b: b["num_loops"])


def _by_loops(result: CellResult, key: str) -> dict[int, Any]:
    """Return what the scores of uniform runs say under a key, by number of loops; those that say nothing are left out."""
    return {int(b["num_loops"]): b[key] for b in uniform_budgets(result.run["budgets"]) if b.get(key) is not None}
