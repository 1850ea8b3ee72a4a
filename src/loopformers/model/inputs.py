"""What a forward call may be given: one check for each argument, before any work, for both models.

The host knows types, dtypes and shapes, so these are always checked. Values are only looked at on a CPU, where that takes a
few microseconds a call. A look at a tensor on an accelerator makes the host wait for everything that it has queued, in every step
of decoding; there the kernels of the embedding and of the cross entropy assert the range of an index themselves. Nor is there
anything to look at in a tensor without values: in a trace, under `torch.compile`, `torch.export` or `torch.func`, or on the
meta device.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from loopformers.errors import ConfigError, shorten
from loopformers.objectives.cross_entropy import IGNORE

__all__ = [
    "check_logits_to_keep",
    "check_mask",
    "check_num_items",
    "check_positions",
    "check_targets",
    "check_token_values",
    "token_shape",
]

FEW = 200
"""Up to so many numbers, a Python list is faster than a reduction."""

INDEX_DTYPES = (torch.int64, torch.int32)
"""What an embedding takes."""

WHOLE_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def token_shape(input_ids: Any, inputs_embeds: Any, *, hidden_size: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """Check that there is exactly one of ids and embeddings, and its type, dtype and shape.

    Args:
        input_ids: Tokens, (batch, seq), or None.
        inputs_embeds: Embeddings, (batch, seq, dim), or None.
        hidden_size: dim.
        dtype: That embeddings must have; None: any that is floating.

    Returns:
        Rows and tokens of each, both at least 1.

    Raises:
        ConfigError: Neither or both are given, or what is given is not of these.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ConfigError("give exactly one of input_ids and inputs_embeds")
    if inputs_embeds is None:
        _check_tensor("input_ids", input_ids, "token ids, (batch, seq)")
        if input_ids.dtype not in INDEX_DTYPES:
            raise ConfigError(f"input_ids of dtype {input_ids.dtype} must be token ids, int64 or int32; call .long()")
        if input_ids.dim() != 2:
            hint = "; for one sequence give input_ids[None]" if input_ids.dim() == 1 else ""
            raise ConfigError(f"input_ids of shape {tuple(input_ids.shape)} must be (batch, seq){hint}")
    else:
        _check_tensor("inputs_embeds", inputs_embeds, "embeddings, (batch, seq, dim)")
        shape = tuple(inputs_embeds.shape)
        if len(shape) != 3 or shape[-1] != hidden_size:
            raise ConfigError(
                f"inputs_embeds of shape {shape} must be (batch, seq, {hidden_size}), the width of this model"
            )
        if not inputs_embeds.is_floating_point() or (dtype is not None and inputs_embeds.dtype != dtype):
            wanted = "floating point" if dtype is None else f"{dtype}, as this model is"
            remedy = "; call .to(model.dtype)" if inputs_embeds.is_floating_point() else "; ids go into input_ids"
            raise ConfigError(f"inputs_embeds of dtype {inputs_embeds.dtype} must be {wanted}{remedy}")
    given = input_ids if inputs_embeds is None else inputs_embeds
    batch_size, num_tokens = given.shape[0], given.shape[1]
    if batch_size == 0:
        raise ConfigError("an input of 0 rows has nothing to run; give at least one")
    if num_tokens == 0:
        raise ConfigError("an input of 0 tokens has nothing to predict from; give at least one token")
    return batch_size, num_tokens


def check_token_values(input_ids: Tensor, vocab_size: int) -> None:
    """Check that every id is a token of the vocabulary, where values can be looked at.

    Raises:
        ConfigError: One is not.
    """
    if not _can_look(input_ids):
        return
    low, high = _bounds(input_ids)
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"input_ids hold {low if low < 0 else high}, and this model knows tokens 0 to {vocab_size - 1}; encode with its "
            "own tokenizer, or call model.resize_token_embeddings"
        )


def check_mask(mask: Any, *, batch_size: int, num_past: int, num_new: int) -> None:
    """Check a padding mask, (batch, cached + new) or (batch, new).

    Raises:
        ConfigError: Another type or shape, or values other than 0 and 1.
    """
    _check_tensor("attention_mask", mask, "1 for text and 0 for padding, (batch, tokens)")
    total = num_past + num_new
    shape = tuple(mask.shape)
    if len(shape) > 2:
        raise ConfigError(
            f"attention_mask of shape {shape} says which query sees which key, and the model makes that itself; give "
            f"({batch_size}, {total}), 1 for text and 0 for padding, or position_ids that restart for packed documents"
        )
    if len(shape) != 2 or shape[0] != batch_size or shape[1] not in (total, num_new):
        raise ConfigError(
            f"attention_mask of shape {shape} must be ({batch_size}, {total}): one entry for each row and each token, "
            f"{num_past} cached ones included, 1 for text and 0 for padding"
        )
    if mask.dtype == torch.bool:
        return
    if mask.is_floating_point():
        # One on an accelerator is looked at as well: it is rare, and NaN would count as text.
        if _has_values(mask) and not bool(((mask == 0) | (mask == 1)).all()):
            wrong = mask[(mask != 0) & (mask != 1)][0].item()
            raise ConfigError(
                f"attention_mask holds {wrong}; it must be 1 for text and 0 for padding, and nothing else"
            )
        return
    if mask.dtype not in WHOLE_DTYPES:
        raise ConfigError(
            f"attention_mask of dtype {mask.dtype} must be bool, whole numbers or floating point, 0 and 1"
        )
    if _can_look(mask):
        low, high = _bounds(mask)
        if low < 0 or high > 1:
            raise ConfigError(
                f"attention_mask holds {low if low < 0 else high}; it must be 1 for text and 0 for padding, and nothing else"
            )


