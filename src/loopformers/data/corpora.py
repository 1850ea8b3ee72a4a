"""Documents from anywhere: the bundled corpus, files, folders, and every dataset that `datasets` can load.

A document is a record of two strings, `id` and `text`. Everything is read by the `datasets` library and lives in its
cache (`HF_HOME` and `HF_DATASETS_CACHE` are honoured), memory-mapped, so a corpus may be larger than memory.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, Features, Value, concatenate_datasets, load_dataset

from loopformers.data.splits import DEFAULT_FRACTIONS, DEFAULT_SPLIT_SEED, SPLITS, SplitBy, split_documents
from loopformers.errors import DataError, unknown_name

__all__ = ["BUNDLED", "BUNDLED_CORPORA", "load_documents", "load_splits"]

BUNDLED = "bundled"
"""The source name of the corpus that ships with this package; reserved: write `./bundled` for a folder of that name."""

BUNDLED_DIR = Path(__file__).parent / "bundled"

BUNDLED_CORPORA = ("austen", "moby-dick", "sotu")
"""Its parts, each a source of its own: `bundled/austen`."""

KIND_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
"""Which of the library's loaders reads a file, by its suffix."""

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
"""What text and JSON files may be compressed with; the library decompresses."""

SUFFIXES = f"{', '.join(KIND_OF_SUFFIX)} (text and JSON also compressed: {', '.join(COMPRESSIONS)})"

