"""Cross entropy of a language model's head: whole, and in chunks whose logits never stand in memory together."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["IGNORE", "chunked_cross_entropy_sum", "cross_entropy_sum"]

IGNORE = -100
"""Label of a position that is no target (transformers' convention)."""


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the summed cross entropy in nats, a scalar: the readable reference of the chunked one.

    Args:
        logits: (tokens, vocab).
        labels: Targets, (tokens,); IGNORE where there is none.
        smoothing: Share of a target's probability that is spread evenly over the vocabulary, from 0 to below 1.
    """
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)


def chunked_cross_entropy_sum(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk_tokens: int,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the same sum, with the logits of `chunk_tokens` tokens at a time.

    Each chunk's logits are dropped after the forward pass and made again in the backward pass, so the head costs one
    more forward pass and the peak is one chunk. torch's own `linear_cross_entropy` does not know soft-capped logits, which
    half of our systems have.

    Args:
        hidden: Final hidden states, (tokens, dim).
        labels: Targets, (tokens,).
        head: (tokens, dim) -> logits (tokens, vocab).
        chunk_tokens: Tokens in a chunk.
        smoothing: As in `cross_entropy_sum`.
    """

    def chunk_sum(part: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(head(part), targets, smoothing=smoothing)

    parts = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    sums = [checkpoint(chunk_sum, part, targets, use_reentrant=False) for part, targets in parts]
    return sum(sums[1:], start=sums[0])
