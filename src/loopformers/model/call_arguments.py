"""Arguments that transformers, PEFT and trainers pass to any model beside those of our own forward.

What has an effect acts: `cu_seq_lens_q` and its kin say where packed documents begin, `seq_idx` says which document each
token is of. What can't matter here is accepted at the value that changes nothing. All else is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopformers.errors import ConfigError, unknown_name

__all__ = ["settle_arguments"]

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
HARMLESS = ("cache_position", "labels", "num_items_in_batch", "output_router_logits", "token_type_ids", "is_causal")


def settle_arguments(
    others: dict[str, Any], position_ids: Tensor | None, batch_and_length: tuple[int, int], num_cached: int
) -> Tensor | None:
    """Return the positions of a call, which tell packed documents apart, given what else it was called with.

    Args:
        others: Arguments that our forward has no parameter for.
        position_ids: Positions as they were given, (batch, seq), or None.
        batch_and_length: Rows, and new tokens in each.
        num_cached: Tokens before these.

    Raises:
        ConfigError: An argument that is not known or asks for what this model does not do, or packing that contradicts
            the positions.
    """
    if unknown := sorted(others.keys() - {*PACKING, *HARMLESS}):
        raise ConfigError(unknown_name("argument", unknown[0], {*PACKING, *HARMLESS, *_OWN}))
    _check_harmless(others)
    packing = {name: others[name] for name in PACKING if others.get(name) is not None}
    if not packing:
        return position_ids
    batch_size, length = batch_and_length
    if batch_size != 1 or num_cached:
        raise ConfigError(
            f"{', '.join(packing)} with {batch_size} rows and {num_cached} cached tokens: packed documents come as one row, and "
            "are not decoded; leave these out, or give position_ids alone"
        )
    return _packed_positions(packing, position_ids, length)


_OWN = ("attention_mask", "num_loops", "output_hidden_states", "position_ids", "return_dict", "schedule", "use_cache")
"""Names that a misspelt argument may have meant."""


def _check_harmless(others: dict[str, Any]) -> None:
    if others.get("labels") is not None:
        raise ConfigError("labels: the trunk has no loss; call LoopedForCausalLM")
    if others.get("output_router_logits"):
        raise ConfigError("output_router_logits=True: a looped model has no router; leave it out")
    if others.get("is_causal") is False:
        raise ConfigError("is_causal=False: a looped model sees only earlier tokens; leave it out")
    segments = others.get("token_type_ids")
    if segments is not None and bool(torch.as_tensor(segments).any()):
        raise ConfigError("token_type_ids: a looped model has no segments; tokenize with return_token_type_ids=False")


def _packed_positions(packing: dict[str, Any], position_ids: Tensor | None, length: int) -> Tensor:
    """Return positions that restart where documents begin; those that were given must restart at the same tokens."""
    begins = {name: _starts(name, value, length) for name, value in packing.items() if not name.startswith("max_")}
    if not begins:
        raise ConfigError(
            f"{', '.join(packing)} without cu_seq_lens_q: a length alone does not say where documents begin"
        )
    (name, starts), *rest = begins.items()
    if position_ids is not None:
        steps = position_ids.reshape(-1).tolist()
        if len(steps) != length:
            raise ConfigError(
                f"position_ids of {len(steps)} tokens beside {name} of {length}; give one position for each token"
            )
        rest.append(("position_ids", [i for i in range(length) if i == 0 or steps[i] != steps[i - 1] + 1]))
    for other, also in rest:
        if also != starts:
            raise ConfigError(
                f"{name} and {other} disagree on where packed documents begin: at tokens {starts[:8]} and {also[:8]}; "
                "give one of them"
            )
    ends = [*starts[1:], length]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    for bound in ("max_length_q", "max_length_k"):
        if bound in packing and int(packing[bound]) < longest:
            raise ConfigError(
                f"{bound}={int(packing[bound])} is below the longest packed document, of {longest} tokens"
            )
    if position_ids is not None:
        return position_ids
    device = next(value.device for value in packing.values() if isinstance(value, Tensor))
    return torch.cat([torch.arange(end - start, device=device) for start, end in zip(starts, ends, strict=True)])[None]


def _starts(name: str, value: Any, length: int) -> list[int]:
    """Return the first token of each document."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        raise ConfigError(f"{name} must be a tensor of whole numbers")
    numbers = value.reshape(-1).tolist()
    if name == "seq_idx":
        if len(numbers) != length:
            raise ConfigError(f"seq_idx of {len(numbers)} numbers for {length} tokens; give one for each")
        return [i for i in range(length) if i == 0 or numbers[i] != numbers[i - 1]]
    if len(numbers) < 2 or numbers[0] != 0 or numbers[-1] != length or sorted(set(numbers)) != numbers:
        raise ConfigError(f"{name}={numbers[:8]} must rise from 0 to the {length} tokens of the call")
    return numbers[:-1]