DATASET_NAME = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)?)(:(?P<config>[^/\\]+))?")

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
            - a plain text file (one document), JSON Lines or JSON file, or Parquet file; text and JSON also compressed
              (.gz, .xz, .bz2, and .zst where `zstandard` is installed);
            - a folder, searched recursively for such files; hidden files and README.md (a dataset's card) are left out;
            - a `datasets` name, `name` or `name:config`. A local path that exists wins over a name.
        split: None for all documents; `train`, `validation` or `test` for that split of `load_splits(source)`; or any
            other split that a named dataset publishes.
        text_column: Where JSON, Parquet and named datasets keep the text.
        id_column: Where they keep the id. A row without one gets a digest of its text, so equal texts share their id
            and thereby their split; a text file's id is its path inside the folder.
        cache_dir: Where `datasets` keeps its files. None: its usual cache.

    Returns:
        A dataset with the string columns `id` and `text`.

    Raises:
        DataError: The source is missing, unreachable, unreadable or empty, or has no such column of strings.
    """
    published = read_source(source, text_column=text_column, id_column=id_column, cache_dir=cache_dir)
    if split is None:
        return concatenate_datasets(list(published.values()))
    if split in SPLITS:
        return splits_of(published)[split]
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
    return splits_of(published, fractions=fractions, seed=seed, split_by=split_by)


def splits_of(published: DatasetDict, **options: Any) -> DatasetDict:
    """The splits that a source publishes if it has all three, else those of `split_documents`."""
    if set(SPLITS) <= set(published):
        return DatasetDict({name: published[name] for name in SPLITS})
    return split_documents(concatenate_datasets(list(published.values())), **options)


# -- sources ---------------------------------------------------------------------------------------------------


def read_source(
    source: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None, **columns: str
) -> DatasetDict:
    """Read a source into its published splits; anything but a named dataset has the one split `train`."""
    cache = None if cache_dir is None else os.fspath(cache_dir)
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise DataError(
            f"source={source!r} is no path and no name; give {BUNDLED!r}, a file, a folder or a dataset's name"
        )
    name, _, part = str(source).partition("/")
    path = Path(source).expanduser()
    if isinstance(source, str) and name == BUNDLED:
        published = DatasetDict({"train": read_files(bundled_files(part), BUNDLED_DIR, cache_dir=cache, **columns)})
    elif path.is_dir():
        published = DatasetDict({"train": read_files(files_under(path), path, cache_dir=cache, **columns)})
    elif path.exists():
        published = DatasetDict({"train": read_files([path], path.parent, cache_dir=cache, **columns)})
    else:
        published = read_named(source, cache_dir=cache, **columns)
    published = DatasetDict({split: documents for split, documents in published.items() if len(documents)})
    if not published:
        raise DataError(f"source={str(source)!r} holds no text, and a corpus needs at least one document; add some")
    return published


def bundled_files(part: str) -> list[Path]:
    """Files of the bundled corpus, or of one part of it."""
    if part and part not in BUNDLED_CORPORA:
        raise DataError(unknown_name("source", f"{BUNDLED}/{part}", (f"{BUNDLED}/{name}" for name in BUNDLED_CORPORA)))
    return [BUNDLED_DIR / f"{name}.jsonl.xz" for name in ([part] if part else BUNDLED_CORPORA)]


def files_under(folder: Path) -> list[Path]:
    """Every readable file under a folder, in the order of their paths."""
    found = []
    for root, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = (Path(root, name) for name in names if not name.startswith(".") and name != "README.md")
        found += [path for path in paths if kind_of(path) and path.is_file()]
    if not found:
        raise DataError(
            f"folder {str(folder)!r} holds no file that can be read; those read end in {SUFFIXES}; "
            "rename the files or give another folder"
        )
    return sorted(found)


def kind_of(path: Path) -> str | None:
    """The loader for a file, or None when its suffix is not known."""
    compressed = path.suffix.lower() in COMPRESSIONS
    kind = KIND_OF_SUFFIX.get((path.with_suffix("") if compressed else path).suffix.lower())
    return None if compressed and kind == "parquet" else kind


def read_files(files: Sequence[Path], root: Path, **options: Any) -> Dataset:
    """Read files of any mixture of kinds; `root` is where the ids of text files start."""
    kinds = {file: kind_of(file) for file in files}
    for file, kind in kinds.items():
        if kind is None:
            raise DataError(
                f"file {str(file)!r} has a suffix that is not known; those read end in {SUFFIXES}; "
                "rename a plain text file to end in .txt"
            )
        if file.suffix.lower() == ".zst" and importlib.util.find_spec("zstandard") is None:
            raise DataError(f"file {str(file)!r} needs the package zstandard; pip install zstandard, or decompress it")
    filled = [
        file for file in files if file.stat().st_size > 0
    ]  # the loaders fail on empty files, which hold no document
    texts = [file for file in filled if kinds[file] == "text"]
    # Text files are one row each: all in one call. Others one by one, as their columns may differ from file to file.
    groups = ([texts] if texts else []) + [[file] for file in filled if kinds[file] != "text"]
    parts = [part for group in groups for part in read_group(group, str(kinds[group[0]]), root, **options)]
    return concatenate_datasets(parts) if parts else Dataset.from_dict({"id": [], "text": []}, features=RECORD)


def read_group(files: list[Path], kind: str, root: Path, *, cache_dir: str | None, **columns: str) -> list[Dataset]:
    """Read files of one kind; where that fails, one by one, so that the error names the file."""
    options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    try:
        with quiet_datasets():
            patterns = [glob.escape(os.path.abspath(file)) for file in files]  # the library reads paths as patterns
            rows = load_dataset(kind, data_files=patterns, split="train", cache_dir=cache_dir, **options)
            if kind == "text":
                rows = rows.add_column("id", [file.relative_to(root).as_posix() for file in files])
                columns = {"text_column": "text", "id_column": "id"}
            return [as_documents(rows, origin=f"file {str(files[0])!r}", **columns)]
    except DataError:
        raise
    except Exception as error:  # the loaders raise whatever their parsers and decompressors do
        if len(files) > 1:
            return [part for file in files for part in read_group([file], kind, root, cache_dir=cache_dir, **columns)]
        raise DataError(
            f"file {str(files[0])!r} cannot be read as {kind} ({reason_of(error)}); it must be complete, and text "
            "must be UTF-8: fetch or convert it again"
        ) from error


def read_named(source: str | os.PathLike[str], *, cache_dir: str | None, **columns: str) -> DatasetDict:
    """Read every split of a dataset of the `datasets` library."""
    named = DATASET_NAME.fullmatch(source) if isinstance(source, str) else None
    if named is None or kind_of(Path(str(source))):
        raise DataError(f"no file or folder at {str(source)!r} (working folder {os.getcwd()!r}); check the path")
    try:
        found = load_dataset(named["name"], named["config"], cache_dir=cache_dir)
    except Exception as error:  # network, hub, builder and configuration errors share no base class
        raise DataError(
            f"source={source!r} is no local path, and as a dataset's name it could not be loaded ({reason_of(error)}); "
            "a name must be reachable or already in the cache: check the spelling (name or name:config), load it once "
            f"while online, or give a local file or folder, or {BUNDLED!r}"
        ) from error
    with quiet_datasets():
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
    for index, text in zip(indices, texts, strict=True):
        if text is None:
            raise DataError(
                f"{origin}: row {index} has no string in column {text_column!r}, and each row needs one; "
                "remove the row, or name another column with text_column="
            )
    kept = [(i, text) for i, text in zip(ids, texts, strict=True) if text and not text.isspace()]
    return {"id": [text_id(text) if i is None else str(i) for i, text in kept], "text": [text for _, text in kept]}


def text_id(text: str) -> str:
    """The id of a document that has none of its own."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:24]


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
