"""The text of a run, or the rows of its task: tokenizer, training and validation windows, and the unigram level."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from loopformers.data.corpora import load_splits
from loopformers.data.packing import PackedTokens, pack_documents
from loopformers.data.statistics import bytes_per_token, unigram_cross_entropy
from loopformers.data.stream_sources import STREAMED_CORPORA, stream_documents
from loopformers.data.streaming import StreamedWindows
from loopformers.data.synthetic.rows import GeneratedRows, held_out_rows
from loopformers.data.synthetic.tokenizer import task_tokenizer
from loopformers.data.tokenizer import bundled_tokenizer, run_tokenizer
from loopformers.errors import CheckpointError, DataError
from loopformers.model.tokenizer import open_tokenizer
from loopformers.training.recipe import BUNDLED, DataRecipe, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from loopformers.data.synthetic.contract import Task

__all__ = [
    "RunText",
    "load_tokenizer",
    "make_rows",
    "packed_text",
    "read_stream",
    "read_text",
    "read_windows",
    "recipe_tokenizer",
]

UNIGRAM_WINDOWS = 2048
"""Windows of a stream whose token frequencies the unigram level is taken from."""


def recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a recipe's text, or of its task.

    Raises:
        DataError: See `load_tokenizer`.
    """
    return load_tokenizer(recipe.data) if recipe.task is None else task_tokenizer(recipe.task)


def load_tokenizer(data: DataRecipe) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a recipe's text, as `run_tokenizer` makes it.

    Raises:
        DataError: There is none of that name, it is damaged or needs code of its own, or it has no end token.
    """
    if data.tokenizer == BUNDLED:
        return bundled_tokenizer()
    remedy = f"give {BUNDLED!r}, the folder of a tokenizer, or a name that is reachable or in the cache"
    try:
        opened = open_tokenizer(data.tokenizer, remedy=remedy)
    except CheckpointError as error:
        raise DataError(f"data.tokenizer={data.tokenizer!r} could not be loaded: {error}") from error
    return run_tokenizer(opened)


@dataclass(frozen=True, slots=True)
class RunText:
    """The text of a run: see the fields of the same names in `PreparedRun`."""

    train: PackedTokens | StreamedWindows | GeneratedRows
    validation: list[dict[str, Any]]
    unigram_loss: float
    bytes_per_token: float | None


def read_text(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> RunText:
    """Tokenise all text before training; validation windows are spread evenly over their split.

    Raises:
        DataError: Text is missing, empty, or too short for a window or a batch.
    """
    train, held_out = read_windows(recipe.data, tokenizer)
    if len(train) < recipe.training.batch_size:
        raise DataError(
            f"training.batch_size={recipe.training.batch_size} is more than the {len(train)} windows of data.seq_len="
            f"{recipe.data.seq_len} that the training split holds; give more text, shorter windows or a smaller batch"
        )
    return packed_text(train, held_out, recipe.evaluation.windows, vocab_size)


def packed_text(train: PackedTokens, held_out: PackedTokens, num_windows: int, vocab_size: int) -> RunText:
    """Return text of which `num_windows` held-out windows are scored, spread evenly over their split."""
    rows = held_out.spread(num_windows)
    targets = held_out.windows[rows][:, 1:].ravel()
    return RunText(
        train=train,
        validation=[held_out[row] for row in rows],
        unigram_loss=unigram_cross_entropy(train.stream.tokens, targets, vocab_size),
        bytes_per_token=bytes_per_token(held_out),
    )


def read_stream(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> RunText:
    """Open a stream for training, and read as many validation windows as are scored, in the stream's order.

    The unigram level rests on the token frequencies of as many training windows as `UNIGRAM_WINDOWS`.

    Raises:
        DataError: The source is missing, unreachable or unreadable, or a split fills no window.
    """
    data = recipe.data

    def windows(split: str, num_epochs: int | None, *, isolate_documents: bool = False) -> StreamedWindows:
        documents = stream_documents(
            data.sources[0],
            split,
            text_column=None if data.sources[0] in STREAMED_CORPORA else data.text_column,
            id_column=None if data.sources[0] in STREAMED_CORPORA else data.id_column,
            fractions=data.fractions,
            seed=data.split_seed,
            split_by="id" if data.split_by == "id" else "document",
            cache_dir=data.cache_dir,
        )
        seed = recipe.training.seed
        return StreamedWindows(
            documents, tokenizer, data.seq_len, seed=seed, num_epochs=num_epochs, isolate_documents=isolate_documents
        )

    validation = windows("validation", 1)
    held_out = list(itertools.islice(validation, recipe.evaluation.windows))
    sample = list(itertools.islice(windows("train", 1), UNIGRAM_WINDOWS))
    if not held_out or not sample:
        raise DataError(
            f"data.sources={list(data.sources)} fills no window of data.seq_len={data.seq_len} in its "
            f"{'validation' if sample else 'training'} split; give more text or shorter windows"
        )
    targets = np.concatenate([window["input_ids"][1:] for window in held_out])
    seen = np.concatenate([window["input_ids"] for window in sample])
    return RunText(
        train=windows("train", None, isolate_documents=data.isolate_documents),
        validation=held_out,
        unigram_loss=unigram_cross_entropy(seen, targets, vocab_size),
        bytes_per_token=validation.bytes_per_token,
    )


def make_rows(recipe: Recipe, task: Task, vocab_size: int) -> RunText:
    """Return a task's rows in place of text; the unigram level rests on the answers of `UNIGRAM_WINDOWS` training rows."""
    training = recipe.training
    train = GeneratedRows(task, seed=training.seed, num_rows=training.steps * training.batch_size)
    held_out = held_out_rows(task, recipe.evaluation.windows)
    seen = np.concatenate([train[i]["labels"] for i in range(min(UNIGRAM_WINDOWS, len(train)))])
    seen, asked = (labels[labels >= 0].astype(np.uint32) for labels in (seen, held_out.labels))
    return RunText(
        train=train,
        validation=[held_out.row(i) for i in range(len(held_out))],
        unigram_loss=unigram_cross_entropy(seen, asked, vocab_size),
        bytes_per_token=None,
    )


def read_windows(data: DataRecipe, tokenizer: PreTrainedTokenizerFast) -> tuple[PackedTokens, PackedTokens]:
    """Return the training and the validation windows of all sources together."""
    parts = [
        load_splits(
            source,
            fractions=data.fractions,
            seed=data.split_seed,
            split_by=data.split_by,
            text_column=data.text_column,
            id_column=data.id_column,
            cache_dir=data.cache_dir,
        )
        for source in data.sources
    ]
    train, held_out = (
        pack_documents(
            parts[0][split] if len(parts) == 1 else datasets.concatenate_datasets([part[split] for part in parts]),
            tokenizer,
            data.seq_len,
            cache_dir=data.cache_dir,
            isolate_documents=data.isolate_documents and split == "train",
        )
        for split in ("train", "validation")
    )
    return train, held_out
