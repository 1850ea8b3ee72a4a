"""Sums over targets: what a model makes of windows, along several runs that share what they can.

The first loops of a deep run are the whole of a shallow one, where loops are told nothing that differs: a model without
conditioning is scored at every budget in one pass through its deepest run. `shared_runs` says which runs those are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loopformers.errors import DataError, check_count, shorten
from loopformers.model.mode import evaluating
from loopformers.model.untrained import untrained_on_purpose
from loopformers.objectives.cross_entropy import IGNORE
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.model.trunk import PreparedInputs
    from loopformers.recurrence.unroll import Observer

__all__ = [
    "OnBatch",
    "Tally",
    "WindowBatch",
    "answered_exactly",
    "score_outside",
    "score_runs",
    "shared_runs",
    "window_batches",
]

CHUNK_TARGETS = 1024
"""Targets whose logits are held at once: vocabularies are large."""

OnBatch = Callable[[int], None]
"""Called after each batch with the number of its windows."""


@dataclass(frozen=True, eq=False, slots=True)
class WindowBatch:
    """Windows of one length, and where they ask for something.

    Attributes:
        input_ids: Tokens, (batch, seq).
        labels: Targets, not shifted, -100 where there is none, (batch, seq).
        questions: Which question of its window a target belongs to; where windows do not say, all are one; (batch, seq).
        difficulties: How hard that question is; -1 where windows do not say; (batch, seq).
        rows: Window of each target, (targets,).
        columns: Position that predicts it, the one before its own, (targets,).
        question_of_target: Question, counted over the batch, of each target, (targets,).
        difficulty_of_question: Of each question, (questions,).
    """

    input_ids: Tensor
    labels: Tensor
    questions: Tensor
    difficulties: Tensor
    rows: Tensor = field(init=False)
    columns: Tensor = field(init=False)
    question_of_target: Tensor = field(init=False)
    difficulty_of_question: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, columns = (self.labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
        places = (rows, columns + 1)
        asked = torch.stack([rows, self.questions[places], self.difficulties[places]])
        questions, of_target = asked.unique(dim=1, return_inverse=True)
        for name, value in (("rows", rows), ("columns", columns), ("question_of_target", of_target)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "difficulty_of_question", questions[2])

    @property
    def targets(self) -> Tensor:
        """Tokens to predict, (targets,)."""
        return self.labels[self.rows, self.columns + 1]


@dataclass(slots=True)
class Tally:
    """Sums over the targets of one run. Means are quotients of sums, so no batch weighs more than its targets."""

    nats: float = 0.0
    """Cross entropy, summed in float64."""
    num_targets: int = 0
    """Tokens predicted."""
    num_right: int = 0
    """Of these, the most likely one was right."""
    num_questions: int = 0
    """Questions: a window's targets are one, unless it numbers them."""
    num_whole: int = 0
    """Of these, every target was right."""
    questions_by_difficulty: Counter[int] = field(default_factory=Counter)
    """Questions, where windows say how hard they are."""
    whole_by_difficulty: Counter[int] = field(default_factory=Counter)
    """Of these, every target was right."""
    tokens_by_length: Counter[int] = field(default_factory=Counter)
    """Tokens run, by length of their window."""

    @property
    def loss(self) -> float:
        """Nats per target.

        Raises:
            DataError: There was no target.
        """
        if self.num_targets == 0:
            raise DataError(
                "the dataset holds no target to predict; give windows of at least two tokens, not all labelled -100"
            )
        return self.nats / self.num_targets

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        """Share of targets that were the most likely token."""
        return self.num_right / max(self.num_targets, 1)

    @property
    def exact_match(self) -> float:
        """Share of questions whose every target was the most likely token."""
        return self.num_whole / max(self.num_questions, 1)

    @property
    def exact_match_by_difficulty(self) -> dict[str, float] | None:
        """`exact_match` of the questions of each difficulty, easiest first; None where windows do not say."""
        counts = sorted(self.questions_by_difficulty.items())
        return {str(level): self.whole_by_difficulty[level] / count for level, count in counts} or None

    def flops_per_token(self, flops: Callable[[int], float]) -> float:
        """Return the mean over all tokens run of `flops(length of the window)`."""
        total = sum(count * flops(length) for length, count in self.tokens_by_length.items())
        return total / max(sum(self.tokens_by_length.values()), 1)

    def add(self, predictions: Tensor, batch: WindowBatch, head: Callable[[Tensor], Tensor]) -> None:
        """Score one batch.

        Args:
            predictions: What the head turns into logits, at each position for the token behind it, (batch, seq, dim).
            batch: The windows.
            head: Maps (targets, dim) to logits (targets, vocab); it is run where there is a target, and nowhere else.
        """
        rows, columns, targets, questions = (
            x.to(predictions.device) for x in (batch.rows, batch.columns, batch.targets, batch.question_of_target)
        )
        hidden = predictions[rows, columns]
        nats = torch.zeros((), dtype=torch.float64, device=predictions.device)
        wrong = torch.zeros(len(targets), dtype=torch.bool, device=predictions.device)
        for start in range(0, len(targets), CHUNK_TARGETS):
            part = slice(start, start + CHUNK_TARGETS)
            logits = head(hidden[part])
            logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
            asked, highest = logits.gather(-1, targets[part, None]).squeeze(-1), logits.amax(dim=-1)
            # log Σ exp(x) - x_asked from differences to the highest: adding it back would round away digits that differ.
            others = (logits - highest[:, None]).exp_().sum(dim=-1).log()
            nats += (others + (highest - asked)).double().sum()
            wrong[part] = _wrong(logits, targets[part], asked < highest)
        self.nats += nats.item()
        self.num_targets += len(targets)
        self.num_right += len(targets) - int(wrong.sum())
        is_whole = torch.bincount(questions[wrong], minlength=len(batch.difficulty_of_question)) == 0
        self.add_questions(is_whole.tolist(), batch.difficulty_of_question.tolist())
        self.tokens_by_length[batch.input_ids.shape[1]] += batch.input_ids.numel()

    def add_questions(self, is_whole: Sequence[bool], difficulties: Sequence[int]) -> None:
        """Count questions: whether every target of each was right, and how hard it is, -1 where windows do not say."""
        self.num_questions += len(is_whole)
        self.num_whole += sum(is_whole)
        for whole, level in zip(is_whole, difficulties, strict=True):
            if level >= 0:
                self.questions_by_difficulty[level] += 1
                self.whole_by_difficulty[level] += whole


