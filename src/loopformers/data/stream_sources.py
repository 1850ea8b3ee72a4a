"""Documents that are read as they are needed: published corpora too large to keep, and everything that can be a stream.

A stream consists of shards (files, as a rule), which is what ranks share and what is shuffled first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from datasets import Dataset, IterableDataset, load_dataset

from loopformers.data.corpora import dataset_name, load_documents, no_text, quiet_datasets, reason_of, split_rule
from loopformers.data.documents import document_of, no_column, read_documents
from loopformers.data.fingerprints import corpus_fingerprint, files_fingerprint
from loopformers.data.sources import SourceFile, find_files, is_bundled
from loopformers.data.splits import (
    DEFAULT_FRACTIONS,
    DEFAULT_SPLIT_SEED,
    SPLITS,
    SplitBy,
    check_fractions,
    split_key,
    split_of,
)
from loopformers.data.unpack import regular_size
from loopformers.errors import ConfigError, DataError, unknown_name

__all__ = ["STREAMED_CORPORA", "DatasetShards", "DocumentStream", "FileShards", "StreamedCorpus", "stream_documents"]

MAX_MEMORY_MAPPED_SHARDS = 64
"""Pieces that the memory-mapped bundled corpus is cut into, so that its order can be shuffled and its ranks share it."""


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


class ShardReader(Protocol):
    """The documents of one shard, in order, and where it stands between two of them."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield id and text."""

    def state(self) -> Any:
        """A JSON value from which another reader of the same shard goes on behind the last document."""


class Shards(Protocol):
    """Documents in pieces that can be read on their own.

    Attributes:
        fingerprint: Changes when the documents do, as far as that can be known cheaply; the same in another process.
    """

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def reader(self, index: int, state: Any = None) -> ShardReader:
        """Open a shard, from its beginning or from a state."""


