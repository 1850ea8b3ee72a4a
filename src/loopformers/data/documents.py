"""The one reader of documents: what a load keeps and a stream passes on comes from here, and so do their errors.

A document is an id and a text. A text file is one document; each row of another file is one, unless its text is empty or
white space only. Files are read piece by piece: memory holds one document, or a small batch of rows.
"""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from loopformers.data.json_values import read_json_values
from loopformers.data.sources import SourceFile
from loopformers.data.unpack import not_utf8, open_unpacked, reading, regular_size
from loopformers.errors import DataError

__all__ = ["MAX_DOCUMENT_BYTES", "Document", "document_of", "no_column", "read_documents", "text_id"]

MAX_DOCUMENT_BYTES = 1 << 30
"""Bytes of the largest document, and of the largest line of JSON."""

CHUNK_BYTES = 1 << 20

BATCH_ROWS = 64
"""Rows that are decoded together."""


class Document(NamedTuple):
    """A document, and how far its file is read with it.

    Attributes:
        id: What its row, or its file's name, says; else a digest of its text.
        text: Never empty.
        rows_read: Rows of its file up to it, those without text included.
    """

    id: str
    text: str
    rows_read: int


def read_documents(
    file: SourceFile, *, text_column: str = "text", id_column: str | None = "id", skip_rows: int = 0
) -> Iterator[Document]:
    """Read the documents of a file in their order.

    Args:
        file: What to read.
        text_column: Where rows keep their text.
        id_column: Where rows keep their id; None: nowhere.
        skip_rows: Rows at the beginning that were read before, as `Document.rows_read` counts them.

    Raises:
        DataError: The file is missing, unreadable, damaged, not UTF-8 or too large, or a row has no string where its text
            should be. Names the file, and the line or row.
    """
    if regular_size(file.path) == 0:
        return  # whatever its kind would need at least: an empty shard holds no document
    if file.kind == "text":
        if skip_rows == 0 and (whole := _read_text(file)) is not None:
            yield Document(file.name, whole, 1)
        return
    rows = _json_rows if file.kind == "json" else _arrow_rows
    for rows_read, where, text, given_id in rows(file, text_column, id_column, skip_rows):
        found = document_of(text, given_id, where, text_column)
        if found is not None:
            yield Document(*found, rows_read)


def document_of(text: object, given_id: object, where: str, text_column: str) -> tuple[str, str] | None:
    """The id and the text of a row, or None where it holds no text.

    Args:
        text: What the row's text column holds.
        given_id: What its id column holds; None: no id.
        where: File and line, for errors.
        text_column: Name of the column.

    Raises:
        DataError: The text is missing, is not a string, or cannot be written as UTF-8.
    """
    if not isinstance(text, str):
        held = "no string" if text is None else f"a value of type {type(text).__name__}"
        raise DataError(
            f"{where} has {held} in column {text_column!r}, but text must be a string; remove the row, or name another "
            "column with text_column="
        )
    if not text or text.isspace():
        return None
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} holds half of a surrogate pair in column {text_column!r} (character {error.start}), which is no "
                "text; correct or remove the row"
            ) from error
    return (text_id(text) if given_id is None else str(given_id).encode("utf-8", "backslashreplace").decode()), text


