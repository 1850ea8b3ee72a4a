"""Long texts to token ids in pieces: the tokenizers library takes about 140 bytes of memory for each byte it encodes at once.

The ids of the pieces joined are those of the whole text. A text is cut only where that is certain for the tokenizer at
hand, whatever its normaliser, pre-tokenizer and model are:

- No token of the vocabulary spans the cut. Merges of BPE and paths of Unigram therefore never cross it.
- The cut is where the kind of character changes, never inside a run of one kind, so that nothing which groups a run by
  counting from its start (digits in threes, spaces in fours) depends on what lies before.
- The characters around the cut, encoded together, give the ids of both sides encoded apart. A tokenizer that puts a space
  in front of every text is given the right side without its own space, where that makes the two equal.

A text without such a place is encoded whole, up to `MAX_WHOLE` characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loopformers.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["MAX_WHOLE", "PieceCutter"]

PIECE = 1 << 19
"""Characters of a piece, about; a text of at most twice as many stays whole."""

MAX_WHOLE = 1 << 24
"""Characters of the longest text, or part of one, that is encoded at once: 2 to 3 GB of memory."""

CONTEXT = 1000
"""Characters on either side of a cut that are encoded to check it."""

REGION = 1 << 16
"""Characters that are searched for a place to cut before the search goes on behind them."""

TRIES = 32
"""Places in a region that are checked by encoding."""

CANDIDATE = re.compile(r"(?<=[^\W_])(?=[ \n][^\W_]|[^\w\s])|(?<=\n)(?=[^\W_])")
"""Letters or digits end here, with one space, a newline or another sign behind them; or they begin a line."""


class PieceCutter:
    """Cuts texts for one tokenizer.

    Args:
        backend: A tokenizer that adds no special tokens to what it encodes.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self._spans: dict[str, bool] = {}
        self._vocabulary: list[str] | None = None

    def is_long(self, text: str) -> bool:
        """Whether a text has more than one piece, if it can be cut."""
        return len(text) > 2 * PIECE

    def pieces(self, text: str) -> Iterator[str]:
        """Yield a text in pieces whose ids joined are its own.

        Raises:
            DataError: More than `MAX_WHOLE` characters without a place to cut.
        """
        start = 0
        while len(text) - start > 2 * PIECE:
            cut = self._next_cut(text, start + PIECE, min(len(text) - 1, start + MAX_WHOLE))
            if cut is None:
                if len(text) - start <= MAX_WHOLE:
                    break
                raise DataError(
                    f"the document that begins {text[:40]!r} has {MAX_WHOLE:,} or more characters that this tokenizer can only "
                    "encode together, too many for memory; split the document, or use a tokenizer that separates words"
                )
            end, begin = cut
            yield text[start:end]
            start = begin
        yield text[start:] if start else text

    def _next_cut(self, text: str, start: int, stop: int) -> tuple[int, int] | None:
        """Where the left piece ends and the right one begins, at or behind `start`; None where no place is found."""
        for region in range(start, stop, REGION):
            tries = 0
            for match in CANDIDATE.finditer(text, region, min(region + REGION, stop)):
                place = match.start()
                if unicodedata.category(text[place])[0] == "M" or self._token_spans(text[place - 1], text[place]):
                    continue  # a mark belongs to the letter in front of it
                if (begin := self._checked(text, place)) is not None:
                    return place, begin
                tries += 1
                if tries == TRIES:
                    break
        return None

    def _checked(self, text: str, place: int) -> int | None:
        """Where the right piece begins for a cut at a place, or None where the ids would change."""
        left, right = text[max(0, place - CONTEXT) : place], text[place : place + CONTEXT]
        whole, ids_left = self._ids(left + right), self._ids(left)
        if whole[: len(ids_left)] != ids_left:
            return None
        if whole[len(ids_left) :] == self._ids(right):
            return place
        if right[0] == " " and whole[len(ids_left) :] == self._ids(right[1:]):
            return place + 1
        return None

    def _ids(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def _token_spans(self, left: str, right: str) -> bool:
        """Whether some token of the vocabulary holds these two characters side by side, in the model's own alphabet."""
        before = self._written(left)
        after = self._written(left + right)[len(before) : len(before) + 1]
        before = before[-1:]
        if not before or not after:
            return False  # the tokenizer drops one of them, so they are in different words
        pair = before + after
        if pair not in self._spans:
            if self._vocabulary is None:
                self._vocabulary = list(self.backend.get_vocab())
            self._spans[pair] = any(pair in token for token in self._vocabulary)
        return self._spans[pair]

    def _written(self, text: str) -> str:
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer is not None:
            text = "".join(part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text))
        return text