def _wrong(logits: Tensor, targets: Tensor, is_lower: Tensor) -> Tensor:
    """Return `logits.argmax(-1) != targets`, (targets,), by way of the maximum, which is cheaper than its place.

    Where the target `is_lower` than the maximum, it is wrong. Elsewhere the place is looked up: soft-capped logits can
    tie, and then the first of the most likely counts.
    """
    wrong, likely = is_lower.clone(), (~is_lower).nonzero().squeeze(-1)
    wrong[likely] = logits[likely].argmax(dim=-1) != targets[likely]
    return wrong


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


def shared_runs(model: LoopedForCausalLM, runs: Sequence[Schedule]) -> list[list[int]]:
    """Group runs that one pass computes: the runs of a group are the first loops of its first, the deepest.

    Two loops compute the same from the same state when they are told the same: nothing, their index, their time, or
    their time and step size. So all runs of a model without conditioning make one group, and no two of a model that is
    told its step size do, as step sizes sum to 1.

    Args:
        model: The model.
        runs: Schedules, equal ones included.

    Returns:
        Indices of `runs`, each in one group.
    """
    told = [model.config.told(run) for run in runs]
    groups: list[list[int]] = []
    for index in sorted(range(len(runs)), key=lambda i: -runs[i].num_loops):
        depth = runs[index].num_loops
        for group in groups:
            if told[group[0]][:depth] == told[index]:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


