"""Perplexity by the standard protocol: one stream of tokens, strided windows, each token predicted once.

A window holds `context` tokens and the next one begins `stride` tokens later; of each window the last `stride` tokens are
targets and what stands before them is context alone. Of the first window all but the first token are targets: nothing
precedes that one. This is the sliding window that transformers' guide to perplexity describes, with one difference: the
guide weighs the mean of each window after the first by one target too few, and here every target weighs the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformers.data.documents import read_documents as read_file
from loopformers.data.sources import COMPRESSIONS, SourceFile, kind_of
from loopformers.errors import ConfigError, DataError, check_count
from loopformers.evaluation.models import is_looped
from loopformers.evaluation.scoring import OnBatch, Tally, score_outside, score_runs
from loopformers.evaluation.text import WHOLE, read_documents
from loopformers.model.tokenizer import encode_prompt, framing
from loopformers.objectives.cross_entropy import IGNORE
from loopformers.schedule import Schedule

__all__ = [
    "WIKITEXT",
    "PerplexityResult",
    "Stream",
    "context_length",
    "evaluate_perplexity",
    "read_stream",
    "strided_windows",
    "tokenize_stream",
]

WIKITEXT = "wikitext-2"
"""The default text: the test split of raw WikiText-2, its rows joined by empty lines."""

WIKITEXT_DATASET = ("Salesforce/wikitext", "wikitext-2-raw-v1")

WIKITEXT_FILE = "wikitext-2-raw-v1/test-00000-of-00001.parquet"

BETWEEN = "\n\n"
"""What rows and documents are joined by."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One text.

    Attributes:
        source: Where it is from.
        text: All of it.
    """

    source: str
    text: str

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of its SHA-256, which two results must share to be compared."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult:
    """What a model scores on a stream along one run."""

    num_loops: int | None
    """M, loops run; None for models without loops."""
    schedule: str | None
    """Step sizes as fractions."""
    loss: float
    """Nats per target token."""
    token_perplexity: float
    """exp(loss): compares models of one tokenizer."""
    byte_perplexity: float
    """exp(nats / bytes): compares any."""
    bits_per_byte: float
    """nats / (ln 2 x bytes)."""
    accuracy: float
    """Share of targets that were the most likely token."""
    num_targets: int
    """Tokens predicted."""
    num_bytes: int
    """UTF-8 bytes of their text."""
    flops_per_token: float | None
    """Operations of a forward per token of a window; None for models without loops."""


# -- the text ----------------------------------------------------------------------------------------------------


def read_stream(source: str, split: str | None = None) -> Stream:
    """Read a text whole.

    Args:
        source: `wikitext-2`; any text file; a Parquet file, whose rows are joined by empty lines as WikiText-2's are; or
            what `loopformers.data.corpora.load_documents` reads, its documents joined likewise.
        split: Of a source that is no file: train, validation, test or all; default: test of the bundled corpus and of
            named datasets, all of a folder.

    Raises:
        DataError: The text is missing, unreadable or empty.
    """
    path = Path(source)
    if source == WIKITEXT and not path.exists():
        text = BETWEEN.join(_wikitext_rows())
    elif path.is_file() and path.suffix == ".parquet":
        text = BETWEEN.join(_parquet_rows(path))
    elif path.is_file() and kind_of(path) in (None, "text") and path.suffix not in COMPRESSIONS:
        text = "".join(document.text for document in read_file(SourceFile(path, path.name, "text")))
    else:
        chosen = split or (WHOLE if path.exists() else "test")
        text = BETWEEN.join(read_documents(source, chosen)["text"])
    if not text.strip():
        raise DataError(f"{source} holds no text, and a perplexity needs some; give another file")
    return Stream(source, text)


def _wikitext_rows() -> list[str]:
    from datasets import load_dataset

    from loopformers.data.corpora import quiet_datasets, reason_of

    try:
        with quiet_datasets():
            return list(load_dataset(*WIKITEXT_DATASET, split="test")["text"])
    except Exception as error:  # network, hub, builder and configuration errors share no base class
        raise DataError(
            f"raw WikiText-2 is neither in the cache nor reachable ({reason_of(error)}); load the dataset "
            f"{':'.join(WIKITEXT_DATASET)} once while online, or give its file {WIKITEXT_FILE}, or any text file, with --data"
        ) from error


def _parquet_rows(path: Path) -> list[str]:
    from datasets import Dataset

    from loopformers.data.corpora import quiet_datasets, reason_of

    try:
        with quiet_datasets():
            table = Dataset.from_parquet(str(path))
    except Exception as error:  # the library raises whatever its parsers do
        raise DataError(f"{path} cannot be read as parquet ({reason_of(error)}); fetch it again") from error
    if "text" not in table.column_names:
        raise DataError(
            f"{path} has the columns {', '.join(table.column_names)}, and no text; rename the one that holds it"
        )
    return [row or "" for row in table["text"]]


# -- tokens and windows ------------------------------------------------------------------------------------------


def tokenize_stream(text: str, tokenizer: Any) -> tuple[Tensor, int]:
    """Tokenise a text as one stream, begun as the tokenizer begins texts, and not closed by an end token.

    Returns:
        Ids, (tokens,), and the UTF-8 bytes of the text of all but the first, which is never a target.

    Raises:
        DataError: Fewer than two tokens.
    """
    begin, _ = framing(tokenizer)
    ids = encode_prompt(tokenizer, text, begin=())
    num_bytes = len(text.encode())
    if begin:
        ids = [*begin, *ids]
    elif ids:
        num_bytes -= len(tokenizer.decode(ids[:1], clean_up_tokenization_spaces=False).encode())
    if len(ids) < 2:
        raise DataError(f"a text of {len(ids)} token(s) leaves nothing to predict; give a longer one")
    return torch.tensor(ids), num_bytes


def strided_windows(
    ids: Tensor, *, context: int, stride: int, start_token: int | None = None
) -> list[dict[str, Tensor]]:
    """Cut a stream into overlapping windows in which each token but the first is a target once.

    Args:
        ids: The stream, (tokens,).
        context: Tokens of a window; the last may be shorter.
        stride: Tokens from one window's start to the next's, at most `context` - 1, so that every target has a context.
        start_token: Never a target, wherever it stands.

    Returns:
        Records of `input_ids` and unshifted `labels`, (seq,) each, -100 where there is no target.

    Raises:
        ConfigError: A context below 2, or a stride that is not between 1 and `context` - 1.
    """
    if context < 2:
        raise ConfigError(f"a context of {context} tokens leaves nothing to predict from; give at least 2")
    if not 1 <= stride < context:
        raise ConfigError(
            f"a stride of {stride} in a context of {context}: tokens at the start of a window would have no context; give a "
            f"stride from 1 to {context - 1}"
        )
    windows = []
    scored_to = 1  # the first token of the stream has no context
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = ids[begin:end]
        labels = window.clone()
        labels[: scored_to - begin] = IGNORE
        if start_token is not None:
            labels[window == start_token] = IGNORE
        windows.append({"input_ids": window, "labels": labels})
        scored_to = end
        if end == len(ids):
            break
    return windows


def context_length(model: Any, context: int | None) -> int:
    """Return the tokens of a window: those asked for, or the model's own length.

    Raises:
        ConfigError: More than the model has positions.
    """
    config = model.config
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if context is None:
        if length is None:
            raise ConfigError("this model does not say how long its texts may be; give --context")
        return int(length)
    check_count("context", context, at_least=2)
    may_exceed = is_looped(model) and config.position_embedding == "rotary"
    if length is not None and context > length and not may_exceed:
        raise ConfigError(
            f"a context of {context} tokens is more than the {length} positions of this model; give fewer"
        )
    return context


# -- scores ------------------------------------------------------------------------------------------------------


def evaluate_perplexity(
    model: Any,
    windows: Sequence[Mapping[str, Any]],
    num_bytes: int,
    *,
    runs: Sequence[Schedule] | None = None,
    batch_size: int = 1,
    on_batch: OnBatch | None = None,
) -> list[PerplexityResult]:
    """Score the windows of a stream. Windows of unequal length are never put together, so nothing is padded.

    Args:
        model: One of ours, or any causal language model of transformers.
        windows: See `strided_windows`.
        num_bytes: UTF-8 bytes of the targets' text, see `tokenize_stream`.
        runs: Schedules to run a looped model along; default: the trained one. Others have no such choice.
        batch_size: Windows a forward.
        on_batch: Called after each batch.

    Returns:
        One result a run, in order.

    Raises:
        ConfigError: Runs of a model without loops, or a batch size below 1.
    """
    if not is_looped(model):
        if runs is not None:
            raise ConfigError("a model without loops has one budget; leave --num-loops and --schedule out")
        return [_result(None, score_outside(model, windows, batch_size=batch_size, on_batch=on_batch), num_bytes, None)]
    chosen = [model.config.resolve_schedule()] if runs is None else list(runs)
    tallies = score_runs(model, windows, chosen, batch_size=batch_size, on_batch=on_batch)
    results = []
    for run, tally in zip(chosen, tallies, strict=True):

        def flops(length: int, run: Schedule = run) -> float:
            return float(model.config.flops_per_token(schedule=run, seq_len=length))

        results.append(_result(run, tally, num_bytes, tally.flops_per_token(flops)))
    return results


def _result(run: Schedule | None, tally: Tally, num_bytes: int, flops: float | None) -> PerplexityResult:
    nats_per_byte = tally.nats / num_bytes
    return PerplexityResult(
        num_loops=None if run is None else run.num_loops,
        schedule=None if run is None else str(run),
        loss=tally.loss,
        token_perplexity=tally.perplexity,
        byte_perplexity=math.exp(nats_per_byte) if nats_per_byte < 700 else math.inf,
        bits_per_byte=nats_per_byte / math.log(2),
        accuracy=tally.accuracy,
        num_targets=tally.num_targets,
        num_bytes=num_bytes,
        flops_per_token=flops,
    )
