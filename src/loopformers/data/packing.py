"""Documents to one stream of token ids, and the stream to windows of equal length without padding.

The stream does not depend on the length of a window, so it is made once for a corpus and a tokenizer, kept on disk and
memory-mapped. Windows are cut from it one after the other; what is shorter than a window at its end is dropped and
counted. On request a window keeps its documents apart (`window_example`).
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import huggingface_hub.constants
import numpy as np
import numpy.typing as npt
from datasets import Dataset
from tokenizers import Tokenizer

from loopformers.data.pieces import PieceCutter
from loopformers.data.tokenizer import plain_backend
from loopformers.errors import ConfigError, DataError
from loopformers.files import write_whole
from loopformers.model.tokenizer import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "DocumentEncoder",
    "PackedTokens",
    "TokenArray",
    "TokenStream",
    "pack_documents",
    "pack_tokens",
    "tokenize_documents",
    "window_example",
]

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

CACHE_FORMAT = 2
"""Part of every fingerprint: raise it when the stream of the same input changes."""

BATCH_CHARACTERS = 1 << 21
"""Characters tokenised together, which bounds memory; a longer document is tokenised in pieces."""

PIECES_TOGETHER = 4
"""Pieces of a long text tokenised together, which uses several cores."""

NO_TARGET = -100
"""transformers' label where nothing is predicted."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The tokens of documents, `<|endoftext|>` after each.

    Attributes:
        tokens: (num_tokens,) ids, memory-mapped read-only; uint16 where the vocabulary fits, else uint32.
        num_documents: Number of documents, which is the number of `<|endoftext|>` added.
        num_characters: Characters (code points) of their texts.
        num_bytes: UTF-8 bytes of their texts.
        eos_token_id: The id that ends each document and stands nowhere else.
        path: Where `tokens` lives on disk.
    """

    tokens: TokenArray
    num_documents: int
    num_characters: int
    num_bytes: int
    eos_token_id: int
    path: Path

    @property
    def num_tokens(self) -> int:
        """Number of tokens, `<|endoftext|>` included."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_stream, (self.path,)  # a worker process maps the file again: pickling the array would copy it


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """A stream cut into windows: a map-style dataset for `transformers.Trainer` and its default collator.

    Item i is `{"input_ids", "labels"}`, two int64 arrays (seq_len,) of the tokens i * seq_len to (i + 1) * seq_len - 1.
    Labels equal the inputs, as in transformers: the model shifts them, so a window has seq_len - 1 targets.

    Args:
        stream: The tokens.
        seq_len: Tokens in a window.
        isolate_documents: Keep the documents of a window apart, see `window_example`.

    Raises:
        ConfigError: `seq_len` is below 2, which leaves no target.
        DataError: The stream is shorter than one window.
    """

    stream: TokenStream
    seq_len: int
    isolate_documents: bool = False

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)
        if self.seq_len > self.stream.num_tokens:
            raise DataError(
                f"seq_len={self.seq_len} is longer than the data: {self.stream.num_documents} document(s) of "
                f"{self.stream.num_tokens} tokens fill no window; give more text or a smaller seq_len"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the stream: windows and dropped tail."""
        return self.stream.num_tokens

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return self.num_tokens // self.seq_len

    @property
    def num_dropped_tokens(self) -> int:
        """Number of tokens at the end of the stream that fill no window."""
        return self.num_tokens % self.seq_len

    @property
    def num_targets(self) -> int:
        """Number of tokens that are predicted: all of each window but its first, or but the first of each document in it."""
        ends = np.count_nonzero(self.windows[:, :-1] == self.stream.eos_token_id) if self.isolate_documents else 0
        return self.num_windows * (self.seq_len - 1) - int(ends)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.stream.num_documents

    @property
    def windows(self) -> TokenArray:
        """(num_windows, seq_len) all windows, a view of the stream."""
        packed = self.stream.tokens[: self.num_windows * self.seq_len]
        return cast(TokenArray, packed.reshape(self.num_windows, self.seq_len))

    @property
    def dropped_tokens(self) -> TokenArray:
        """(num_dropped_tokens,) the tail that fills no window, a view of the stream."""
        return self.stream.tokens[self.num_windows * self.seq_len :]

    def spread(self, count: int) -> list[int]:
        """Return the indices of at most `count` windows, spread evenly from the first to the last."""
        return [int(i) for i in np.linspace(0, len(self) - 1, min(count, len(self))).astype(int)]

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        return window_example(self.windows[index], self.stream.eos_token_id if self.isolate_documents else None)


def window_example(
    window: npt.NDArray[np.integer[Any]], eos_token_id: int | None = None
) -> dict[str, npt.NDArray[np.int64]]:
    """What a model is given of a window: `input_ids` and `labels`, and `position_ids` where documents are kept apart.

    Positions then restart at 0 behind each `eos_token_id`, from which the model's mask is built: no token sees another
    document's. The first token of a document has no target, as nothing that it may see precedes it. A document that the
    window cuts counts from the cut.

    Args:
        window: (seq_len,) ids.
        eos_token_id: The end of a document; None: documents see each other.

    Returns:
        int64 arrays (seq_len,).
    """
    ids = window.astype(np.int64)
    example = {"input_ids": ids, "labels": ids.copy()}
    if eos_token_id is not None:
        begins = np.zeros_like(ids)
        starts = np.flatnonzero(ids[:-1] == eos_token_id) + 1
        begins[starts] = starts
        example["labels"][starts] = NO_TARGET
        example["position_ids"] = np.arange(len(ids)) - np.maximum.accumulate(begins)
    return example


def check_seq_len(seq_len: object) -> None:
    """Raise ConfigError unless a window holds a token and its target."""
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
        raise ConfigError(f"seq_len={seq_len!r} must be a whole number of at least 2: a token and its target")


def pack_documents(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    seq_len: int,
    *,
    isolate_documents: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PackedTokens:
    """Tokenise documents and cut them into windows of `seq_len` tokens, in their order.

    Args:
        documents: Records with `text`.
        tokenizer: A fast tokenizer with an eos token.
        seq_len: Tokens in a window, at least 2.
        isolate_documents: Keep the documents of a window apart, see `window_example`.
        cache_dir: Where the tokens are kept. None: `loopformers/tokens` in the Hugging Face cache (`HF_HOME`).

    Raises:
        ConfigError: `seq_len` is below 2.
        DataError: As in `tokenize_documents`, or fewer tokens than one window.
    """
    return pack_tokens(tokenize_documents(documents, tokenizer, cache_dir=cache_dir), seq_len, isolate_documents)


def pack_tokens(stream: TokenStream, seq_len: int, isolate_documents: bool = False) -> PackedTokens:
    """Cut a stream into windows of `seq_len` tokens: `PackedTokens(stream, seq_len, isolate_documents)`."""
    return PackedTokens(stream, seq_len, isolate_documents)


class DocumentEncoder:
    """Texts to ids, the eos token after each.

    The tokenizer adds nothing, whatever its template says: the eos token after each document is the only addition. A
    special token spelled out in a text is text, so no document can forge its end: where a vocabulary has the spelled out eos
    token among its words, it is encoded character by character.

    Args:
        tokenizer: A fast tokenizer with an eos token; it is left as it is.

    Attributes:
        eos_token_id: The id behind each document.
        dtype: Of the ids: uint16 where the vocabulary fits, else uint32.
        fingerprint: Hexadecimal digest of everything that the ids of a text depend on.

    Raises:
        DataError: A tokenizer without eos token or backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._serialised = plain_backend(tokenizer)
        self._cutter: PieceCutter | None = None
        self.eos_token_id: int = tokenizer.eos_token_id
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.uint32)
        parts: list[Any] = [CACHE_FORMAT, self.eos_token_id, json.loads(self._serialised)]
        self._eos_token = str(tokenizer.eos_token)
        if self.eos_token_id in next(self._ids([self._eos_token])):
            parts.append("character by character")
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cutter": None}  # its pickled form forgets that special tokens are text

    def encode(self, texts: list[str]) -> Iterator[TokenArray]:
        """The ids of each text, (length + 1,); long texts are encoded in pieces, which changes no id.

        Raises:
            DataError: A text too long to encode at once, which this tokenizer allows no cut in; or the tokenizer gives its
                eos token to a text, and to the characters of that token, too.
        """
        short: list[str] = []
        for text in texts:
            if not self._pieces.is_long(text):
                short.append(text)
                continue
            yield from map(self._closed, self._ids(short))
            short = []
            yield self._closed(self._long_ids(text))
        yield from map(self._closed, self._ids(short))

    @property
    def _pieces(self) -> PieceCutter:
        if self._cutter is None:
            backend = Tokenizer.from_str(self._serialised)
            backend.encode_special_tokens = True  # as text, that is
            self._cutter = PieceCutter(backend)
        return self._cutter

    def _ids(self, texts: list[str]) -> Iterator[list[int]]:
        for encoding in self._pieces.backend.encode_batch_fast(texts, add_special_tokens=False) if texts else ():
            yield encoding.ids

    def _long_ids(self, text: str) -> TokenArray:
        pieces = self._pieces.pieces(text)
        parts = []
        while group := list(islice(pieces, PIECES_TOGETHER)):
            parts += [np.array(ids, dtype=self.dtype) for ids in self._ids(group)]
        return cast(TokenArray, np.concatenate(parts))

    def _closed(self, ids: list[int] | TokenArray) -> TokenArray:
        """Return the ids of a document with the end token behind them, and nowhere else."""
        array: TokenArray = np.append(np.asarray(ids, dtype=self.dtype), self.dtype.type(self.eos_token_id))
        if (array[:-1] == self.eos_token_id).any():
            array = np.array([*self._without_eos(array[:-1].tolist()), self.eos_token_id], dtype=self.dtype)
        return array

    def _without_eos(self, ids: list[int]) -> list[int]:
        spelled = [i for ids_of_character in self._ids(list(self._eos_token)) for i in ids_of_character]
        if self.eos_token_id in spelled:
            raise DataError(
                f"the tokenizer encodes words of the text as its eos token ({self.eos_token_id}), so documents would end there; "
                "use a tokenizer whose eos token has no other meaning, such as unknown words"
            )
        return [part for i in ids for part in (spelled if i == self.eos_token_id else [i])]


