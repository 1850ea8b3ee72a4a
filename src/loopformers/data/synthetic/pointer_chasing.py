"""k-hop pointer chasing: follow a permutation that is given in the row, k times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from loopformers.data.synthetic.contract import SPECIAL_WORDS, Ids, RowsBuilder, TaskRows, check_choice, check_counts
from loopformers.errors import check_count

__all__ = ["PointerChasing"]

MAX_PAIRED = 1024
"""Most symbols whose pairs are tokens: a million tokens."""

Answers = Literal["every", "last"]
Pairs = Literal["two_tokens", "one_token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerChasing:
    """Follow a random permutation f from x; difficulty is the number of hops.

    A row is the n pairs in random order, then questions. With `pairs="two_tokens"` a pair is the tokens `a f(a)`, which a
    model must first learn to bind; with `pairs="one_token"` it is one token `a:f(a)`, so that a hop is one look-up and depth
    alone is left to learn. With `answers="every"` a question is `x > > >`, and
    behind the j-th `>` stands f^j(x) as the target: not as a token, so no hop is given away. With `answers="last"` it is
    `k x` with k drawn from 1..hops, and f^k(x) alone is asked.

    Example:
        >>> task = PointerChasing(symbols=3, hops=2, questions=1)
        >>> row = task.generate(np.random.default_rng(5), 1).row(0)
        >>> " ".join(task.words[i] for i in row["input_ids"])
        's0 s1 s2 s0 s1 s2 s1 > > <end>'
        >>> [task.words[i] if i >= 0 else "-" for i in row["labels"]]
        ['-', '-', '-', '-', '-', '-', '-', '-', 's2', 's0']
    """

    symbols: int = 6
    """n, entries of the permutation, at least 2."""
    hops: int = 4
    """Most hops that are asked."""
    questions: int = 10
    """Starts that are asked in a row."""
    answers: Answers = "every"
    """every: after each hop; last: after a drawn number of hops alone."""
    pairs: Pairs = "two_tokens"
    """How an entry of the permutation is written."""
    single_cycle: bool = False
    """Whether f is one cycle through all symbols, so that fewer hops than symbols never come back to the start."""

    def __post_init__(self) -> None:
        check_counts(self, symbols=2, hops=1, questions=1)
        check_choice("answers", self.answers, get_args(Answers))
        check_choice("pairs", self.pairs, get_args(Pairs))
        if self.pairs == "one_token":  # each pair of symbols is a token of the vocabulary
            check_count("task.symbols with task.pairs=one_token", self.symbols, at_most=MAX_PAIRED)

    @property
    def words(self) -> tuple[str, ...]:
        """Symbols `s0`.., then `>`, or numbers of hops `1`..`hops`, then pairs where they are tokens."""
        symbols = tuple(f"s{i}" for i in range(self.symbols))
        marks = (">",) if self.answers == "every" else tuple(str(k) for k in range(1, self.hops + 1))
        pairs = tuple(f"{a}:{b}" for a in symbols for b in symbols) if self.pairs == "one_token" else ()
        return (*SPECIAL_WORDS, *symbols, *marks, *pairs)

    @property
    def seq_len(self) -> int:
        """Pairs, questions, and the end."""
        listed = self.symbols * (2 if self.pairs == "two_tokens" else 1)
        return listed + self.questions * (1 + self.hops if self.answers == "every" else 2) + 1

    def generate(self, rng: np.random.Generator, count: int) -> TaskRows:
        """Return `count` rows."""
        first_symbol, first_mark = len(SPECIAL_WORDS), len(SPECIAL_WORDS) + self.symbols
        f = self._permutations(rng, count)
        listed = _shuffled(rng, count, self.symbols)
        images = np.take_along_axis(f, listed, axis=1)
        builder = RowsBuilder(count, self.seq_len)
        if self.pairs == "two_tokens":
            builder.add(first_symbol + np.stack([listed, images], axis=2).reshape(count, -1))
        else:
            first_pair = len(self.words) - self.symbols**2
            builder.add(first_pair + self.symbols * listed + images)
        starts = rng.integers(self.symbols, size=(count, self.questions))
        drawn = rng.integers(1, self.hops + 1, size=(count, self.questions))
        for question in range(self.questions):
            at = starts[:, question, None]
            if self.answers == "last":
                builder.add(first_mark + drawn[:, question] - 1)
            builder.add(first_symbol + at)
            for hop in range(1, self.hops + 1):
                at = np.take_along_axis(f, at, axis=1)
                answer = first_symbol + at[:, 0]
                if self.answers == "every":
                    builder.add(first_mark)
                    builder.ask(answer, question=question * self.hops + hop - 1, difficulty=hop)
                else:
                    builder.ask(answer, question=question, difficulty=hop, where=drawn[:, question] == hop)
        return builder.rows

    def _permutations(self, rng: np.random.Generator, count: int) -> Ids:
        """Permutations, (count, symbols)."""
        order = _shuffled(rng, count, self.symbols)
        if not self.single_cycle:
            return order
        f = np.empty_like(order)
        np.put_along_axis(f, order, np.roll(order, -1, axis=1), axis=1)
        return f


def _shuffled(rng: np.random.Generator, count: int, size: int) -> Ids:
    """Independent permutations of 0..size-1, (count, size)."""
    return rng.permuted(np.tile(np.arange(size), (count, 1)), axis=1)