def check_positions(position_ids: Any, *, batch_size: int, num_new: int) -> None:
    """Check positions of the new tokens, (batch or 1, new).

    Raises:
        ConfigError: Another type, dtype or shape, or a negative position.
    """
    _check_tensor("position_ids", position_ids, "positions from 0, (batch, seq)")
    if position_ids.dtype not in INDEX_DTYPES:
        raise ConfigError(
            f"position_ids of dtype {position_ids.dtype} must be whole numbers, int64 or int32; call .long()"
        )
    shape = tuple(position_ids.shape)
    if shape not in ((batch_size, num_new), (1, num_new), (num_new,)):
        raise ConfigError(
            f"position_ids of shape {shape} must be ({batch_size}, {num_new}): one for each row and each new token"
        )
    if _can_look(position_ids):
        low, _ = _bounds(position_ids)
        if low < 0:
            raise ConfigError(
                f"position_ids hold {low}; positions count from 0 (padding may have any, and attention_mask marks it)"
            )


def check_targets(name: str, targets: Any, *, shape: tuple[int, int], vocab_size: int) -> None:
    """Check labels or targets, (batch, seq): a token or IGNORE at each place.

    Raises:
        ConfigError: Another type, dtype or shape, or a number that is neither.
    """
    _check_tensor(name, targets, f"tokens to predict, (batch, seq), {IGNORE} where there is none")
    if targets.dtype not in WHOLE_DTYPES:
        raise ConfigError(f"{name} of dtype {targets.dtype} must be token ids; call .long()")
    if tuple(targets.shape) != shape:
        raise ConfigError(
            f"{name} of shape {tuple(targets.shape)} must be {shape}, one for each token of the input; put {IGNORE} where "
            "there is nothing to predict"
        )
    if not _can_look(targets):
        return
    low, high = _bounds(targets)
    if high >= vocab_size or (low < 0 and bool(((targets < 0) & (targets != IGNORE)).any())):
        wrong = high if high >= vocab_size else int(targets[(targets < 0) & (targets != IGNORE)][0])
        raise ConfigError(
            f"{name} hold {wrong}, and this model predicts tokens 0 to {vocab_size - 1}; put {IGNORE} where there is nothing "
            "to predict, and encode with the model's own tokenizer"
        )


def check_num_items(value: Any) -> Tensor | float:
    """Return the number of targets of a step that a loss is divided by, as one number of at least 1.

    A step whose labels are all ignored counts 0: its loss is 0, and NaN would end the run. Trainers that copy a model over
    devices give a tensor with a dimension.

    Raises:
        ConfigError: No single number, or a negative one.
    """
    what = "must be the number of targets of a whole step, one number of at least 0"
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype == torch.bool:
            raise ConfigError(f"num_items_in_batch of dtype {value.dtype} and shape {tuple(value.shape)} {what}")
        if _can_look(value) and not 0 <= value.item() < float("inf"):
            raise ConfigError(f"num_items_in_batch={value.item()} {what}")
        return value.reshape(()).clamp(min=1)
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise ConfigError(f"num_items_in_batch={shorten(value)} {what}")
    return max(float(value), 1.0)


def check_logits_to_keep(value: Any, *, num_new: int) -> None:
    """Check how many of the last positions to keep, or which.

    Raises:
        ConfigError: Neither a number of at least 0 nor a tensor of indices into the new tokens.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"logits_to_keep={value!r} must be a whole number of at least 0 (0 keeps all), or a tensor of indices"
            )
        return
    if value.dtype not in INDEX_DTYPES or value.dim() != 1:
        raise ConfigError(
            f"logits_to_keep of dtype {value.dtype} and shape {tuple(value.shape)} must be indices of positions: one "
            "dimension of whole numbers"
        )
    if value.numel() and _can_look(value):
        low, high = _bounds(value)
        if low < -num_new or high >= num_new:
            raise ConfigError(
                f"logits_to_keep holds {low if low < -num_new else high}, and there are {num_new} positions, 0 to {num_new - 1}"
            )


def _check_tensor(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}, and must be a tensor: {what}")


def _has_values(x: Tensor) -> bool:
    """Whether a tensor can be looked at: it is no stand-in of a trace or a transformation."""
    return (
        type(x) is Tensor
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _can_look(x: Tensor) -> bool:
    """Whether looking at a tensor's values is also free: it is on the host."""
    return x.is_cpu and _has_values(x)


def _bounds(x: Tensor) -> tuple[int, int]:
    """Return the least and the greatest entry of a tensor that is not empty."""
    if x.numel() <= FEW:
        numbers: list[int] = x.flatten().tolist()
        return (numbers[0], numbers[0]) if len(numbers) == 1 else (min(numbers), max(numbers))
    low, high = x.aminmax()
    return int(low), int(high)