@dataclass(frozen=True)
class DocumentStream:
    """Documents that arrive one after the other.

    Attributes:
        shards: Where they come from.
        origin: What errors call it.
        split: `train`, `validation` or `test`: the documents that `load_splits` puts there; None: all.
        fractions: As in `load_splits`.
        seed: As in `load_splits`.
        split_by: "document" or "id", as in `load_splits`.

    Raises:
        ConfigError: Illegal fractions, or another `split_by`.
        DataError: An unknown split.
    """

    shards: Shards
    origin: str
    split: str | None = None
    fractions: Sequence[float] = DEFAULT_FRACTIONS
    seed: int = DEFAULT_SPLIT_SEED
    split_by: SplitBy = "document"
    _bounds: tuple[float, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.split is not None and self.split not in SPLITS:
            raise DataError(f"{self.origin}: " + unknown_name("split", self.split, SPLITS))
        if self.split_by not in ("document", "id"):
            raise ConfigError(
                f"split_by={self.split_by!r} is not possible for a stream, which cannot look ahead; choose "
                "document or id, or load the source instead"
            )
        object.__setattr__(self, "_bounds", check_fractions(self.fractions))

    @property
    def num_shards(self) -> int:
        """Number of pieces that can be read on their own."""
        return len(self.shards)

    def documents(self) -> Iterator[tuple[str, str]]:
        """Id and text of the documents of this split, shard by shard.

        Raises:
            DataError: The source holds no document of any split, or cannot be read.
        """
        blank = True
        for index in range(self.num_shards):
            for document in self.shards.reader(index):
                blank = False
                if self.holds(*document):
                    yield document
        if blank:
            raise no_text(self.origin)

    def holds(self, document_id: str, text: str) -> bool:
        """Whether a document belongs to this split."""
        if self.split is None:
            return True
        return split_of(split_key(document_id, text, self.split_by), self._bounds, self.seed) == self.split


@dataclass(frozen=True)
class FileShards:
    """Files, each a shard."""

    files: Sequence[SourceFile]
    text_column: str
    id_column: str | None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, sizes and contents."""
        return files_fingerprint(self.files, text_column=self.text_column, id_column=self.id_column)

    def __len__(self) -> int:
        return len(self.files)

    def reader(self, index: int, state: Any = None) -> ShardReader:
        """Open a file; the state is the number of rows that were read."""
        return _FileReader(self, self.files[index], int(state or 0))


class _FileReader:
    def __init__(self, shards: FileShards, file: SourceFile, rows_read: int) -> None:
        self.shards, self.file, self.rows_read = shards, file, rows_read

    def __iter__(self) -> Iterator[tuple[str, str]]:
        shards = self.shards
        rest = read_documents(
            self.file, text_column=shards.text_column, id_column=shards.id_column, skip_rows=self.rows_read
        )
        for document in rest:
            self.rows_read = document.rows_read
            yield document.id, document.text

    def state(self) -> Any:
        return self.rows_read


@dataclass(frozen=True)
class DatasetShards:
    """Rows of an iterable dataset of the `datasets` library."""

    rows: IterableDataset
    origin: str
    text_column: str = "text"
    id_column: str | None = "id"
    fingerprint: str = ""

    def __len__(self) -> int:
        return int(self.rows.n_shards)

    def reader(self, index: int, state: Any = None) -> ShardReader:
        """Open a shard; the state is the library's."""
        rows = self.rows.shard(num_shards=len(self), index=index)
        if state is not None:
            rows.load_state_dict(state)
        return _RowReader(self, rows)


class _RowReader:
    def __init__(self, shards: DatasetShards, rows: IterableDataset) -> None:
        self.shards, self.rows = shards, rows

    def __iter__(self) -> Iterator[tuple[str, str]]:
        shards = self.shards
        for row in self.rows:
            if shards.text_column not in row:
                raise no_column(shards.origin, shards.text_column, row)
            given_id = None if shards.id_column is None else row.get(shards.id_column)
            found = document_of(row[shards.text_column], given_id, f"{shards.origin}: a row", shards.text_column)
            if found is not None:
                yield found

    def state(self) -> Any:
        return self.rows.state_dict()


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
    split_by: SplitBy = "document",
    cache_dir: str | os.PathLike[str] | None = None,
) -> DocumentStream:
    """Open a source as a stream; nothing but its description is read yet.

    Args:
        source: A name of `STREAMED_CORPORA`; or anything that `load_documents` reads, with the same documents and the
            same errors. Files are read as they are needed, each a shard; the bundled corpus comes from `load_documents`.
        split: None for all documents; or `train`, `validation` or `test`, the documents that `load_splits` puts there.
        published_split: The split of a named dataset that is read.
        data_files: Parquet files (or folders of them) to read in place of the named corpus: a local copy of its shards.
        text_column: Where the text is; None: the named corpus's own, else `text`.
        id_column: Where the id is; None: the named corpus's own, else `id`.
        fractions: As in `load_splits`.
        seed: As in `load_splits`.
        split_by: "document" or "id", as in `load_splits`.
        cache_dir: As in `load_documents`.

    Raises:
        ConfigError: Illegal fractions, or an illegal `split_by`.
        DataError: The source is missing, unreachable or unreadable, or `split` is unknown.
    """
    corpus = STREAMED_CORPORA.get(str(source))
    text = text_column or (corpus.text_column if corpus else "text")
    ids = id_column or (corpus.id_column if corpus else "id")
    origin = f"source {str(source)!r}"
    shards: Shards
    if data_files is not None:
        shards = FileShards(list(_parquet_files(data_files)), text, ids)
    elif corpus is not None:
        columns = [text] if ids is None else [text, ids]
        shards = _named(corpus.dataset, corpus.config, published_split, origin, text, ids, columns=columns)
    elif is_bundled(source):
        shards = _memory_mapped(load_documents(source, cache_dir=cache_dir), origin, corpus_fingerprint([source]))
    elif (files := find_files(source)) is not None:
        shards = FileShards([file for file in files if regular_size(file.path) > 0], text, ids)
    else:
        named = dataset_name(source)
        shards = _named(named["name"], named["config"], published_split, origin, text, ids)
    if len(shards) == 0:
        raise no_text(origin)
    return DocumentStream(shards, origin, split, fractions, seed, split_rule(source, split_by))


def _memory_mapped(documents: Dataset, origin: str, fingerprint: str) -> DatasetShards:
    rows = documents.to_iterable_dataset(num_shards=min(len(documents), MAX_MEMORY_MAPPED_SHARDS))
    return DatasetShards(rows, origin, fingerprint=fingerprint)


def _parquet_files(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Iterator[SourceFile]:
    for entry in [given] if isinstance(given, (str, os.PathLike)) else given:
        files = find_files(entry)
        if files is None:
            raise DataError(f"data_files: no file at {str(entry)!r}; check the path")
        found = [file for file in files if file.kind == "parquet"]
        if not found:
            raise DataError(
                f"{str(entry)!r} contains no .parquet file; give the folder of a corpus's shards, or the files"
            )
        yield from found


def _named(
    name: str,
    config: str | None,
    split: str,
    origin: str,
    text_column: str,
    id_column: str | None,
    columns: list[str] | None = None,
) -> DatasetShards:
    options: dict[str, Any] = {} if columns is None else {"columns": columns}
    try:
        with quiet_datasets():
            rows = load_dataset(name, name=config, split=split, streaming=True, **options)
    except Exception as error:  # network, hub, builder, parser and configuration errors share no base class
        raise DataError(
            f"{origin} cannot be streamed ({reason_of(error)}); a published corpus must be reachable: check the spelling "
            "and the network, or give its Parquet shards on this disk with data_files="
        ) from error
    return DatasetShards(rows, origin, text_column, id_column, fingerprint=f"{name}:{config}:{split}")