def tokenize_documents(
    documents: Dataset, tokenizer: PreTrainedTokenizerFast, *, cache_dir: str | os.PathLike[str] | None = None
) -> TokenStream:
    """Tokenise documents into one stream, or open the stream that an earlier call left for the same ones.

    See `DocumentEncoder` for what the tokenizer does.

    Args:
        documents: Records with `text`.
        tokenizer: A fast tokenizer with an eos token; it is left as it is.
        cache_dir: Where the tokens are kept. None: `loopformers/tokens` in the Hugging Face cache (`HF_HOME`).

    Raises:
        DataError: No documents, no column `text`, a tokenizer without eos token or backend, or a cache that cannot be
            written.
    """
    if "text" not in documents.column_names:
        raise DataError(
            f"the documents have the columns {', '.join(documents.column_names)}, and no text; rename the column of "
            "the text, or read them with load_documents(source, text_column=...)"
        )
    if len(documents) == 0:
        raise DataError("there are 0 documents to tokenise, and a stream needs at least one; check the source")
    encoder = DocumentEncoder(tokenizer)
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    path = root / f"{fingerprint(documents, encoder)}.tokens"
    if not is_complete(path):
        try:
            write_stream(path, documents, encoder)
        except OSError as error:
            raise DataError(
                f"tokens cannot be kept in {str(root)!r} ({error}); give a writable cache_dir with space"
            ) from error
    return open_stream(path)


