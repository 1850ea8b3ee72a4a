"""What a task is: words, a fixed length, and rows of questions made from a random generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loopformers.errors import ConfigError, check_count, unknown_name
from loopformers.limits import MAX_TASK_SIZE

__all__ = [
    "END",
    "NO_TARGET",
    "SPECIAL_WORDS",
    "UNKNOWN",
    "Ids",
    "RowsBuilder",
    "Task",
    "TaskRows",
    "check_choice",
    "check_counts",
]

Ids = npt.NDArray[np.int64]

NO_TARGET = -100
"""transformers' label where nothing is predicted."""

END, UNKNOWN = "<end>", "<unk>"
SPECIAL_WORDS = (END, UNKNOWN)
"""Ids 0 and 1 of every task: the end of a row, and what no task ever shows."""


@dataclass(frozen=True, eq=False, slots=True)
class TaskRows:
    """Rows of a task, (rows, seq) each, aligned with `labels`: entry t is what the logits at t - 1 must say.

    Attributes:
        input_ids: Tokens.
        labels: Unshifted, as transformers has them; -100 where nothing is asked. Where an answer is not shown to the model,
            it differs from the token that stands there.
        questions: Index within the row of the question that an answer belongs to; -1 where nothing is asked.
        difficulties: Difficulty of that question; -1 where nothing is asked.
    """

    input_ids: Ids
    labels: Ids
    questions: Ids
    difficulties: Ids

    def __len__(self) -> int:
        return len(self.input_ids)

    def row(self, index: int) -> dict[str, Ids]:
        """Return one row by field, (seq,) each."""
        return {name: getattr(self, name)[index] for name in ("input_ids", "labels", "questions", "difficulties")}


class Task(Protocol):
    """A task: a frozen dataclass of what makes it hard."""

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary, without spaces in a word: a token's id is its index. `SPECIAL_WORDS` come first."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        ...

    def generate(self, rng: np.random.Generator, count: int) -> TaskRows:
        """Return `count` rows; equal generators give equal rows."""
        ...


class RowsBuilder:
    """Puts blocks of tokens behind one another, and answers where the next token stands.

    Args:
        count: Rows.
        seq_len: Tokens in a row.
    """

    def __init__(self, count: int, seq_len: int) -> None:
        shape = (count, seq_len)
        self.rows = TaskRows(
            input_ids=np.zeros(shape, dtype=np.int64),  # the id of END
            labels=np.full(shape, NO_TARGET, dtype=np.int64),
            questions=np.full(shape, -1, dtype=np.int64),
            difficulties=np.full(shape, -1, dtype=np.int64),
        )
        self.place = 0

    def add(self, tokens: Ids | int) -> None:
        """Append tokens: (count, n), (count,), or one for all rows."""
        block = np.asarray(tokens)
        width = block.shape[1] if block.ndim == 2 else 1
        self.rows.input_ids[:, self.place : self.place + width] = block if block.ndim == 2 else block[..., None]
        self.place += width

    def ask(self, answer: Ids, *, question: int, difficulty: Ids | int, where: npt.NDArray[Any] | None = None) -> None:
        """Ask for an answer (count,) behind what has been added, in the rows `where` (default: all)."""
        rows = slice(None) if where is None else where
        for field, value in (("labels", answer), ("questions", question), ("difficulties", difficulty)):
            column = getattr(self.rows, field)[:, self.place]
            column[rows] = np.broadcast_to(value, column.shape)[rows]


def check_counts(task: object, **least: int) -> None:
    """Raise ConfigError unless each named field of a task is a whole number from that to MAX_TASK_SIZE."""
    for name, at_least in least.items():
        check_count(f"task.{name}", getattr(task, name), at_least=at_least, at_most=MAX_TASK_SIZE)


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless a field's value is one of a few words."""
    if value not in allowed:
        raise ConfigError(unknown_name(f"task.{name}", value, allowed))
