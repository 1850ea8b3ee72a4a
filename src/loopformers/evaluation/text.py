"""Text to score: windows of a split of any source, spread evenly over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from loopformers.data.corpora import load_documents, load_splits
from loopformers.data.packing import pack_documents
from loopformers.data.splits import SPLITS, SplitBy
from loopformers.data.statistics import bytes_per_token
from loopformers.errors import ConfigError, check_count, unknown_name

__all__ = ["WHOLE", "ScoredText", "read_documents", "read_windows"]

WHOLE = "all"
"""The split that is the whole source."""


@dataclass(frozen=True, eq=False, slots=True)
class ScoredText:
    """Windows to score, in the order of their source.

    Attributes:
        windows: Records of `input_ids` and unshifted `labels`, (seq,) each.
        bytes_per_token: Mean UTF-8 bytes of a token of the split, for bits per byte; None where they are no text.
    """

    windows: Sequence[dict[str, Any]]
    bytes_per_token: float | None


def read_documents(source: str, split: str, *, split_by: SplitBy = "document") -> Dataset:
    """Return the documents of a split of a source, or of all of it.

    Args:
        source: As `loopformers.data.corpora.load_documents` reads it.
        split: train, validation, test or all.
        split_by: See `loopformers.data.splits.split_documents`.

    Raises:
        ConfigError: No such split.
        DataError: The source is missing, unreadable or empty, or the split would be.
    """
    if split == WHOLE:
        return load_documents(source)
    if split not in SPLITS:
        raise ConfigError(unknown_name("split", split, (*SPLITS, WHOLE)))
    return load_splits(source, split_by=split_by)[split]


def read_windows(documents: Dataset, tokenizer: Any, *, seq_len: int, num_windows: int) -> ScoredText:
    """Tokenise documents as training does, and take at most `num_windows` windows, spread evenly over them.

    Args:
        documents: Records with `text`.
        tokenizer: The model's.
        seq_len: Tokens in a window.
        num_windows: Windows to take.

    Raises:
        ConfigError: A number below what makes sense.
        DataError: Less text than one window.
    """
    check_count("num_windows", num_windows)
    packed = pack_documents(documents, tokenizer, seq_len)
    return ScoredText([packed[row] for row in packed.spread(num_windows)], bytes_per_token(packed))
