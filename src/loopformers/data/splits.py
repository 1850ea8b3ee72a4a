"""Train, validation and test from one corpus, such that no text is in two of them.

By document is the rule: where a document falls depends only on its text and the seed. Copies of a text therefore fall
together, wherever they are and whatever their ids; adding documents moves no other; and a stream, which never knows what
comes later, finds the same splits. By id keeps together what shares an id, such as the chapters of a book. By tail is the
way out for a corpus of one or few documents, such as one's own single text file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from datasets import Dataset, DatasetDict

from loopformers.data.documents import text_id
from loopformers.errors import ConfigError, DataError, unknown_name

__all__ = ["DEFAULT_FRACTIONS", "DEFAULT_SPLIT_SEED", "SPLITS", "SplitBy", "split_documents"]

SPLITS = ("train", "validation", "test")
"""The splits that this package knows, in the order of `fractions`."""

DEFAULT_FRACTIONS = (0.9, 0.05, 0.05)
"""Shares of train, validation and test."""

DEFAULT_SPLIT_SEED = 1159
"""The first seed at which validation and test of the bundled corpus are each 3 to 6 % of its characters and hold one
novel, of at most 62 % of the split, beside addresses. Chosen by that rule alone, before any model was trained."""

SplitBy = Literal["document", "id", "tail"]

FRACTION_TOLERANCE = 1e-9


def split_documents(
    documents: Dataset,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    *,
    seed: int = DEFAULT_SPLIT_SEED,
    split_by: SplitBy = "document",
) -> DatasetDict:
    """Divide documents into train, validation and test.

    Args:
        documents: Records with `id` and `text`.
        fractions: Shares of the three splits; of the number of documents (in expectation), or of each document's
            characters with `split_by="tail"`. Each positive, their sum 1.
        seed: Names one division among many; not used by `split_by="tail"`.
        split_by: "document": each document falls whole into one split, by a hash of its text, so equal texts stay
            together. "id": the same by a hash of its id, so documents with equal ids stay together. "tail": each document
            is cut in three, its beginning for train and its end for test; the pieces joined are the document again.

    Returns:
        The three splits, each in the order of `documents`.

    Raises:
        ConfigError: Illegal fractions or `split_by`.
        DataError: A split would be empty.
    """
    bounds = check_fractions(fractions)
    match split_by:
        case "document" | "id":
            rows: dict[str, list[int]] = {name: [] for name in SPLITS}
            for row, key in enumerate(_keys(documents, split_by)):
                rows[split_of(key, bounds, seed)].append(row)
            splits = DatasetDict({name: documents.select(rows[name]) for name in SPLITS})
            remedy = 'add documents, give larger fractions or another seed, or cut each document with split_by="tail"'
        case "tail":
            splits = cut_tails(documents, bounds)
            remedy = "give longer documents or larger fractions"
        case _:
            raise ConfigError(unknown_name("split_by", split_by, ("document", "id", "tail")))
    for name, split in splits.items():
        if len(split) == 0:
            raise DataError(
                f"the {name} split is empty: {len(documents)} document(s) split by {split_by} at {tuple(fractions)} "
                f"leave it none, and each split needs at least one; {remedy}"
            )
    return splits


def check_fractions(fractions: Sequence[float]) -> tuple[float, float]:
    """Return the two inner bounds of three fractions, or raise ConfigError."""
    shares = tuple(fractions)
    legal = len(shares) == len(SPLITS) and all(math.isfinite(share) and share > 0 for share in shares)
    if not legal or abs(math.fsum(shares) - 1) > FRACTION_TOLERANCE:
        raise ConfigError(
            f"fractions={shares} must be three positive shares (train, validation, test) that sum to 1; "
            f"write for example {DEFAULT_FRACTIONS}"
        )
    return shares[0], 1 - shares[2]


def split_of(key: str, bounds: tuple[float, float], seed: int) -> str:
    """The split of one document: its key's place in [0, 1), drawn by SHA-256, against the bounds."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return SPLITS[sum(place >= bound for bound in bounds)]


def split_key(document_id: str, text: str, split_by: SplitBy) -> str:
    """What decides where a document falls."""
    return document_id if split_by == "id" else text_id(text)


def _keys(documents: Dataset, split_by: SplitBy) -> Iterator[str]:
    if split_by == "id":
        yield from documents.select_columns("id")[:]["id"]  # reading the ids must not read the texts
        return
    for texts in documents.select_columns("text").iter(batch_size=64):
        yield from map(text_id, texts["text"])


def cut_tails(documents: Dataset, bounds: tuple[float, float]) -> DatasetDict:
    """Cut each document in three at exact characters; pieces without text are left out."""
    pieces: dict[str, dict[str, list[str]]] = {name: {"id": [], "text": []} for name in SPLITS}
    for document in documents:
        text = document["text"]
        cuts = (0, *(int(len(text) * bound) for bound in bounds), len(text))
        for name, (start, end) in zip(SPLITS, pairwise(cuts), strict=True):
            if start < end:
                pieces[name]["id"].append(document["id"])
                pieces[name]["text"].append(text[start:end])
    return DatasetDict({name: Dataset.from_dict(columns) for name, columns in pieces.items()})
