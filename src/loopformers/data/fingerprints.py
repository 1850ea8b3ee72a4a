"""Whether a corpus is the one that a run began with: a digest of what its sources hold, cheap for any size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from loopformers.data.sources import SourceFile, find_files
from loopformers.data.unpack import reading, regular_size

__all__ = ["RULES", "corpus_fingerprint", "files_fingerprint"]

RULES = 1
"""Part of every fingerprint: raise it when the same files give other documents or other splits."""

WHOLE_BYTES = 1 << 20
"""Files up to this size are hashed whole."""

NUM_BLOCKS = 16
BLOCK_BYTES = 1 << 14


def corpus_fingerprint(
    sources: Sequence[str | os.PathLike[str]], *, text_column: str = "text", id_column: str | None = "id"
) -> str:
    """Return a digest of the text that sources hold; equal for equal content, loaded or streamed.

    It depends on the order of the sources, the names of their files, their sizes and contents, the two columns and this
    package's rules of reading and splitting; not on times, nor on where a folder lies. Files up to 1 MiB are hashed
    whole, larger ones by their size and 16 blocks of 16 KiB that are spread from their beginning to their end, so a
    change in place between these blocks is not seen. Of a named dataset it knows the name only: published datasets
    change by their revision, which `datasets` keeps in its cache.

    Args:
        sources: As in `load_documents`.
        text_column: Where rows keep their text.
        id_column: Where rows keep their id; None: nowhere.

    Returns:
        40 hexadecimal digits.

    Raises:
        DataError: A file or folder is missing or unreadable.
    """
    parts: list[object] = []
    for source in sources:
        files = find_files(source)
        if files is None:
            parts += ["name", source]
        else:
            parts += ["files", files_fingerprint(files, text_column=text_column, id_column=id_column)]
    return _digest(RULES, text_column, id_column, *parts)


def files_fingerprint(files: Sequence[SourceFile], *, text_column: str, id_column: str | None) -> str:
    """Return the digest of files, in their order; see `corpus_fingerprint`."""
    digests = [(file.name, *file_digest(file)) for file in files]
    return _digest(RULES, text_column, id_column, *(part for digest in digests for part in digest))


def _digest(*values: object) -> str:
    digest = hashlib.sha256()
    for value in values:
        encoded = str(value).encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:40]


def file_digest(file: SourceFile) -> tuple[int, str]:
    """Size of a file in bytes, and a digest of it whole or of blocks spread over it."""
    size = regular_size(file.path)
    with reading(file.path), file.path.open("rb") as opened:
        if size <= WHOLE_BYTES:
            return size, hashlib.sha256(opened.read()).hexdigest()
        digest = hashlib.sha256()
        for block in range(NUM_BLOCKS):
            opened.seek((size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
            digest.update(opened.read(BLOCK_BYTES))
        return size, digest.hexdigest()
