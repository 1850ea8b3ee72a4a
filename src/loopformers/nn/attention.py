"""Causal attention: multi-head, grouped-query and multi-head latent, behind transformers' attention functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformers.nn.init import as_role
from loopformers.nn.rope import apply_rotary

__all__ = [
    "Attention",
    "AttentionContext",
    "AttentionFunction",
    "KeyValueSlot",
    "LatentAttention",
    "attention_reference",
]

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' signature: (module, query, key, value, mask, scaling=, dropout=, **kwargs) -> (output, weights)."""


class KeyValueSlot(Protocol):
    """One row of a cache: it appends what a layer computed for the new tokens and returns all of it."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append along the sequence, tensors (batch, heads, seq, dim)."""
        ...


@dataclass(slots=True)
class AttentionContext:
    """What all layers of one forward call share.

    Attributes:
        function: The attention function.
        masks: Mask by window (None: full attention), as the function wants it.
        rotary: Tables of the new tokens' positions, or None for models with learned positions.
        key_rotary: Tables of all tokens' positions, cached ones included; latent attention rotates keys when it reads them.
        weights: Where attention weights are collected on request, a tensor (batch, heads, queries, keys) each.
    """

    function: AttentionFunction
    masks: dict[int | None, Tensor | None]
    rotary: tuple[Tensor, Tensor] | None = None
    key_rotary: tuple[Tensor, Tensor] | None = None
    weights: list[Tensor] | None = field(default=None)


def attention_reference(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The slow truth: softmax(q k^T * scaling) v, written out. The `eager` implementation.

    Args:
        module: Unused; part of the signature of transformers' attention functions.
        query: (batch, heads, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim); each serves heads / kv_heads queries.
        value: As `key`.
        attention_mask: True where visible, (batch or 1, 1, queries, keys); None: causal.
        scaling: Factor on the scores; default 1 / sqrt(head_dim).
        dropout: Must be 0; the models have none.
        kwargs: What other implementations need.

    Returns:
        Output (batch, queries, heads, head_dim) and weights (batch, heads, queries, keys).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is None:
        queries, keys = scores.shape[-2:]
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    weights = scores.masked_fill(~attention_mask, -math.inf).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), weights


class Attention(nn.Module):
    """Multi-head and grouped-query attention whose query may come from another tensor than its keys and values.

    `W_o softmax(q k^T / sqrt(head_dim)) v` with q = W_q source, k = W_k x, v = W_v x. With rotary positions q and k are
    rotated; with `qk_norm` they are then RMS-normed per head.

    Args:
        hidden_size: Width of the stream.
        num_heads: Query heads.
        num_key_value_heads: Key and value heads; `num_heads` is a multiple of it.
        head_dim: Size of a head.
        qk_norm: Whether queries and keys are normed.
        norm_eps: Epsilon of that norm; None: the dtype's machine epsilon.
        window: Sliding window in tokens; None: full attention.
        config: The model's transformers config, which some attention functions look at.
    """

    is_causal = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        qk_norm: bool,
        norm_eps: float | None,
        window: int | None,
        config: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.scaling = head_dim**-0.5
        self.qk_norm = qk_norm
        self.norm_eps = norm_eps
        self.window = window
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.build_key_value(hidden_size, num_key_value_heads * head_dim)
        self.o_proj = as_role("output", nn.Linear(num_heads * head_dim, hidden_size, bias=False))

    def build_key_value(self, hidden_size: int, key_value_size: int) -> None:
        """Create the projections that keys and values come from."""
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=False)

    def forward(self, x: Tensor, source: Tensor, context: AttentionContext, slot: KeyValueSlot | None) -> Tensor:
        """Attend from `source` to `x`.

        Args:
            x: What keys and values are made of, (batch, seq, dim).
            source: What queries are made of, same shape; `x` itself for plain self-attention.
            context: What this call's layers share.
            slot: The cache row of this layer in this loop, or None.

        Returns:
            (batch, seq, dim).
        """
        query = self.normed(self.rotated(self.split_heads(self.q_proj(source)), context.rotary))
        key, value = self.key_value(x, context, slot)
        output, weights = context.function(
            self,
            query,
            key,
            value,
            context.masks[self.window],
            scaling=self.scaling,
            dropout=0.0,
            sliding_window=self.window,
        )
        if context.weights is not None and weights is not None:
            context.weights.append(weights)
        return self.o_proj(output.flatten(-2))

    def key_value(self, x: Tensor, context: AttentionContext, slot: KeyValueSlot | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens, cached ones included: (batch, kv_heads, keys, head_dim) each."""
        key = self.normed(self.rotated(self.split_heads(self.k_proj(x)), context.rotary))
        value = self.split_heads(self.v_proj(x))
        return (key, value) if slot is None else slot.update(key, value)

    def split_heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads * head_dim) -> (batch, heads, seq, head_dim)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def rotated(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotate where the model has rotary positions."""
        return x if tables is None else apply_rotary(x, tables)

    def normed(self, x: Tensor) -> Tensor:
        """RMS-norm each head where the model has QK-norm."""
        return F.rms_norm(x, (self.head_dim,), eps=self.norm_eps) if self.qk_norm else x


class LatentAttention(Attention):
    """Multi-head latent attention: keys and values are expanded from one small latent, and the cache holds the latent.

    `c = norm(W_down x)`, `k = W_kup c`, `v = W_vup c` (DeepSeek-V2, arXiv 2405.04434, without its decoupled rotary key).
    Rotation and QK-norm act on the expanded keys, so cached latents are expanded and rotated when they are read.

    Args:
        hidden_size: Width of the stream.
        kv_lora_rank: Width of the latent.
        kwargs: As `Attention`.
    """

    def __init__(self, hidden_size: int, *, kv_lora_rank: int, **kwargs: Any) -> None:
        self.kv_lora_rank = kv_lora_rank
        super().__init__(hidden_size, **kwargs)

    def build_key_value(self, hidden_size: int, key_value_size: int) -> None:
        """Create the projection into the latent and the two out of it."""
        self.kv_down_proj = nn.Linear(hidden_size, self.kv_lora_rank, bias=False)
        self.k_up_proj = nn.Linear(self.kv_lora_rank, key_value_size, bias=False)
        self.v_up_proj = nn.Linear(self.kv_lora_rank, key_value_size, bias=False)

    def key_value(self, x: Tensor, context: AttentionContext, slot: KeyValueSlot | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens, expanded from the latents of all tokens."""
        latent = F.rms_norm(self.kv_down_proj(x), (self.kv_lora_rank,), eps=self.norm_eps)
        if slot is not None:
            latent = slot.update(latent[:, None], latent.new_empty(latent.shape[0], 1, latent.shape[1], 0))[0][:, 0]
        key = self.normed(self.rotated(self.split_heads(self.k_up_proj(latent)), context.key_rotary))
        return key, self.split_heads(self.v_up_proj(latent))
