"""Windows from documents that are read, tokenised and packed as training needs them.

Every token of every document of an epoch is in one window, in the order that (seed, epoch) gives: shards are shuffled,
then documents within blocks. What fills no window at the end of an epoch opens the first window of the next.

A position is small and exact: where the running block of documents begins, how many of it are used, and the tokens that
wait for a window. Resuming reads at most one block of documents again; it replays no windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from loopformers.data.corpora import no_text
from loopformers.data.packing import BATCH_CHARACTERS, DocumentEncoder, check_seq_len, utf8_length, window_example
from loopformers.data.stream_sources import DocumentStream, ShardReader
from loopformers.errors import CheckpointError, ConfigError, DataError, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["ShardBy", "StreamedWindows"]

ShardBy = Literal["auto", "shard", "document"]

DEFAULT_BLOCK = 4096
"""Documents that are shuffled together."""

REMEMBERED_WINDOWS = 4096
"""Windows back that `state_dict` can go: data loaders fetch ahead of what training has used."""

STATE_FORMAT = 2

Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Position:
    """Where a stream stands, after `num_windows` windows.

    Attributes:
        epoch: The running epoch.
        first_epoch: The epoch that the stream began with.
        block: Blocks of this epoch that are used up.
        taken: Documents of the running block that are tokenised.
        reader: Where the running block begins, as `_Reader.state` says; None: at the start of the epoch.
        waiting: Tokens that wait for a window.
        num_windows: Windows so far, all epochs.
        num_documents: Documents so far, all epochs, those cut or waiting included.
        num_tokens: Their tokens, the end of each included.
        num_bytes: UTF-8 bytes of their texts.
    """

    epoch: int = 0
    first_epoch: int = 0
    block: int = 0
    taken: int = 0
    reader: dict[str, Any] | None = None
    waiting: Ids = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    num_windows: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


class StreamedWindows(torch.utils.data.IterableDataset[dict[str, npt.NDArray[np.int64]]]):
    """Windows of `seq_len` tokens from a stream: an iterable dataset for `transformers.Trainer` and its default collator.

    Ranks share the documents of an epoch such that each is on one rank. By shard: of the epoch's order of shards, rank r
    takes every world_size-th from the r-th on, and reads nothing else. By document: every rank reads all shards in that
    order and keeps every world_size-th document from the r-th on.

    An epoch ends for a rank when its documents are used up. Ranks get unequal parts, so ranks that train together need
    `num_epochs=None`, where each goes on with its next epoch by itself and none waits for another. With a number of
    epochs the tokens that fill no window at the very end are dropped and counted (`num_dropped_tokens`).

    Args:
        documents: What to read.
        tokenizer: A fast tokenizer with an eos token.
        seq_len: Tokens in a window.
        seed: Of the order.
        block_size: Documents that are shuffled together; 0: documents and shards keep their order.
        num_epochs: Passes over the documents; None: without end.
        isolate_documents: Keep the documents of a window apart, see `window_example`.
        rank: Which part of the documents; leave it to the trainer.
        world_size: Of how many parts.
        shard_by: "shard", "document", or "auto": by shard where each rank gets one, else by document.

    Raises:
        ConfigError: An argument out of range, or an unknown `shard_by`.
        DataError: More ranks than shards with `shard_by="shard"`, or a tokenizer without eos token.

    Example:
        >>> from loopformers.data.stream_sources import stream_documents
        >>> from loopformers.data.tokenizer import bundled_tokenizer
        >>> windows = StreamedWindows(stream_documents("bundled/sotu", "train"), bundled_tokenizer(), seq_len=64)
        >>> next(iter(windows))["input_ids"].shape
        (64,)
    """

    def __init__(
        self,
        documents: DocumentStream,
        tokenizer: PreTrainedTokenizerFast,
        seq_len: int,
        *,
        seed: int = 0,
        block_size: int = DEFAULT_BLOCK,
        num_epochs: int | None = None,
        isolate_documents: bool = False,
        rank: int = 0,
        world_size: int = 1,
        shard_by: ShardBy = "auto",
    ) -> None:
        check_seq_len(seq_len)
        for name, value, least in (
            ("seed", seed, 0),
            ("block_size", block_size, 0),
            ("num_epochs", num_epochs, 1),
            ("world_size", world_size, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        if shard_by not in ("auto", "shard", "document"):
            raise ConfigError(unknown_name("shard_by", shard_by, ("auto", "shard", "document")))
        self.documents = documents
        self.encoder = DocumentEncoder(tokenizer)
        self.seq_len = seq_len
        self.seed = seed
        self.block_size = block_size
        self.num_epochs = num_epochs
        self.isolate_documents = isolate_documents
        self.shard_by = shard_by
        self.num_dropped_tokens = 0
        self._start = self._latest = Position()
        self._positions: deque[Position] = deque([self._start], maxlen=REMEMBERED_WINDOWS)
        self.set_rank(rank, world_size)

    def set_rank(self, rank: int, world_size: int) -> None:
        """Choose the part of the documents; a trainer that knows of ranks calls it before the first window.

        Raises:
            ConfigError: A rank that does not exist.
            DataError: More ranks than shards with `shard_by="shard"`.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} of world_size={world_size} does not exist; ranks count from 0")
        self.rank, self.world_size = rank, world_size
        self._rule(world_size)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch's order, as data loaders of accelerate ask; a loaded position wins."""
        if self._start.num_windows == 0 and self._start.reader is None:
            self._start = replace(self._start, epoch=epoch, first_epoch=epoch)

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
        position, self._start = self._start, Position()
        self._positions.clear()
        self._positions.append(position)
        eos_token_id = self.encoder.eos_token_id if self.isolate_documents else None
        for window, reached in self._windows(position):
            self._positions.append(reached)
            yield window_example(window, eos_token_id)

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token, the end of each document included, of the documents so far; None before the first."""
        return self._latest.num_bytes / self._latest.num_tokens if self._latest.num_tokens else None

    # -- the position ------------------------------------------------------------------------------------------

    def state_dict(self, num_windows: int | None = None) -> dict[str, Any]:
        """Where the stream stands, as JSON has it.

        Args:
            num_windows: After how many windows; default: the last one that was taken from the stream. A data loader has
                taken more than training has used.

        Raises:
            DataError: That window was not reached yet, or is too far back.
        """
        reached = [p for p in self._positions if num_windows is None or p.num_windows == num_windows]
        if not reached:
            raise DataError(
                f"num_windows={num_windows} is not among the windows {self._positions[0].num_windows} to "
                f"{self._positions[-1].num_windows} whose positions are remembered; save more often, or without workers"
            )
        position = asdict(reached[-1]) | {"waiting": reached[-1].waiting.tolist()}
        return {"format": STATE_FORMAT, "stream": self._identity(), "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position: the next windows are those of a run that was never interrupted.

        Raises:
            CheckpointError: The position of another stream.
        """
        theirs = state.get("stream")
        if state.get("format") != STATE_FORMAT or not isinstance(theirs, dict):
            raise CheckpointError(
                f"this is no position of a stream, or one of another format than {STATE_FORMAT}; start anew"
            )
        differences = [
            f"{name}={theirs.get(name)!r} there and {value!r} here"
            for name, value in self._identity().items()
            if theirs.get(name) != value
        ]
        if differences:
            raise CheckpointError(
                f"this is the position of another stream ({', '.join(differences)}); continue with the same data, tokenizer, "
                "window and number of ranks, or start anew"
            )
        try:
            position = dict(state["position"])
            position["waiting"] = np.array(position["waiting"], dtype=np.uint32)
            self._start = Position(**position)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"the saved position of this stream is damaged ({error}); start again from the beginning"
            ) from error
        self._positions.clear()
        self._positions.append(self._start)

    def _identity(self) -> dict[str, Any]:
        """What the order of tokens depends on."""
        return {
            "corpus": self.documents.shards.fingerprint,
            "num_shards": self.documents.num_shards,
            "split": self.documents.split,
            "tokenizer": self.encoder.fingerprint[:16],
            "seq_len": self.seq_len,
            "seed": self.seed,
            "block_size": self.block_size,
            "shard_by": self._rule(self.world_size),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    # -- documents to windows ----------------------------------------------------------------------------------

    def _rule(self, parts: int) -> str:
        shards = self.documents.num_shards
        if self.shard_by == "shard" and parts > shards:
            raise DataError(
                f"{self.documents.origin} has {shards} shard(s), too few for {parts} ranks to get one each; use "
                'fewer, cut the data into more files, or let all read everything with shard_by="document"'
            )
        if self.shard_by == "auto":
            return "shard" if parts <= shards else "document"
        return self.shard_by

    def _windows(self, position: Position) -> Iterator[tuple[Ids, Position]]:
        """Windows from a position on, each with the position behind it."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ConfigError(
                f"dataloader_num_workers={worker.num_workers} would each read the whole stream; use 0 (or 1, without "
                "resuming): the tokenizer already uses every core"
            )
        last = None if self.num_epochs is None else position.first_epoch + self.num_epochs
        self.num_dropped_tokens = 0
        while last is None or position.epoch < last:
            reader = _Reader(
                self.documents,
                self._shard_order(position.epoch),
                (self.rank, self.world_size),
                by_document=self._rule(self.world_size) == "document",
                state=position.reader,
            )
            found = position.reader is not None
            texts = iter(reader)
            while block := list(islice(texts, self.block_size or DEFAULT_BLOCK)):
                found = True
                for window, reached in self._block_windows(position, block):
                    position = self._latest = reached
                    if window is not None:
                        yield window, position
                position = replace(position, block=position.block + 1, taken=0, reader=reader.state())
            if not found and reader.blank and self.world_size == 1:
                raise no_text(self.documents.origin)
            if not found:
                raise DataError(
                    f"{self.documents.origin} holds no document for rank {self.rank} of {self.world_size}, and each needs "
                    "one; use fewer ranks, or add documents"
                )
            position = replace(position, epoch=position.epoch + 1, block=0, taken=0, reader=None)
        self.num_dropped_tokens = len(position.waiting)

    def _block_windows(self, position: Position, block: list[str]) -> Iterator[tuple[Ids | None, Position]]:
        """Windows of one block, shuffled; every document also yields (None, position) once it is used."""
        order = np.arange(len(block))
        if self.block_size:
            order = np.random.default_rng([self.seed, position.epoch, self.rank, position.block]).permutation(
                len(block)
            )
        for texts in _batches(block[index] for index in order[position.taken :]):
            for text, ids in zip(texts, self.encoder.encode(texts), strict=True):
                waiting: Ids = np.concatenate([position.waiting, ids]) if len(position.waiting) else ids
                position = replace(
                    position,
                    taken=position.taken + 1,
                    num_documents=position.num_documents + 1,
                    num_tokens=position.num_tokens + len(ids),
                    num_bytes=position.num_bytes + utf8_length(text),
                )
                while len(waiting) >= self.seq_len:
                    window, waiting = waiting[: self.seq_len], waiting[self.seq_len :]
                    position = replace(position, waiting=waiting, num_windows=position.num_windows + 1)
                    yield window, position
                position = replace(position, waiting=waiting)
                yield None, position

    def _shard_order(self, epoch: int) -> list[int]:
        """The epoch's order of all shards, the same for every rank."""
        shards = self.documents.num_shards
        return (
            np.random.default_rng([self.seed, epoch]).permutation(shards).tolist()
            if self.block_size
            else [*range(shards)]
        )


class _Reader:
    """The texts of one part in one epoch, and where it stands between two of them."""

    def __init__(
        self,
        documents: DocumentStream,
        order: list[int],
        part: tuple[int, int],
        *,
        by_document: bool,
        state: dict[str, Any] | None,
    ) -> None:
        self.documents = documents
        self.index, self.parts = part
        self.by_document = by_document
        self.order = order if by_document else order[self.index :: self.parts]
        state = state or {"shard": 0, "rows": None, "read": 0}
        self.shard, self.read = state["shard"], state["read"]
        self.rows_state = state["rows"]
        self.rows: ShardReader | None = None
        self.blank = True

    def state(self) -> dict[str, Any]:
        """The shard, the position in it, and the documents of this split that were read so far, all parts."""
        rows = self.rows_state if self.rows is None else self.rows.state()
        return {"shard": self.shard, "rows": rows, "read": self.read}

    def __iter__(self) -> Iterator[str]:
        while self.shard < len(self.order):
            self.rows = self.documents.shards.reader(self.order[self.shard], self.rows_state)
            for document_id, text in self.rows:
                self.blank = False
                if not self.documents.holds(document_id, text):
                    continue
                self.read += 1
                if not self.by_document or (self.read - 1) % self.parts == self.index:
                    yield text
            self.shard += 1
            self.rows, self.rows_state = None, None


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in batches that are tokenised together; small ones, as what a resumed run tokenises again is lost time."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS // 8:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
