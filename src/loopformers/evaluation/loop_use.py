"""Are the loops used? How far each moves the state, and what the loss becomes when the recurrent signal says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopformers.errors import ConfigError, DataError
from loopformers.evaluation.scoring import Tally, WindowBatch, window_batches
from loopformers.model.mode import evaluating
from loopformers.recurrence.unroll import Observer
from loopformers.schedule import Schedule

__all__ = ["LoopUse", "measure_loop_use"]

Replacement = Callable[[Tensor], Tensor]
"""From the states that a loop left, (batch, seq, dim), to those that the next one sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopUse:
    """What a model's loops do on some text; losses in nats per target token, all on the same windows.

    An ablation replaces the state h_{i-1} before it enters loop i, in each of the loops 2..T; the inputs stay. A loss that does
    not move says that loops make nothing of the signal. In `lt`, where a loop starts from the state alone, replacing it
    replaces everything, so its ablations say nothing about use.
    """

    num_loops: int
    """T, loops run."""
    loss: float
    """Nothing replaced."""
    swapped_loss: float | None
    """Each row of a batch gets its neighbour's state: a real state, of other text. None for one loop."""
    zeroed_loss: float | None
    """Each state is zero. None for one loop."""
    state_changes: tuple[float, ...]
    """Of loops 2..T: mean over tokens of |h_i - h_{i-1}| / |h_{i-1}|. Near 0: the loops have come to a fixed point."""
    num_windows: int
    """Windows measured on."""


@torch.no_grad()
def measure_loop_use(
    model: Any, dataset: Iterable[dict[str, Any]], *, num_loops: int | None = None, batch_size: int = 16
) -> LoopUse:
    """Measure a model on every window of a dataset. The model is put in evaluation mode and back.

    Args:
        model: A `LoopedForCausalLM`.
        dataset: Windows with `input_ids` (seq,) and, optionally, unshifted `labels` (seq,), -100 where not scored.
        num_loops: Loops to run; None: as trained.
        batch_size: Windows a forward, at least 2. A window whose length no other has is left out: it has no neighbour.

    Raises:
        ConfigError: A batch size below 2.
        DataError: No two windows of one length, or no target in them.
    """
    if batch_size < 2:
        raise ConfigError(f"batch_size={batch_size} must be at least 2: a row's state is swapped with its neighbour's")
    schedule = model.config.resolve_schedule(num_loops)
    batches = list(_batches(dataset, batch_size))
    with evaluating(model):
        watch = _StateChanges(schedule.num_loops)
        loss = _loss(model, batches, schedule, watch)
        swapped, zeroed = (
            (
                _loss(model, batches, schedule, _Replace(replacement, schedule.num_loops))
                for replacement in (_neighbours, torch.zeros_like)
            )
            if schedule.num_loops > 1
            else (None, None)
        )
    return LoopUse(
        num_loops=schedule.num_loops,
        loss=loss,
        swapped_loss=swapped,
        zeroed_loss=zeroed,
        state_changes=watch.means(),
        num_windows=sum(len(batch.input_ids) for batch in batches),
    )


def _neighbours(states: Tensor) -> Tensor:
    return states.roll(1, dims=0)


class _StateChanges:
    """An observer that sums the relative changes of the state."""

    def __init__(self, num_loops: int) -> None:
        self.sums, self.num_tokens = [0.0] * (num_loops - 1), 0
        self.previous: Tensor | None = None

    def __call__(self, loop_idx: int, residual: Tensor, state: Tensor) -> None:
        if loop_idx == 0:
            self.num_tokens += state.shape[:-1].numel()
        else:
            assert self.previous is not None, "loops come in order"
            before = torch.linalg.vector_norm(self.previous.float(), dim=-1)
            moved = torch.linalg.vector_norm(state.float() - self.previous.float(), dim=-1)
            self.sums[loop_idx - 1] += (moved / before).double().sum().item()
        self.previous = state

    def means(self) -> tuple[float, ...]:
        return tuple(total / self.num_tokens for total in self.sums)


class _Replace:
    """An observer that, against the custom of observers, changes what it sees: in place, before the next loop reads it.

    The state of the last loop stays: no loop reads it, and the logits are made of it.
    """

    def __init__(self, replacement: Replacement, num_loops: int) -> None:
        self.replacement, self.num_loops = replacement, num_loops

    def __call__(self, loop_idx: int, residual: Tensor, state: Tensor) -> None:
        if loop_idx < self.num_loops - 1:
            state.copy_(self.replacement(state))


def _loss(model: Any, batches: Sequence[WindowBatch], schedule: Schedule, observer: Observer) -> float:
    """Return the cross entropy over all targets of a run that an observer sees."""
    tally = Tally()
    for batch in batches:
        prepared = model.model.prepare(batch.input_ids.to(model.device), None, None, None, None, schedule)
        state = model.model.run(prepared, schedule, observer=observer)
        tally.add(model.model.finish(state, prepared), batch, model.head)
    if not tally.num_targets:
        raise DataError(
            "no two windows of one length hold a target; give windows of equal length, not all labelled -100"
        )
    return tally.loss


def _batches(dataset: Iterable[dict[str, Any]], batch_size: int) -> Iterator[WindowBatch]:
    """Yield windows of one length, at least two together."""
    by_length: dict[int, list[dict[str, Any]]] = {}
    for window in dataset:
        by_length.setdefault(len(window["input_ids"]), []).append(window)
    for windows in by_length.values():
        if len(windows) < 2:
            continue
        parts = max(1, len(windows) // batch_size)
        for part in range(parts):  # some larger than asked for, so that no window is left alone
            chosen = windows[part * len(windows) // parts : (part + 1) * len(windows) // parts]
            yield from window_batches(chosen, len(chosen))
