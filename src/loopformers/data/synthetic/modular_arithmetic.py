"""Modular arithmetic: chains of operations on a running value, from left to right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from loopformers.data.synthetic.contract import SPECIAL_WORDS, Ids, RowsBuilder, TaskRows, check_choice, check_counts
from loopformers.errors import ConfigError

__all__ = ["ModularArithmetic"]

Answers = Literal["every", "last"]
OPERATORS = "+-*"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModularArithmetic:
    """Work out `a + b * c - ..` modulo p from left to right, without precedence; difficulty is the number of operations.

    With `answers="every"` the value so far is asked behind each operand, and does not stand in the row. With
    `answers="last"` a question has a drawn number of operations in 1..operations, and its value is asked behind `=`.
    No factor is a multiple of p, so for a prime p every operation is a bijection of the running value and none can be
    left out.

    Example:
        >>> task = ModularArithmetic(modulus=5, operations=2, questions=1)
        >>> row = task.generate(np.random.default_rng(11), 1).row(0)
        >>> " ".join(task.words[i] for i in row["input_ids"])
        '0 + 3 * 3 = <end>'
        >>> [task.words[i] if i >= 0 else "-" for i in row["labels"]]
        ['-', '-', '-', '3', '-', '4', '-']
    """

    modulus: int = 7
    """p, at least 2; a prime leaves no shortcut."""
    operations: int = 4
    """Most operations of a question."""
    questions: int = 6
    """Questions in a row."""
    operators: str = OPERATORS
    """Which of + - * are used."""
    answers: Literal["every", "last"] = "every"
    """every: after each operation; last: at the end of a drawn number of operations."""

    def __post_init__(self) -> None:
        check_counts(self, modulus=2, operations=1, questions=1)
        check_choice("answers", self.answers, get_args(Answers))
        if not self.operators or set(self.operators) - set(OPERATORS) or len(set(self.operators)) < len(self.operators):
            raise ConfigError(f"task.operators={self.operators!r} must be some of {OPERATORS!r}, each once")

    @property
    def words(self) -> tuple[str, ...]:
        """Values `0`..`p - 1`, operators, `=` and `.`, which fills shorter questions up."""
        return (*SPECIAL_WORDS, *map(str, range(self.modulus)), *self.operators, "=", ".")

    @property
    def seq_len(self) -> int:
        """Questions of a value, operations and `=`, and the end."""
        return self.questions * self._question_len + 1

    @property
    def _question_len(self) -> int:
        return 2 * self.operations + 2

    def generate(self, rng: np.random.Generator, count: int) -> TaskRows:
        """Return `count` rows."""
        shape = (count, self.questions, self.operations)
        first_operator = len(SPECIAL_WORDS) + self.modulus
        equals = first_operator + len(self.operators)
        values = rng.integers(self.modulus, size=shape[:2])
        kinds = rng.integers(len(self.operators), size=shape)
        factors = np.array([symbol == "*" for symbol in self.operators])[kinds]
        operands = np.where(factors, rng.integers(1, self.modulus, size=shape), rng.integers(self.modulus, size=shape))
        lengths = rng.integers(1, self.operations + 1, size=shape[:2])
        if self.answers == "every":
            lengths[:] = self.operations
        builder = RowsBuilder(count, self.seq_len)
        for question in range(self.questions):
            value, length = values[:, question], lengths[:, question]
            builder.add(len(SPECIAL_WORDS) + value)
            for done in range(self.operations):
                goes_on = length > done
                kind, operand = kinds[:, question, done], operands[:, question, done]
                value = np.where(goes_on, self._apply(value, kind, operand), value)
                fill = np.where(length == done, equals, equals + 1)
                builder.add(np.where(goes_on, first_operator + kind, fill))
                if self.answers == "last":
                    answer = len(SPECIAL_WORDS) + value
                    builder.ask(answer, question=question, difficulty=length, where=length == done)
                builder.add(np.where(goes_on, len(SPECIAL_WORDS) + operand, equals + 1))
                if self.answers == "every":
                    answer = len(SPECIAL_WORDS) + value
                    builder.ask(answer, question=question * self.operations + done, difficulty=done + 1)
            builder.add(np.where(length == self.operations, equals, equals + 1))
            if self.answers == "last":
                answer = len(SPECIAL_WORDS) + value
                builder.ask(answer, question=question, difficulty=length, where=length == self.operations)
        return builder.rows

    def _apply(self, value: Ids, kind: Ids, operand: Ids) -> Ids:
        results = {"+": value + operand, "-": value - operand, "*": value * operand}
        chosen: Ids = np.choose(kind, [results[symbol] for symbol in self.operators]) % self.modulus
        return chosen
