"""What a loss is judged against, and what a corpus holds.

The counts of the bundled corpus in its README are printed by

    python -m loopformers.data.statistics bundled
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loopformers.boundary import run_command
from loopformers.data.packing import PackedTokens, TokenArray, TokenStream, check_seq_len
from loopformers.errors import DataError

__all__ = [
    "SplitCounts",
    "bits_per_byte",
    "bytes_per_token",
    "count_splits",
    "split_table",
    "token_counts",
    "unigram_cross_entropy",
]

CHUNK_TOKENS = 1 << 22
"""Tokens counted together: counting converts to 8 bytes a token, and a stream may be larger than memory."""


def unigram_cross_entropy(train_tokens: TokenArray, eval_tokens: TokenArray, vocab_size: int) -> float:
    """Cross entropy of token frequencies: the level at which a model sits that ignores its context.

    With counts c(x) over N training tokens and a vocabulary of V, p(x) = (c(x) + 1) / (N + V) (add-one smoothing), and
    the result is -log p(x), averaged over the evaluation tokens.

    Args:
        train_tokens: (n,) ids that are counted.
        eval_tokens: (m,) ids that are predicted.
        vocab_size: V.

    Returns:
        Nats per token.

    Raises:
        DataError: No evaluation tokens, or an id that is not below `vocab_size`.
    """
    if len(eval_tokens) == 0:
        raise DataError("there are 0 evaluation tokens, and a mean needs at least one; give more text")
    train = token_counts(train_tokens, vocab_size)
    log_probabilities = np.log(train + 1) - math.log(int(train.sum()) + vocab_size)
    return float(-(token_counts(eval_tokens, vocab_size) @ log_probabilities) / len(eval_tokens))


def token_counts(tokens: TokenArray, vocab_size: int) -> npt.NDArray[np.int64]:
    """Count each id of a stream.

    Args:
        tokens: (n,) ids.
        vocab_size: V.

    Returns:
        (vocab_size,) counts.

    Raises:
        DataError: An id is not below `vocab_size`.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.bincount(tokens[start : start + CHUNK_TOKENS], minlength=vocab_size)
        if len(chunk) > vocab_size:
            raise DataError(
                f"token id {len(chunk) - 1} does not exist in a vocabulary of vocab_size={vocab_size}; "
                "give the vocab_size of the tokenizer that made the tokens"
            )
        counts += chunk
    return counts


def bytes_per_token(tokens: TokenStream | PackedTokens) -> float:
    """UTF-8 bytes of text per token of its stream; the token that ends a document counts, with 0 bytes."""
    stream = tokens.stream if isinstance(tokens, PackedTokens) else tokens
    return stream.num_bytes / stream.num_tokens


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert a loss in nats per token to bits per byte of text, which tokenizers do not change."""
    return nats_per_token / (math.log(2) * bytes_per_token)


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """What one split holds.

    Attributes:
        split: Its name.
        documents: Documents.
        characters: Characters (code points) of their texts.
        bytes: UTF-8 bytes of their texts.
        tokens: Tokens, the end of each document included.
        bytes_per_token: Their quotient.
        windows: Whole windows, without padding.
        dropped_tokens: Tokens behind the last window.
        unigram_nats: Cross entropy of token frequencies of the train split on this one, in nats per token.
    """

    split: str
    documents: int
    characters: int
    bytes: int
    tokens: int
    bytes_per_token: float
    windows: int
    dropped_tokens: int
    unigram_nats: float


def count_splits(streams: Mapping[str, TokenStream], vocab_size: int, seq_len: int) -> list[SplitCounts]:
    """Count what each split holds; exact, and a split shorter than one window has none.

    Args:
        streams: Splits by name, `train` among them.
        vocab_size: Size of the vocabulary that made the tokens.
        seq_len: Tokens in a window.

    Raises:
        ConfigError: `seq_len` is below 2.
        DataError: See `unigram_cross_entropy`.
    """
    check_seq_len(seq_len)
    return [
        SplitCounts(
            split=name,
            documents=stream.num_documents,
            characters=stream.num_characters,
            bytes=stream.num_bytes,
            tokens=stream.num_tokens,
            bytes_per_token=bytes_per_token(stream),
            windows=stream.num_tokens // seq_len,
            dropped_tokens=stream.num_tokens % seq_len,
            unigram_nats=unigram_cross_entropy(streams["train"].tokens, stream.tokens, vocab_size),
        )
        for name, stream in streams.items()
    ]


def split_table(streams: dict[str, TokenStream], vocab_size: int) -> str:
    """A Markdown table of what each split holds, with the unigram level of `streams["train"]` on each."""
    rows: list[Iterable[str]] = [
        ("split", "documents", "characters", "tokens", "bytes per token", "unigram nats per token"),
        ("---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for name, stream in streams.items():
        nats = unigram_cross_entropy(streams["train"].tokens, stream.tokens, vocab_size)
        counts = (f"{count:,}" for count in (stream.num_documents, stream.num_characters, stream.num_tokens))
        rows.append((name, *counts, f"{bytes_per_token(stream):.3f}", f"{nats:.4f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the splits of a corpus hold, in tokens of the bundled tokenizer."""
    from loopformers.data.corpora import BUNDLED, load_splits
    from loopformers.data.packing import tokenize_documents
    from loopformers.data.tokenizer import bundled_tokenizer

    parser = argparse.ArgumentParser(prog="python -m loopformers.data.statistics", description=main.__doc__)
    parser.add_argument("source", nargs="?", default=BUNDLED, help="as in load_documents (default: %(default)s)")
    parser.add_argument(
        "--cache-dir", default=None, help="where to keep datasets and tokens (default: the usual caches)"
    )
    arguments = parser.parse_args(argv)
    tokenizer = bundled_tokenizer()
    splits = load_splits(arguments.source, cache_dir=arguments.cache_dir)
    streams = {
        name: tokenize_documents(part, tokenizer, cache_dir=arguments.cache_dir) for name, part in splits.items()
    }
    print(split_table(streams, len(tokenizer)))


if __name__ == "__main__":
    sys.exit(run_command(main))
