"""Attention masks: causal, padded, windowed, and closed at the ends of packed documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention_mask", "packed_documents"]


def attention_mask(
    valid: Tensor | None,
    *,
    num_queries: int,
    num_keys: int,
    window: int | None,
    device: torch.device,
    documents: Tensor | None = None,
) -> Tensor | None:
    """Return which key each query sees, or None where plain causal attention says the same.

    The queries are the last `num_queries` of the `num_keys` tokens. A key is visible when it is no padding and
    `0 <= query - key < window`, counted in tokens. Every query sees itself, so that a padding row has something to
    attend to and yields no NaN; no other row ever sees a padding key. Of packed documents, a query sees its own alone.

    Args:
        valid: True for text and False for padding, (batch, num_keys); None: no padding.
        num_queries: Tokens that attend.
        num_keys: Tokens that are attended to, cached ones included.
        window: Width of the sliding window in tokens; None: unlimited.
        device: Where to build it.
        documents: What `packed_documents` says of the keys, (batch, num_keys); None: one document a row.

    Returns:
        Booleans (batch or 1, 1, num_queries, num_keys), or None.
    """
    if window is not None and window >= num_keys:
        window = None
    if valid is not None and bool(valid.all()):
        valid = None
    if valid is None and window is None and documents is None and num_queries in (1, num_keys):
        return None
    keys = torch.arange(num_keys, device=device)
    distance = keys[num_keys - num_queries :, None] - keys[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible[None, None]
    if documents is not None:
        visible = visible & (documents[:, None, num_keys - num_queries :, None] == documents[:, None, None, :])
    if valid is not None:
        visible = (visible & valid[:, None, None, :]) | (distance == 0)
    return visible


def packed_documents(positions: Tensor) -> Tensor | None:
    """Number the documents of each row by its positions: one begins wherever a position does not follow the last.

    Args:
        positions: Positions of all tokens, (batch, seq), integers.

    Returns:
        Numbers from 0, (batch, seq), or None where no row holds more than one document.
    """
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(begins.any()):
        return None
    return F.pad(begins.long().cumsum(dim=-1), (1, 0))