def text_id(text: str) -> str:
    """The id of a document that has none of its own."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:24]


# -- text ------------------------------------------------------------------------------------------------------


def _read_text(file: SourceFile) -> str | None:
    """The text of a file without its byte-order mark, lines ending in a newline alone; None where it is blank."""
    with open_unpacked(file.path) as opened, reading(file.path):
        text = "".join(_decoded(file, opened))
    return text if text and not text.isspace() else None


def _decoded(file: SourceFile, opened: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    size, line, last = 0, 1, False
    while not last:
        chunk = opened.read(CHUNK_BYTES)
        size, last = size + len(chunk), not chunk
        if size > MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{file} holds a document of more than {MAX_DOCUMENT_BYTES:,} bytes, the most that one may have; cut it "
                "into several files, or write its parts as rows of JSON Lines"
            )
        try:
            yield newlines.decode(decoder.decode(chunk, last), last)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise not_utf8(f"{file}, line {line},", error) from error
        line += chunk.count(b"\n")


# -- rows ------------------------------------------------------------------------------------------------------

Rows = Iterator[tuple[int, str, object, object]]
"""Rows read so far, where the last one is, its text and its id."""


def _json_rows(file: SourceFile, text_column: str, id_column: str | None, skip_rows: int) -> Rows:
    with open_unpacked(file.path) as opened, reading(file.path):
        values = read_json_values(opened, str(file), max_bytes=MAX_DOCUMENT_BYTES, skip=skip_rows)
        for count, value in enumerate(values, start=skip_rows + 1):
            where = f"{file}, line {value.line},"
            if isinstance(value.value, str):
                yield count, where, value.value, None
                continue
            if not isinstance(value.value, dict):
                raise DataError(
                    f"{where} holds {type(value.value).__name__}, and each row must be an object with a text"
                )
            if text_column not in value.value:
                raise no_column(where, text_column, value.value)
            given_id = None if id_column is None else value.value.get(id_column)
            yield count, where, value.value[text_column], given_id


def no_column(where: str, text_column: str, columns: Iterable[object]) -> DataError:
    """The error for rows without the column of their text."""
    return DataError(
        f"{where} has no column {text_column!r}, where the text should be; its columns are "
        f"{', '.join(map(str, columns))}: name one with text_column="
    )


def _arrow_rows(file: SourceFile, text_column: str, id_column: str | None, skip_rows: int) -> Rows:
    with reading(file.path):
        batches = _parquet_batches if file.kind == "parquet" else _ipc_batches
        for start, batch in batches(file, text_column, id_column, skip_rows):
            done = max(0, skip_rows - start)
            part = batch.slice(done)
            names = part.schema.names
            texts = _pylist(file, part, text_column)
            ids = _pylist(file, part, id_column) if id_column in names else [None] * len(texts)
            for row, (text, given_id) in enumerate(zip(texts, ids, strict=True), start=start + done):
                yield row + 1, f"{file}, row {row},", text, given_id


def _pylist(file: SourceFile, batch: pa.RecordBatch, column: str | None) -> list[Any]:
    try:
        return list(batch.column(batch.schema.names.index(column)).to_pylist())
    except UnicodeDecodeError as error:
        raise not_utf8(f"{file}, column {column!r},", error) from error


def _parquet_batches(
    file: SourceFile, text_column: str, id_column: str | None, skip_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches with the number of their first row; row groups that were read before are not touched."""
    with pq.ParquetFile(file.path) as table:
        columns = _columns(file, table.schema_arrow, text_column, id_column)
        start = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if start + rows > skip_rows:
                first = start
                for batch in table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns):
                    if first + len(batch) > skip_rows:
                        yield first, batch
                    first += len(batch)
            start += rows


def _ipc_batches(
    file: SourceFile, text_column: str, id_column: str | None, skip_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of an Arrow file, in either of its two forms."""
    with pa.memory_map(str(file.path)) as mapped:
        if bytes(mapped.read(6)) == b"ARROW1":
            table = pa.ipc.open_file(mapped)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            mapped.seek(0)
            table = pa.ipc.open_stream(mapped)
            batches = iter(table)
        columns = _columns(file, table.schema, text_column, id_column)
        start = 0
        for whole in batches:
            batch = whole.select(columns)
            batch.validate(full=True)  # offsets of a damaged file point anywhere in memory
            for offset in range(0, len(batch), BATCH_ROWS):
                part = batch.slice(offset, BATCH_ROWS)
                if start + len(part) > skip_rows:
                    yield start, part
                start += len(part)


def _columns(file: SourceFile, schema: pa.Schema, text_column: str, id_column: str | None) -> list[str]:
    """The columns to read, once it is clear that the text is a string."""
    if text_column not in schema.names:
        raise no_column(str(file), text_column, schema.names)
    kind = schema.field(text_column).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)):
        raise DataError(
            f"{file}: column {text_column!r} is of type {kind}, and text must be strings; name another column with "
            "text_column=, or convert it"
        )
    if id_column is None or id_column == text_column or id_column not in schema.names:
        return [text_column]
    return [text_column, id_column]
