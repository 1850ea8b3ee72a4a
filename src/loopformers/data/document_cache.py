"""Documents on disk, memory-mapped: files are read once, and again only when one of them has changed.

NAME.documents holds them, NAME.bytes how many bytes that file must have; the second is written last. Neither suffix is one
of text, so a cache that lies in the folder of a corpus is not read as a part of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset

from loopformers.data.documents import Document, read_documents
from loopformers.data.sources import SourceFile
from loopformers.data.unpack import reading
from loopformers.errors import DataError, LoopformersError
from loopformers.files import write_whole
from loopformers.readers import read_json

__all__ = ["keeping", "load_files"]

CACHE_FORMAT = 1
"""Part of every name: raise it when the same files give other documents."""

BATCH_CHARACTERS = 1 << 23
"""Characters of text that are written together."""

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])

FULL = (errno.ENOSPC, errno.EDQUOT)

CACHE_ERRORS = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def load_files(
    files: Sequence[SourceFile],
    *,
    text_column: str,
    id_column: str | None,
    cache_dir: str | os.PathLike[str] | None,
) -> Dataset:
    """Return the documents of files in their order, as a memory-mapped dataset of `id` and `text`.

    Args:
        files: What to read.
        text_column: See `read_documents`.
        id_column: See `read_documents`.
        cache_dir: Where the documents are kept; None: where `datasets` keeps its own.

    Raises:
        DataError: See `read_documents`; or the documents cannot be kept.
    """
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    path = root / "loopformers-documents" / f"{_name(files, text_column, id_column)}.documents"
    if not _is_complete(path):
        documents = (
            document
            for file in files
            for document in read_documents(file, text_column=text_column, id_column=id_column)
        )
        with keeping(root):
            _write(path, documents)
    return Dataset.from_file(str(path))


def default_cache_dir() -> Path:
    """Where the `datasets` library keeps its files."""
    return Path(datasets.config.HF_DATASETS_CACHE)


@contextmanager
def keeping(root: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of a cache that cannot be written into a DataError that names the cache and not what is read."""
    try:
        yield
    except OSError as error:
        if isinstance(error, LoopformersError):
            raise
        raise cache_error(root, error) from error


def cache_error(root: str | os.PathLike[str], error: OSError) -> DataError:
    """The error for a cache that cannot be written."""
    where = f" at {error.filename!r}" if error.filename is not None else ""
    return DataError(
        f"documents cannot be kept in {os.fspath(root)!r} ({error.strerror or error}{where}); give a writable cache_dir "
        "with space, or set HF_HOME"
    )


def failure_of_cache(error: BaseException | None) -> OSError | None:
    """The error of a full or closed disk that another error wraps, if that is what it comes from."""
    while error is not None:
        # A network may be closed to us as well, but it has no file name.
        if isinstance(error, OSError) and error.errno in (FULL if error.filename is None else CACHE_ERRORS):
            return error
        error = error.__cause__ or error.__context__
    return None


def _name(files: Sequence[SourceFile], text_column: str, id_column: str | None) -> str:
    """A digest of what the documents depend on: which files, and when they were written."""
    key: list[object] = [CACHE_FORMAT, text_column, id_column]
    for file in files:
        with reading(file.path):
            found = file.path.stat()
        key.append([os.path.abspath(file.path), file.name, found.st_size, found.st_mtime_ns, found.st_ino])
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40]


def _is_complete(path: Path) -> bool:
    try:
        return bool(read_json(path.with_suffix(".bytes"), dict)["bytes"] == path.stat().st_size)
    except (LoopformersError, OSError, KeyError):
        return False


def _write(path: Path, documents: Iterable[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with aside.open("wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            for batch in _batches(documents):
                writer.write_batch(batch)
        size = aside.stat().st_size
        os.replace(aside, path)
        write_whole(path.with_suffix(".bytes"), json.dumps({"bytes": size}))
    finally:
        aside.unlink(missing_ok=True)


def _batches(documents: Iterable[Document]) -> Iterator[pa.RecordBatch]:
    ids: list[str] = []
    texts: list[str] = []
    characters = 0
    for document in documents:
        ids.append(document.id)
        texts.append(document.text)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield pa.record_batch([pa.array(ids, pa.string()), pa.array(texts, pa.string())], schema=SCHEMA)
            ids, texts, characters = [], [], 0
    if ids:
        yield pa.record_batch([pa.array(ids, pa.string()), pa.array(texts, pa.string())], schema=SCHEMA)