# -- the stream on disk: NAME.bin holds the ids, NAME.tokens what they are; the second is written last ----------
# Neither suffix is one of text, so a cache inside the folder of a corpus is not read as a part of it.


def default_cache_dir() -> Path:
    """Where streams are kept by default: beside what the other Hugging Face libraries keep."""
    return Path(huggingface_hub.constants.HF_HOME) / "loopformers" / "tokens"


def fingerprint(documents: Dataset, encoder: DocumentEncoder) -> str:
    """A digest of everything that the stream depends on."""
    digest = hashlib.sha256(encoder.fingerprint.encode())
    for texts in text_batches(documents):
        for text in texts:
            digest.update(utf8_length(text).to_bytes(8, "big"))  # ("ab", "c") and ("a", "bc") differ
            for part in utf8_parts(text):
                digest.update(part)
    return digest.hexdigest()[:40]


def utf8_parts(text: str) -> Iterator[bytes]:
    """The UTF-8 bytes of a text, a part at a time: a long text would take its size in memory again."""
    for start in range(0, len(text), BATCH_CHARACTERS):
        yield text[start : start + BATCH_CHARACTERS].encode()


def utf8_length(text: str) -> int:
    """Number of UTF-8 bytes of a text."""
    return len(text) if text.isascii() else sum(map(len, utf8_parts(text)))


def text_batches(documents: Dataset) -> Iterator[list[str]]:
    """The texts in order, in batches of about `BATCH_CHARACTERS`."""
    batch, characters = [], 0
    for rows in documents.select_columns("text").iter(batch_size=64):
        for text in rows["text"]:
            batch.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def write_stream(path: Path, documents: Dataset, encoder: DocumentEncoder) -> None:
    """Tokenise into two files aside, then rename them into place; the description last, as it vouches for the ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    num_tokens = num_characters = num_bytes = 0
    try:
        with aside.open("wb") as file:
            for texts in text_batches(documents):
                for text, ids in zip(texts, encoder.encode(texts), strict=True):
                    file.write(ids.data)
                    num_tokens += len(ids)
                    num_characters += len(text)
                    num_bytes += utf8_length(text)
        os.replace(aside, path.with_suffix(".bin"))
        description = {
            "dtype": encoder.dtype.name,
            "num_tokens": num_tokens,
            "num_documents": len(documents),
            "num_characters": num_characters,
            "num_bytes": num_bytes,
            "eos_token_id": encoder.eos_token_id,
        }
        write_whole(path, json.dumps(description))
    finally:
        aside.unlink(missing_ok=True)


def is_complete(path: Path) -> bool:
    """Whether a stream is there, with as many bytes as its description says."""
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        size = path.with_suffix(".bin").stat().st_size
        return bool(size == description["num_tokens"] * np.dtype(description["dtype"]).itemsize)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_stream(path: Path) -> TokenStream:
    """Map a stream from disk."""
    description = json.loads(path.read_text(encoding="utf-8"))
    dtype, num_tokens = np.dtype(description.pop("dtype")), description.pop("num_tokens")
    tokens = np.memmap(path.with_suffix(".bin"), dtype=dtype, mode="r", shape=(num_tokens,))
    return TokenStream(tokens=tokens, path=path, **description)
