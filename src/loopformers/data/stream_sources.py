"""Documents that are read as they are needed: published corpora too large to keep, and everything that can be a stream.

A stream consists of shards (files, as a rule), which is what ranks share and what is shuffled first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset

from loopformers.data.corpora import (
    BUNDLED,
    DATASET_NAME,
    files_under,
    kind_of,
    load_documents,
    quiet_datasets,
    reason_of,
    text_id,
)
from loopformers.data.splits import DEFAULT_FRACTIONS, DEFAULT_SPLIT_SEED, SPLITS, check_fractions, split_of
from loopformers.errors import DataError, unknown_name

__all__ = ["STREAMED_CORPORA", "DocumentStream", "StreamedCorpus", "stream_documents"]

MAX_MEMORY_MAPPED_SHARDS = 64
"""Pieces that a memory-mapped source is cut into, so that its order can be shuffled and its ranks share it."""


@dataclass(frozen=True, slots=True)
class StreamedCorpus:
    """A published corpus that is streamed.

    Attributes:
        dataset: Name in the `datasets` library.
        config: Configuration; None: the only one.
        text_column: Where the text is.
        id_column: Where the id is; None: a digest of the text takes its place.
        about: What it holds, and under which terms.
    """

    dataset: str
    config: str | None
    text_column: str
    id_column: str | None
    about: str


STREAMED_CORPORA: Mapping[str, StreamedCorpus] = {
    "fineweb-edu": StreamedCorpus(
        "HuggingFaceFW/fineweb-edu", "sample-10BT", "text", "id", "educational web pages, 10 G tokens (ODC-By 1.0)"
    ),
    "fineweb-edu-100bt": StreamedCorpus(
        "HuggingFaceFW/fineweb-edu", "sample-100BT", "text", "id", "educational web pages, 100 G tokens (ODC-By 1.0)"
    ),
    "pile-deduplicated": StreamedCorpus(
        "EleutherAI/the_pile_deduplicated", None, "text", None, "the Pile without near-duplicates (terms of its parts)"
    ),
}
"""Published corpora by the names that recipes use."""


@dataclass(frozen=True)
class DocumentStream:
    """Documents that arrive one after the other.

    Attributes:
        rows: Rows of the `datasets` library, in shards.
        origin: What errors call it.
        text_column: Where the text is.
        id_column: Where the id is; rows without one are known by a digest of their text.
        split: `train`, `validation` or `test`: the documents that `load_splits` would put there by their ids; None: all.
        fractions: As in `load_splits`.
        seed: As in `load_splits`.
    """

    rows: IterableDataset
    origin: str
    text_column: str = "text"
    id_column: str | None = "id"
    split: str | None = None
    fractions: Sequence[float] = DEFAULT_FRACTIONS
    seed: int = DEFAULT_SPLIT_SEED
    _bounds: tuple[float, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.split is not None and self.split not in SPLITS:
            raise DataError(f"{self.origin}: " + unknown_name("split", self.split, SPLITS))
        object.__setattr__(self, "_bounds", check_fractions(self.fractions))

    @property
    def num_shards(self) -> int:
        """Number of pieces that can be read on their own."""
        return int(self.rows.n_shards)

    def shard(self, index: int) -> IterableDataset:
        """The rows of one shard."""
        return self.rows.shard(num_shards=self.num_shards, index=index)

    def text_of(self, row: Mapping[str, Any]) -> str | None:
        """The text of a row, or None where the row is no document of this split.

        Raises:
            DataError: No such column, or no string in it.
        """
        if self.text_column not in row:
            raise DataError(
                f"{self.origin} has no column {self.text_column!r}, where the text is looked for; its columns are "
                f"{', '.join(row)}: name one with text_column="
            )
        text = row[self.text_column]
        if not isinstance(text, str):
            raise DataError(
                f"{self.origin}: a row has a {type(text).__name__} in column {self.text_column!r}, and text must be a "
                "string; remove the row, or name another column with text_column="
            )
        if not text or text.isspace():
            return None
        if self.split is not None:
            given = row.get(self.id_column) if self.id_column is not None else None
            document_id = text_id(text) if given is None else str(given)
            if split_of(document_id, self._bounds, self.seed) != self.split:
                return None
        return text


def stream_documents(
    source: str | os.PathLike[str],
    split: str | None = None,
    *,
    published_split: str = "train",
    data_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    seed: int = DEFAULT_SPLIT_SEED,
    cache_dir: str | os.PathLike[str] | None = None,
) -> DocumentStream:
    """Open a source as a stream; nothing but its description is read yet.

    Args:
        source: A name of `STREAMED_CORPORA`; or anything that `load_documents` reads. Parquet and JSON files are read as
            they are needed, each file a shard; text files and the bundled corpus come from `load_documents`.
        split: None for all documents; or `train`, `validation` or `test`, the documents that `load_splits` puts there.
        published_split: The split of a named dataset that is read.
        data_files: Parquet files (or folders of them) to read in place of the named corpus: a local copy of its shards.
        text_column: Where the text is; None: the named corpus's own, else `text`.
        id_column: Where the id is; None: the named corpus's own, else `id`.
        fractions: As in `load_splits`.
        seed: As in `load_splits`.
        cache_dir: As in `load_documents`.

    Raises:
        ConfigError: Illegal fractions.
        DataError: The source is missing, unreachable or unreadable, or `split` is unknown.
    """
    corpus = STREAMED_CORPORA.get(str(source))
    text = text_column or (corpus.text_column if corpus else "text")
    ids = id_column or (corpus.id_column if corpus else "id")
    origin = f"source {str(source)!r}"
    columns = [text] if ids is None else [text, ids]
    if data_files is not None:
        rows = _stream_files(list(_parquet_files(data_files)), origin, columns=columns if corpus else None)
    elif corpus is not None:
        rows = _stream_named(corpus.dataset, corpus.config, published_split, origin, columns=columns)
    else:
        rows = _stream_any(source, published_split, origin, cache_dir, text, ids)
        if rows is None:
            documents = load_documents(source, text_column=text, id_column=str(ids), cache_dir=cache_dir)
            shards = min(len(documents), MAX_MEMORY_MAPPED_SHARDS)
            rows, text, ids = documents.to_iterable_dataset(num_shards=shards), "text", "id"
    return DocumentStream(rows, origin, text, ids, split, fractions, seed)


def _parquet_files(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Iterator[Path]:
    for entry in [given] if isinstance(given, (str, os.PathLike)) else given:
        path = Path(entry).expanduser()
        found = [file for file in files_under(path) if kind_of(file) == "parquet"] if path.is_dir() else [path]
        if not found:
            raise DataError(f"folder {str(path)!r} holds no .parquet file; give the folder of a corpus's shards")
        yield from found


def _stream_any(
    source: str | os.PathLike[str],
    published_split: str,
    origin: str,
    cache_dir: str | os.PathLike[str] | None,
    text_column: str,
    id_column: str | None,
) -> IterableDataset | None:
    """Stream Parquet files, JSON files and named datasets; None for what `load_documents` has to read."""
    path = Path(source).expanduser()
    if isinstance(source, str) and source.partition("/")[0] == BUNDLED:
        return None
    if path.exists():
        files = files_under(path) if path.is_dir() else [path]
        kinds = {kind_of(file) for file in files}
        return _stream_files(files, origin) if kinds <= {"parquet"} or kinds <= {"json"} else None
    named = DATASET_NAME.fullmatch(str(source))
    if named is None or kind_of(path):
        return None  # load_documents says what is wrong
    return _stream_named(named["name"], named["config"], published_split, origin)


def _stream_files(files: list[Path], origin: str, columns: list[str] | None = None) -> IterableDataset:
    for file in files:
        if not file.is_file():
            raise DataError(f"{origin}: no file at {str(file)!r}; check the path")
    kind = str(kind_of(files[0]))
    options: dict[str, Any] = {"columns": columns} if kind == "parquet" and columns is not None else {}
    return _load(kind, origin, data_files=[os.path.abspath(file) for file in files], split="train", **options)


def _stream_named(
    name: str, config: str | None, split: str, origin: str, columns: list[str] | None = None
) -> IterableDataset:
    options: dict[str, Any] = {} if columns is None else {"columns": columns}
    return _load(name, origin, name=config, split=split, **options)


def _load(path: str, origin: str, **options: Any) -> IterableDataset:
    try:
        with quiet_datasets():
            return load_dataset(path, streaming=True, **options)
    except Exception as error:  # network, hub, builder, parser and configuration errors share no base class
        raise DataError(
            f"{origin} cannot be streamed ({reason_of(error)}); a published corpus must be reachable: check the spelling "
            "and the network, or give its Parquet shards on this disk with data_files="
        ) from error
