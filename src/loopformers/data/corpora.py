"""Documents from anywhere: the bundled corpus, files, folders, and every dataset that `datasets` can load.

A document is a record of two strings, `id` and `text`. Files are read by `loopformers.data.documents`, which streams use
as well, and named datasets by the `datasets` library. Both are kept in that library's cache (`HF_HOME` and
`HF_DATASETS_CACHE` are honoured), memory-mapped, so a corpus may be larger than memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, Features, Value, concatenate_datasets, load_dataset

from loopformers.data.document_cache import cache_error, default_cache_dir, failure_of_cache, keeping, load_files
from loopformers.data.documents import document_of
from loopformers.data.sources import BUNDLED, BUNDLED_CORPORA, DATASET_NAME, find_files, is_bundled, kind_of
from loopformers.data.splits import DEFAULT_FRACTIONS, DEFAULT_SPLIT_SEED, SPLITS, SplitBy, split_documents
from loopformers.errors import DataError, unknown_name

__all__ = ["BUNDLED", "BUNDLED_CORPORA", "load_documents", "load_splits"]

RECORD = Features({"id": Value("string"), "text": Value("string")})


def load_documents(
    source: str | os.PathLike[str],
    split: str | None = None,
    *,
    text_column: str = "text",
    id_column: str = "id",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Read the documents of a source.

    Rows without text (empty, or white space only) are no documents and are left out.

    Args:
        source: One of
            - `bundled`, or a part of it such as `bundled/austen`;
            - a plain text file (one document), a JSON Lines, JSON, Parquet or Arrow file; text and JSON also compressed
              (.gz, .xz, .bz2, .zst);
            - a folder, searched recursively for such files; hidden files and README.md (a dataset's card) are left out;
            - a `datasets` name, `name` or `name:config`. A local path that exists wins over a name.
        split: None for all documents; `train`, `validation` or `test` for that split of `load_splits(source)`; or any
            other split that a named dataset publishes.
        text_column: Where JSON, Parquet and named datasets keep the text.
        id_column: Where they keep the id. A row without one gets a digest of its text; a text file's id is its path
            inside the folder.
        cache_dir: Where the documents are kept. None: the usual cache of `datasets`.

    Returns:
        A dataset with the string columns `id` and `text`.

    Raises:
        DataError: The source is missing, unreachable, unreadable or empty, has no such column of strings, or its
            documents cannot be kept.
    """
    published = read_source(source, text_column=text_column, id_column=id_column, cache_dir=cache_dir)
    if split is None:
        return concatenate_datasets(list(published.values()))
    if split in SPLITS:
        return splits_of(source, published)[split]
    if split not in published:
        raise DataError(f"source={str(source)!r}: " + unknown_name("split", split, (*SPLITS, *published)))
    return published[split]


def load_splits(
    source: str | os.PathLike[str],
    *,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    seed: int = DEFAULT_SPLIT_SEED,
    split_by: SplitBy = "document",
    text_column: str = "text",
    id_column: str = "id",
    cache_dir: str | os.PathLike[str] | None = None,
) -> DatasetDict:
    """Read a source as train, validation and test.

    A named dataset that publishes all three keeps them. Everything else is divided by `split_documents`, all of its
    documents together, whatever other splits it publishes.

    Args:
        source: As in `load_documents`, like the last three arguments.
        fractions: As in `split_documents`, like `seed` and `split_by`.
        seed: See `split_documents`.
        split_by: See `split_documents`.
        text_column: See `load_documents`.
        id_column: See `load_documents`.
        cache_dir: See `load_documents`.

    Raises:
        ConfigError: Illegal fractions or `split_by`.
        DataError: As in `load_documents`, or a split would be empty.
    """
    published = read_source(source, text_column=text_column, id_column=id_column, cache_dir=cache_dir)
    return splits_of(source, published, fractions=fractions, seed=seed, split_by=split_by)


def splits_of(
    source: str | os.PathLike[str], published: DatasetDict, *, split_by: SplitBy = "document", **options: Any
) -> DatasetDict:
    """The splits that a source publishes if it has all three, else those of `split_documents`."""
    if set(SPLITS) <= set(published):
        return DatasetDict({name: published[name] for name in SPLITS})
    documents = concatenate_datasets(list(published.values()))
    return split_documents(documents, split_by=split_rule(source, split_by), **options)


def split_rule(source: str | os.PathLike[str], split_by: SplitBy) -> SplitBy:
    """How a source is split: the bundled corpus, which repeats no text, keeps the splits by id that it was published with."""
    return "id" if split_by == "document" and is_bundled(source) else split_by