@torch.no_grad()
def score_runs(
    model: LoopedForCausalLM,
    windows: Iterable[Mapping[str, Any]],
    runs: Sequence[Schedule],
    *,
    batch_size: int = 8,
    on_batch: OnBatch | None = None,
) -> list[Tally]:
    """Score windows along several runs, reading them once.

    All runs share embeddings and prelude; runs of one group of `shared_runs` share their loops. No more than one batch
    of states is held at a time. The model is put in evaluation mode and back.

    Args:
        model: The model.
        windows: `input_ids` (seq,) and, optionally, unshifted `labels` (seq,), -100 where not scored, and
            `questions` and `difficulties` (seq,): which question a target belongs to, and how hard it is.
        runs: Schedules that the model can run, at least one.
        batch_size: Windows a forward; neighbours of unequal length are never put together, so nothing is padded.
        on_batch: Called after each batch.

    Returns:
        One tally a run, in order.

    Raises:
        ConfigError: A batch size below 1, or positions that the model has not.
    """
    check_count("batch_size", batch_size)
    tallies = [Tally() for _ in runs]
    groups = shared_runs(model, runs)
    trunk = model.model
    with evaluating(model), untrained_on_purpose():
        for batch in window_batches(windows, batch_size):
            prepared = trunk.prepare(batch.input_ids.to(model.device), None, None, None, None, runs[0])
            for group in groups:
                ends = [(runs[index].num_loops, tallies[index]) for index in group]
                trunk.run(prepared, runs[group[0]], observer=_scorer(model, prepared, batch, ends))
            if on_batch is not None:
                on_batch(len(batch.input_ids))
    return tallies


def _scorer(
    model: LoopedForCausalLM, prepared: PreparedInputs, batch: WindowBatch, ends: Sequence[tuple[int, Tally]]
) -> Observer:
    """Return an observer of a run that scores each run that ends on its way: `ends` has (loops, tally) of each."""

    def observe(loop_idx: int, residual: Tensor, state: Tensor) -> None:
        for num_loops, tally in ends:
            if num_loops == loop_idx + 1:
                tally.add(model.model.finish(state, prepared), batch, model.head)

    return observe


@torch.no_grad()
def score_outside(
    model: Any, windows: Iterable[Mapping[str, Any]], *, batch_size: int = 8, on_batch: OnBatch | None = None
) -> Tally:
    """Score windows by any causal language model of transformers. See `score_runs`."""
    check_count("batch_size", batch_size)
    tally = Tally()
    with evaluating(model):
        for batch in window_batches(windows, batch_size):
            logits = model(input_ids=batch.input_ids.to(model.device), use_cache=False).logits
            tally.add(logits, batch, lambda logits: logits)
            if on_batch is not None:
                on_batch(len(batch.input_ids))
    return tally


def window_batches(windows: Iterable[Mapping[str, Any]], batch_size: int) -> Iterator[WindowBatch]:
    """Yield neighbouring windows of one length, at most `batch_size` together.

    Raises:
        DataError: What is given are no windows.
    """
    if not isinstance(windows, Iterable):
        raise DataError(f"{shorten(windows)} holds no windows; give a list of mappings with input_ids, (seq,) each")
    batch: list[tuple[Tensor, ...]] = []
    for window in windows:
        if not isinstance(window, Mapping) or "input_ids" not in window:
            raise DataError(
                f"{shorten(window)} is no window; give a mapping with input_ids, (seq,), and labels where wanted"
            )
        ids = torch.as_tensor(window["input_ids"])
        defaults = {"labels": ids, "questions": torch.zeros_like(ids), "difficulties": torch.full_like(ids, -1)}
        fields = (torch.as_tensor(window.get(name, default)) for name, default in defaults.items())
        if batch and (len(batch) == batch_size or len(ids) != len(batch[0][0])):
            yield WindowBatch(*map(torch.stack, zip(*batch, strict=True)))
            batch = []
        batch.append((ids, *fields))
    if batch:
        yield WindowBatch(*map(torch.stack, zip(*batch, strict=True)))
