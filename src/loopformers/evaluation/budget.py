"""What one model scores at several budgets: how many loops it needs.

`evaluate_budgets` runs every budget by itself, with nothing but the model's own forward: the reference. `sweep_budgets`
gives the same numbers in as few loops as the model allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loopformers.errors import ConfigError
from loopformers.evaluation.scoring import OnBatch, Tally, answered_exactly, score_runs, window_batches
from loopformers.model.mode import evaluating
from loopformers.model.untrained import untrained_on_purpose
from loopformers.objectives.cross_entropy import IGNORE, cross_entropy_sum
from loopformers.schedule import Schedule

__all__ = ["Budget", "BudgetResult", "evaluate_budgets", "sweep_budgets"]

Budget = int | str | Schedule
"""A number of loops, a schedule, or text that `Schedule.parse` reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetResult:
    """What a model scores at one budget. Perplexities compare between models of one tokenizer; bits per byte always."""

    num_loops: int
    """M, loops run."""
    schedule: str
    """Step sizes as fractions."""
    loss: float
    """Cross entropy in nats per target token, over all targets."""
    perplexity: float
    """exp(loss); infinity where that overflows."""
    bits_per_byte: float | None
    """loss / (ln 2 x bytes per token), or None when the number of bytes is not known."""
    num_targets: int
    """Tokens predicted."""
    flops_per_token: float
    """Floating-point operations of a forward, per token of a window."""
    accuracy: float | None = None
    """Share of targets that were the most likely token; None in records of older runs."""
    exact_match: float | None = None
    """Share of questions whose every target was the most likely token (a window is one, unless it numbers them in
    `questions`); None in records of older runs."""
    exact_match_by_difficulty: Mapping[str, float] | None = None
    """The same by difficulty, easiest first; None where windows do not say how hard their questions are."""


def evaluate_budgets(
    model: Any,
    dataset: Iterable[dict[str, Any]],
    budgets: Sequence[Budget],
    *,
    batch_size: int = 8,
    bytes_per_token: float | None = None,
) -> list[BudgetResult]:
    """Score a model on every window of a dataset at each budget.

    The loss is the sum over all targets divided by their number, never a mean of means, so neither the batch size nor
    windows of unequal length change it. Logits are scored in float32. The model is put in evaluation mode and back.

    Args:
        model: A `LoopedForCausalLM`.
        dataset: Windows with `input_ids` (seq,) and, optionally, unshifted `labels` (seq,), -100 where not scored. It
            is read once a budget.
        budgets: Loop counts or schedules. Other schedules than uniform need a model that is conditioned on time.
        batch_size: Windows a forward; neighbours of unequal length are never put together.
        bytes_per_token: Mean UTF-8 bytes of a token of this text, for bits per byte.

    Returns:
        One result a budget, in order.

    Raises:
        ConfigError: No budgets, a budget that is no schedule, or a batch size below 1.
        DataError: A dataset without a target.
    """
    if not budgets:
        raise ConfigError("budgets=[] asks for nothing; give at least one number of loops or schedule")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    runs = [_schedule(budget, model.config.num_loops) for budget in budgets]
    with evaluating(model), untrained_on_purpose():
        return [_result(run, _run_alone(model, dataset, run, batch_size), model, bytes_per_token) for run in runs]


def sweep_budgets(
    model: Any,
    dataset: Iterable[dict[str, Any]],
    budgets: Sequence[Budget],
    *,
    batch_size: int = 8,
    bytes_per_token: float | None = None,
    on_batch: OnBatch | None = None,
) -> list[BudgetResult]:
    """`evaluate_budgets`, with the work that budgets have in common done once.

    Loops are shared as `loopformers.evaluation.scoring.shared_runs` says: without conditioning all budgets cost the loops
    of the deepest; otherwise each costs its own. Embeddings and prelude are always shared, and the head runs where there
    is a target alone. The dataset is read once.

    Args:
        model: See `evaluate_budgets`, like the arguments up to `bytes_per_token` and the errors.
        dataset: See there.
        budgets: See there.
        batch_size: See there.
        bytes_per_token: See there.
        on_batch: Called after each batch with the number of its windows.
    """
    if not budgets:
        raise ConfigError("budgets=[] asks for nothing; give at least one number of loops or schedule")
    runs = [model.config.resolve_schedule(schedule=_schedule(budget, model.config.num_loops)) for budget in budgets]
    tallies = score_runs(model, dataset, runs, batch_size=batch_size, on_batch=on_batch)
    return [_result(run, tally, model, bytes_per_token) for run, tally in zip(runs, tallies, strict=True)]


def _schedule(budget: Budget, trained_loops: int) -> Schedule:
    if isinstance(budget, int):
        return Schedule.uniform(budget)
    return Schedule.parse(budget, num_loops=None, grid=trained_loops)


def _result(run: Schedule, tally: Tally, model: Any, bytes_per_token: float | None) -> BudgetResult:
    loss = tally.loss
    return BudgetResult(
        num_loops=run.num_loops,
        schedule=str(run),
        loss=loss,
        perplexity=tally.perplexity,
        bits_per_byte=None if bytes_per_token is None else loss / (math.log(2) * bytes_per_token),
        num_targets=tally.num_targets,
        flops_per_token=tally.flops_per_token(
            lambda length: model.config.flops_per_token(schedule=run, seq_len=length)
        ),
        accuracy=tally.accuracy,
        exact_match=tally.exact_match,
        exact_match_by_difficulty=tally.exact_match_by_difficulty,
    )


@torch.no_grad()
def _run_alone(model: Any, dataset: Iterable[dict[str, Any]], run: Schedule, batch_size: int) -> Tally:
    """Score one run by the model's forward, written out."""
    tally = Tally()
    for batch in window_batches(dataset, batch_size):
        input_ids, targets = batch.input_ids.to(model.device), batch.labels.to(model.device)[:, 1:]
        logits = model(input_ids, schedule=run, use_cache=False).logits[:, :-1]
        is_target = targets != IGNORE
        # A batch is summed in float32 by the kernel and over batches in Python's float64.
        tally.nats += cross_entropy_sum(logits.flatten(0, 1).float(), targets.flatten()).item()
        is_right = logits.argmax(dim=-1) == targets
        tally.num_targets += int(is_target.sum())
        tally.num_right += int((is_right & is_target).sum())
        questions = batch.questions[:, 1:].masked_fill(~is_target.cpu(), -1)
        is_whole, difficulties = answered_exactly(
            is_right.cpu().numpy(), questions.numpy(), batch.difficulties[:, 1:].numpy()
        )
        tally.add_questions(is_whole.tolist(), difficulties.tolist())
        tally.tokens_by_length[input_ids.shape[1]] += input_ids.numel()
    return tally
