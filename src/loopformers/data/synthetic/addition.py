"""Addition of numbers of several digits, where a carry may run through many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from loopformers.data.synthetic.contract import SPECIAL_WORDS, Ids, RowsBuilder, TaskRows, check_choice, check_counts

__all__ = ["Addition"]

Order = Literal["most_significant_first", "least_significant_first"]

PLUS = len(SPECIAL_WORDS) + 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """Add two numbers; difficulty is the longest carry chain, the places that one carry runs through (0: no carry).

    A question is `a + b = c`, numbers with leading zeros, all digits of c asked; they stand in the row, as each is the
    next token. With the most significant digit first, the first digit of c may hang on all later ones of a and b. With
    the least significant first each digit needs its neighbour's carry alone.

    Independent digits seldom carry far. So each question draws a share at random, and that share of its places adds up to
    9, which hands a carry on: chains of every length are met.

    Example:
        >>> task = Addition(digits=3, questions=1)
        >>> row = task.generate(np.random.default_rng(6), 1).row(0)
        >>> " ".join(task.words[i] for i in row["input_ids"])
        '5 5 4 + 4 9 5 = 1 0 4 9 <end>'
        >>> int(row["difficulties"].max())
        2
    """

    digits: int = 6
    """Digits of each number; the sum has one more."""
    questions: int = 2
    """Sums in a row."""
    order: Literal["most_significant_first", "least_significant_first"] = "most_significant_first"
    """How all three numbers are written."""

    def __post_init__(self) -> None:
        check_counts(self, digits=1, questions=1)
        check_choice("order", self.order, get_args(Order))

    @property
    def words(self) -> tuple[str, ...]:
        """Digits, `+` and `=`."""
        return (*SPECIAL_WORDS, *map(str, range(10)), "+", "=")

    @property
    def seq_len(self) -> int:
        """Questions, and the end."""
        return self.questions * (3 * self.digits + 3) + 1

    def generate(self, rng: np.random.Generator, count: int) -> TaskRows:
        """Return `count` rows."""
        shape = (count, self.questions, self.digits)
        a, b = rng.integers(10, size=shape), rng.integers(10, size=shape)
        b = np.where(rng.random(shape) < rng.random(shape[:2])[..., None], 9 - a, b)
        total, chains = add(a, b)
        if self.order == "most_significant_first":
            a, b, total = a[..., ::-1], b[..., ::-1], total[..., ::-1]
        builder = RowsBuilder(count, self.seq_len)
        digit = len(SPECIAL_WORDS)
        for question in range(self.questions):
            builder.add(digit + a[:, question])
            builder.add(PLUS)
            builder.add(digit + b[:, question])
            builder.add(PLUS + 1)
            for place in range(self.digits + 1):
                answer = digit + total[:, question, place]
                builder.ask(answer, question=question, difficulty=chains[:, question])
                builder.add(answer)
        return builder.rows


def add(a: Ids, b: Ids) -> tuple[Ids, Ids]:
    """Add numbers given as digits, least significant first.

    Args:
        a: (..., digits).
        b: Same shape.

    Returns:
        Digits of the sums, (..., digits + 1), and the longest carry chain of each, (...).
    """
    total = np.zeros((*a.shape[:-1], a.shape[-1] + 1), dtype=np.int64)
    carry, chain = np.zeros(a.shape[:-1], dtype=np.int64), np.zeros(a.shape[:-1], dtype=np.int64)
    longest = chain.copy()
    for place in range(a.shape[-1]):
        pair = a[..., place] + b[..., place]
        both = pair + carry
        # A place that makes 9 hands on the carry that it got; one that makes 10 or more begins a chain of its own.
        chain = np.where(pair >= 10, 1, np.where(both >= 10, chain + 1, 0))
        total[..., place], carry = both % 10, both // 10
        longest = np.maximum(longest, chain)
    total[..., -1] = carry
    return total, longest
