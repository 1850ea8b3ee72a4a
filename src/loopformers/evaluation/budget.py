"""Cross entropy of one model at several budgets: how many loops it needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformers.errors import ConfigError, DataError
from loopformers.schedule import Schedule

__all__ = ["Budget", "BudgetResult", "evaluate_budgets"]

Budget = int | str | Schedule
"""A number of loops, a schedule, or text that `Schedule.parse` reads."""

IGNORE_INDEX = -100


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
    trained_loops = model.config.num_loops
    was_training = model.training
    model.eval()
    try:
        return [
            _evaluate(model, dataset, _schedule(budget, trained_loops), batch_size, bytes_per_token)
            for budget in budgets
        ]
    finally:
        model.train(was_training)


def _schedule(budget: Budget, trained_loops: int) -> Schedule:
    if isinstance(budget, int):
        return Schedule.uniform(budget)
    return Schedule.parse(budget, num_loops=None, grid=trained_loops)


@torch.no_grad()
def _evaluate(
    model: Any, dataset: Iterable[dict[str, Any]], schedule: Schedule, batch_size: int, bytes_per_token: float | None
) -> BudgetResult:
    nats, num_targets, num_tokens, flops = 0.0, 0, 0, 0.0
    for input_ids, labels in _batches(dataset, batch_size):
        input_ids, labels = input_ids.to(model.device), labels.to(model.device)
        logits = model(input_ids, schedule=schedule, use_cache=False).logits
        targets = labels[:, 1:].flatten()
        # A batch is summed in float32 by the kernel and over batches in Python's float64.
        nats += F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum"
        ).item()
        num_targets += int((targets != IGNORE_INDEX).sum())
        num_tokens += input_ids.numel()
        flops += input_ids.numel() * model.config.flops_per_token(schedule=schedule, seq_len=input_ids.shape[1])
    if num_targets == 0:
        raise DataError(
            "the dataset holds no target to predict; give windows of at least two tokens, not all labelled -100"
        )
    loss = nats / num_targets
    return BudgetResult(
        num_loops=schedule.num_loops,
        schedule=str(schedule),
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=None if bytes_per_token is None else loss / (math.log(2) * bytes_per_token),
        num_targets=num_targets,
        flops_per_token=flops / num_tokens,
    )


def _batches(dataset: Iterable[dict[str, Any]], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (input_ids, labels), (batch, seq) each, of windows of one length."""
    batch: list[tuple[Tensor, Tensor]] = []
    for window in dataset:
        ids = torch.as_tensor(window["input_ids"])
        labels = torch.as_tensor(window.get("labels", ids))
        if batch and (len(batch) == batch_size or len(ids) != len(batch[0][0])):
            yield _stack(batch)
            batch = []
        batch.append((ids, labels))
    if batch:
        yield _stack(batch)


def _stack(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([ids for ids, _ in batch]), torch.stack([labels for _, labels in batch])
