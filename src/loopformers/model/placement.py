"""Where the tokens of a call stand: which are text, their positions and documents, and the masks and tables made of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from loopformers.errors import ConfigError
from loopformers.model.cache import LoopedCache
from loopformers.model.config import LoopConfig
from loopformers.nn.attention import AttentionContext, attention_reference
from loopformers.nn.mask import attention_mask as build_mask
from loopformers.nn.mask import packed_documents
from loopformers.nn.rope import rotary_tables

__all__ = ["Placement", "attention_context", "place"]

logger = logging.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the new tokens of a call stand, and what stands before them.

    Attributes:
        positions: Of the new tokens, (batch, new).
        valid: True for text and False for padding, cached tokens included, (batch, tokens); None: no padding.
        documents: Number of each token's packed document, cached tokens included, (batch, tokens); None: a row is one.
        num_tokens: Tokens, cached ones included.
    """

    positions: Tensor
    valid: Tensor | None
    documents: Tensor | None
    num_tokens: int


def place(
    config: LoopConfig,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: LoopedCache | None,
    *,
    batch_size: int,
    num_new: int,
    device: torch.device,
) -> Placement:
    """Place the new tokens of a call.

    Args:
        config: Of the model.
        attention_mask: 1 for text and 0 for padding, (batch, tokens) or (batch, new). It and positions have been checked.
        position_ids: Of the new tokens, (batch, new); None: counted from each row's first text token, or on from a cache.
        cache: Holds the tokens before.
        batch_size: Rows.
        num_new: New tokens of each.
        device: Of what is made here.

    Raises:
        ConfigError: Positions beyond the learned ones, packed documents with padding.
    """
    num_past = 0 if cache is None else cache.get_seq_length()
    valid = _valid(attention_mask, cache, batch_size, num_past, num_past + num_new)
    if position_ids is None and cache is not None and cache.is_packed and cache.positions is not None:
        # the last document goes on
        position_ids = cache.positions[:, -1:] + torch.arange(1, num_new + 1, device=device)
    positions = _positions(config, position_ids, valid, batch_size, num_past, num_new, device)
    documents = None if position_ids is None else _documents(positions, valid, cache)
    return Placement(positions, valid, documents, num_past + num_new)


def attention_context(
    config: LoopConfig,
    placement: Placement,
    cache: LoopedCache | None,
    *,
    windows: set[int | None],
    dtype: torch.dtype,
    output_attentions: bool,
) -> AttentionContext:
    """Return what the layers of a call share: the attention function, masks and rotary tables.

    Args:
        config: Of the model.
        placement: Of the new tokens.
        cache: Holds the tokens before.
        windows: Sliding windows of the layers; None among them: full attention.
        dtype: Of the tables.
        output_attentions: Whether attention weights are to be collected; such a call runs `eager`.

    Raises:
        ConfigError: An attention function that cannot do what is asked.
    """
    positions, valid, documents = placement.positions, placement.valid, placement.documents
    implementation = config._attn_implementation or "sdpa"
    if output_attentions and implementation != "eager":
        logger.warning_once(
            f"output_attentions=True with attn_implementation={implementation!r}: such calls run 'eager', which alone returns "
            "weights and is slower; call model.set_attn_implementation('eager') to choose it"
        )
        implementation = "eager"
    function = attention_reference if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    masks: dict[int | None, Tensor | None]
    if "flash" in implementation and documents is not None:
        raise ConfigError(
            f"attn_implementation={implementation!r} keeps no packed documents apart; call "
            "model.set_attn_implementation('sdpa'), or leave position_ids out"
        )
    if "flash" in implementation:  # flash kernels take the padding and make causality and windows themselves
        masks = dict.fromkeys(windows, None if valid is None or bool(valid.all()) else valid.long())
    else:
        masks = {
            window: build_mask(
                valid,
                num_queries=positions.shape[1],
                num_keys=placement.num_tokens,
                window=window,
                device=positions.device,
                documents=documents,
            )
            for window in windows
        }
    context = AttentionContext(function, masks, weights=[] if output_attentions else None)
    if config.position_embedding == "rotary":
        context.rotary = context.key_rotary = _rotary(config, positions, dtype)
        if config.kv_lora_rank is not None and cache is not None and cache.positions is not None:
            context.key_rotary = _rotary(config, torch.cat([cache.positions, positions], dim=1), dtype)
    return context


def _valid(
    mask: Tensor | None, cache: LoopedCache | None, batch_size: int, num_past: int, num_total: int
) -> Tensor | None:
    past = None if cache is None else cache.valid
    if mask is None:
        return None if past is None else F.pad(past, (0, num_total - num_past), value=True)
    mask = mask.bool()
    if mask.shape[1] == num_total:
        return mask
    if past is None:
        past = mask.new_ones(batch_size, num_past)
    return torch.cat([past, mask], dim=1)


def _positions(
    config: LoopConfig,
    position_ids: Tensor | None,
    valid: Tensor | None,
    batch_size: int,
    num_past: int,
    num_new: int,
    device: torch.device,
) -> Tensor:
    given = position_ids is not None
    if position_ids is None:
        if valid is None:
            position_ids = torch.arange(num_past, num_past + num_new, device=device)[None]
        else:
            position_ids = (valid.long().cumsum(dim=-1) - 1).clamp(min=0)[:, num_past:]
    limit = config.max_position_embeddings
    may_exceed = config.position_embedding == "learned" and (given or num_past + num_new > limit)
    if may_exceed and int(position_ids.max()) >= limit:
        raise ConfigError(
            f"position {int(position_ids.max())} is beyond the {limit} learned positions of this model; shorten the input "
            f"to {limit} tokens, or train with a larger max_position_embeddings or rotary positions"
        )
    return position_ids.expand(batch_size, num_new)


def _documents(positions: Tensor, valid: Tensor | None, cache: LoopedCache | None) -> Tensor | None:
    """Number the packed documents of all tokens, cached ones included, where given positions tell of several."""
    # A mask of ones, as collators add, says nothing of padding; generate() makes one, and positions from it.
    if valid is None or (cache is None and bool(valid.all())):
        past = None if cache is None else cache.positions
        documents = packed_documents(positions if past is None else torch.cat([past, positions], dim=1))
        if cache is not None:
            cache.is_packed = documents is not None
            if cache.is_packed and cache.num_prefix_tokens:
                raise ConfigError(
                    "position_ids that restart inside a row pack several documents, and only the first of them would see the "
                    "prefix; give one document in each row, or use another method than prefix tuning"
                )
        return documents
    text = valid[:, -positions.shape[1] :]
    restarts = (positions[:, 1:] != positions[:, :-1] + 1) & text[:, 1:] & text[:, :-1]
    if (cache is not None and cache.is_packed) or (positions.shape[1] > 1 and bool(restarts.any())):
        raise ConfigError(
            "position_ids that restart inside a row pack several documents, and attention_mask says where there is "
            "padding, of which packed rows have none; leave attention_mask out"
        )
    return None


def _rotary(config: LoopConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert config.head_dim is not None
    table_dtype = getattr(torch, config.rope_table_dtype)
    return rotary_tables(
        positions, head_dim=config.head_dim, theta=config.rope_theta, table_dtype=table_dtype, dtype=dtype
    )