# -- sources ---------------------------------------------------------------------------------------------------


def read_source(
    source: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None, **columns: str
) -> DatasetDict:
    """Read a source into its published splits; anything but a named dataset has the one split `train`."""
    files = find_files(source)
    if files is None:
        published = read_named(source, cache_dir=None if cache_dir is None else os.fspath(cache_dir), **columns)
    else:
        published = DatasetDict({"train": load_files(files, cache_dir=cache_dir, **columns)})
    published = DatasetDict({split: documents for split, documents in published.items() if len(documents)})
    if not published:
        raise no_text(f"source {str(source)!r}")
    return published


def no_text(origin: str) -> DataError:
    """The error for a source without a document."""
    return DataError(f"{origin} contains no text, and a corpus needs at least one document; add some")


def dataset_name(source: str | os.PathLike[str]) -> re.Match[str]:
    """The name, and the configuration, of a dataset that is no local path.

    Raises:
        DataError: What only a path can be.
    """
    named = DATASET_NAME.fullmatch(source) if isinstance(source, str) else None
    if named is None or kind_of(Path(str(source))):
        raise DataError(f"no file or folder at {str(source)!r} (working folder {os.getcwd()!r}); check the path")
    return named


def read_named(source: str | os.PathLike[str], *, cache_dir: str | None, **columns: str) -> DatasetDict:
    """Read every split of a dataset of the `datasets` library."""
    named = dataset_name(source)
    try:
        found = load_dataset(named["name"], named["config"], cache_dir=cache_dir)
    except Exception as error:  # network, hub, builder and configuration errors share no base class
        if (full := failure_of_cache(error)) is not None:
            raise cache_error(cache_dir or default_cache_dir(), full) from error
        raise DataError(
            f"source={source!r} is no local path, and as a dataset's name it could not be loaded ({reason_of(error)}); "
            "a name must be reachable or already in the cache: check the spelling (name or name:config), load it once "
            f"while online, or give a local file or folder, or {BUNDLED!r}"
        ) from error
    with quiet_datasets(), keeping(cache_dir or default_cache_dir()):
        return DatasetDict(
            {
                name: as_documents(rows, origin=f"dataset {source!r}, split {name!r}", **columns)
                for name, rows in found.items()
            }
        )


# -- records ---------------------------------------------------------------------------------------------------


def as_documents(rows: Dataset, *, origin: str, text_column: str, id_column: str) -> Dataset:
    """Turn rows of any columns into documents, or say what they lack."""
    if text_column not in rows.column_names:
        raise DataError(
            f"{origin} has no column {text_column!r}, where the text is looked for; its columns are "
            f"{', '.join(rows.column_names)}: name one with text_column="
        )
    dtype = getattr(rows.features[text_column], "dtype", "nested")
    if dtype not in ("string", "large_string", "string_view"):
        raise DataError(
            f"{origin}: column {text_column!r} is of type {dtype}, and text must be strings; "
            "name another column with text_column=, or convert it"
        )
    columns = [name for name in (text_column, id_column) if name in rows.column_names]
    return rows.select_columns(columns).map(
        to_records,
        batched=True,
        batch_size=256,
        with_indices=True,
        remove_columns=columns,
        features=RECORD,
        fn_kwargs={"origin": origin, "text_column": text_column, "id_column": id_column},
    )


def to_records(
    batch: dict[str, list[Any]], indices: list[int], *, origin: str, text_column: str, id_column: str
) -> dict[str, list[str]]:
    """Records of one batch of rows, without those that hold no text."""
    texts, ids = batch[text_column], batch.get(id_column, [None] * len(indices))
    found = [
        document
        for index, text, given_id in zip(indices, texts, ids, strict=True)
        if (document := document_of(text, given_id, f"{origin}, row {index},", text_column)) is not None
    ]
    return {"id": [document_id for document_id, _ in found], "text": [text for _, text in found]}


def reason_of(error: BaseException) -> str:
    """One line on what went wrong inside the library, from the cause that it wraps."""
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence progress bars and log lines of the library, whose errors arrive as exceptions anyway."""
    verbosity = datasets.utils.logging.get_verbosity()
    # A set environment variable outranks both switches, and using them then warns.
    may_switch = os.environ.get("HF_DATASETS_DISABLE_PROGRESS_BARS") is None
    bars_were_on = may_switch and not datasets.utils.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if bars_were_on:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if bars_were_on:
            datasets.enable_progress_bars()
