"""The exact cache: one row of keys and values for each (stage, layer, loop), valid for one schedule.

Under an exit rule a token may leave before the last loop and has no keys and values of the loops behind. There its
deepest ones stand in, which each row takes from the row of the same layer in the loop before (`SlotLayer`).

A prefix, as prefix tuning learns it, arrives as a cache of transformers' own kind: keys and values of virtual tokens that
come before the first real one. `LoopedCache.from_prefix` reads it, in the order in which layers run: prelude, core, coda. It
has either one entry for each layer, and a core layer's entry then serves every loop, at any number of loops; or one entry for
each time that a layer runs, and then fits one number of loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from loopformers.errors import CacheError
from loopformers.nn.attention import KeyValueSlot
from loopformers.recurrence.slots import Stage
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig

__all__ = ["LoopedCache", "ReadOnlyRows", "SlotLayer", "SlotSource"]

FIRST_CAPACITY = 64
"""Tokens that a row has room for at first; it doubles from there."""


class SlotSource(Protocol):
    """Where layers find their cache rows."""

    def slot(self, stage: Stage, layer_idx: int, loop_idx: int = 0) -> KeyValueSlot:
        """Return the row of a layer in a loop."""
        ...


@dataclass(slots=True)
class Extent:
    """How many tokens are cached: one number for all rows, advanced by the model's forward alone, once per call."""

    num_tokens: int = 0


class SlotLayer(CacheLayerMixin):
    """One row: keys and values of one layer in one loop, (batch, heads, tokens, dim), in a buffer that doubles.

    New tokens are written behind `extent.num_tokens`, whatever the buffer holds there, so a forward that failed half-way
    leaves no trace. Tokens that this row has not seen, because they left in an earlier loop, are filled in from the row
    below when this row is next written.

    Args:
        extent: Of the cache.
        below: Row of the same layer in the loop before, if there is one.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, extent: Extent, below: SlotLayer | None = None) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.extent = extent
        self.below = below
        self.num_filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Note dtype and device; buffers are made by `update`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens and return all: (batch, heads, tokens, dim) twice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        start, filled = self.extent.num_tokens, min(self.num_filled, self.extent.num_tokens)
        below = self.below
        if filled < start and below is not None and below.keys is not None and below.values is not None:
            self.keys = self._write(self.keys, below.keys[..., filled:start, :], filled)
            self.values = self._write(self.values, below.values[..., filled:start, :], filled)
        self.keys = self._write(self.keys, key_states, start)
        self.values = self._write(self.values, value_states, start)
        self.num_filled = total = start + key_states.shape[-2]
        return self.keys[..., :total, :], self.values[..., :total, :]

    def begin_with(self, keys: Tensor, values: Tensor) -> None:
        """Hold these tokens, (batch, heads, tokens, dim) twice, as the first."""
        self.lazy_initialization(keys)
        # Copies: later tokens may be written in place, and one entry of a prefix may serve several rows.
        self.keys, self.values = keys.clone(), values.clone()
        self.num_filled = keys.shape[-2]

    def newest(self) -> tuple[Tensor, Tensor]:
        """Return what the call under way has written: (batch, heads, new, dim) twice."""
        assert self.keys is not None, "a row is read after it was written"
        assert self.values is not None, "keys and values are written together"
        new = slice(self.extent.num_tokens, self.num_filled)
        return self.keys[..., new, :], self.values[..., new, :]

    def _write(self, buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
        total = start + new.shape[-2]
        if torch.is_grad_enabled() and (new.requires_grad or (buffer is not None and buffer.requires_grad)):
            return (
                new if buffer is None else torch.cat([buffer[..., :start, :], new], dim=-2)
            )  # writing in place would break autograd
        if buffer is None or buffer.shape[-2] < total:
            capacity = max(total, FIRST_CAPACITY, 2 * (0 if buffer is None else buffer.shape[-2]))
            grown = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
            if buffer is not None:
                grown[..., :start, :] = buffer[..., :start, :]
            buffer = grown
        buffer[..., start:total, :] = new
        return buffer

    def change_rows(self, change: Any) -> None:
        """Replace the tokens that count by `change(tokens)`, a function of (batch, heads, tokens, dim)."""
        if self.keys is not None and self.values is not None:
            self.keys = change(self.keys[..., : self.extent.num_tokens, :])
            self.values = change(self.values[..., : self.extent.num_tokens, :])
            self.num_filled = min(self.num_filled, self.extent.num_tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of these beams."""
        self.change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.extent.num_tokens

    def get_max_length(self) -> int:
        """Return -1: no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: no maximum (older transformers' name)."""
        return -1

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of keys that a query of this length sees, and their offset."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.extent.num_tokens + new, 0


class LoopedCache(Cache):
    """Keys and values of a run, row by row, and what they depend on: the schedule, the padding and the positions.

    Exact for any fixed schedule: decoding with it equals the full forward. The schedule is fixed by the first call; any
    other on a live cache raises CacheError, because its loops would read rows that other step sizes have written.

    Args:
        config: Configuration of the model.

    Attributes:
        exit_loops: Loops that each token got, (batch, tokens), 0 for padding; None: no exit rule has been at work.

    Example:
        >>> import torch
        >>> from loopformers import LoopConfig, LoopedForCausalLM
        >>> config = LoopConfig.from_preset("flt", hidden_size=32, num_hidden_layers=2, num_loops=3, vocab_size=11)
        >>> model = LoopedForCausalLM(config).eval()
        >>> cache = model.new_cache()
        >>> _ = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> cache.get_seq_length(), len(cache), str(cache.schedule)
        (3, 6, '1/3,1/3,1/3')
    """

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(layers=[])
        self.layout = config.slot_layout
        self.extent = Extent()
        self.schedule: Schedule | None = None
        self.valid: Tensor | None = None
        self.positions: Tensor | None = None
        self.modulations: Tensor | None = None
        self.exit_loops: Tensor | None = None
        self.is_packed = False
        self.num_prefix_tokens = 0

    @classmethod
    def from_prefix(cls, config: LoopConfig, schedule: Schedule, prefix: Any) -> LoopedCache:
        """Return a cache that begins with the keys and values of virtual tokens; gradients flow back to them.

        The prefix is read and never written: what comes after it is in the returned cache only.

        Args:
            config: Configuration of the model.
            schedule: Of the run that begins with it.
            prefix: A cache of transformers' own kind, such as PEFT makes for prefix tuning. Each entry has keys and values
                of shape (batch, key-value heads, tokens, head dim), keys as attention uses them (rotated and normed). The
                module's docstring says which entries there must be.

        Raises:
            CacheError: It is empty or of another kind, does not have these entries, or the model caches latents.
        """
        entries: list[tuple[Any, Any]] = [
            (getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in prefix.layers
        ]
        num_tokens = prefix.get_seq_length() if entries else 0
        if not num_tokens:
            raise CacheError(
                f"an empty {type(prefix).__name__} has one row for each layer, and a looped model needs one for each loop of "
                "each layer; pass model.new_cache(), or nothing"
            )
        if config.kv_lora_rank is not None:
            raise CacheError(
                f"a prefix of keys and values for a model with kv_lora_rank={config.kv_lora_rank}: its cache holds latents, not "
                "keys; use another method, such as prompt tuning or LoRA"
            )
        layout = config.slot_layout
        before, core, after = layout.num_prelude_layers, layout.num_core_layers, layout.num_coda_layers
        loops = range(schedule.num_loops)
        places: list[tuple[Stage, int, int]] = [("prelude", i, 0) for i in range(before)]
        places += [("core", i, loop) for loop in loops for i in range(core)]
        places += [("coda", i, 0) for i in range(after)]
        if len(entries) == before + core + after:
            entries = entries[:before] + entries[before : before + core] * len(loops) + entries[before + core :]
        if len(entries) != len(places):
            raise CacheError(
                f"a prefix of {len(entries)} layers for a model of {before + core + after}; give one entry for each layer "
                f"(prelude, core, coda; of PEFT: num_layers={before + core + after}), or {len(places)}, one for each time that a "
                f"layer runs in {len(loops)} loops"
            )
        batch_size = 0 if entries[0][0] is None else len(entries[0][0])
        expected = (batch_size, config.num_key_value_heads, num_tokens, config.head_dim)
        cache = cls(config)
        for (stage, layer_idx, loop_idx), (keys, values) in zip(places, entries, strict=True):
            shapes = {None if x is None else tuple(x.shape) for x in (keys, values)}
            if shapes != {expected}:
                raise CacheError(
                    f"a prefix whose {stage} layer {layer_idx} has keys and values of shape {shapes}; this model needs "
                    f"{expected}: (batch, key-value heads, tokens, head dim), the same number of tokens in every layer"
                )
            cache.slot(stage, layer_idx, loop_idx).begin_with(keys, values)
        cache.schedule = schedule
        cache.extent.num_tokens = cache.num_prefix_tokens = num_tokens
        cache.positions = torch.arange(num_tokens, device=entries[0][0].device).expand(batch_size, num_tokens)
        return cache

    @property
    def max_cache_len(self) -> int:
        """-1: no maximum (PEFT's name)."""
        return -1

    def begin(self, schedule: Schedule, batch_size: int) -> None:
        """Fix the schedule and batch size on the first call, and check them on every other.

        Raises:
            CacheError: The cache holds another schedule or another batch size.
        """
        for layer in self.layers:  # of what a crop or a call that failed has left behind, nothing counts
            layer.num_filled = min(layer.num_filled, self.extent.num_tokens)
        if self.extent.num_tokens == 0:
            if schedule != self.schedule:
                self.modulations = None
            self.schedule = schedule
            self.is_packed = False
            return
        if schedule != self.schedule:
            raise CacheError(
                f"schedule={str(schedule)!r} on a cache that holds {self.extent.num_tokens} tokens of schedule "
                f"{str(self.schedule)!r}: its rows depend on the step sizes; go on with that schedule, or start a new cache "
                "with model.new_cache()"
            )
        if self.positions is not None and len(self.positions) != batch_size:
            raise CacheError(
                f"a batch of {batch_size} on a cache of {len(self.positions)} rows; give as many rows as the cache holds, or "
                "change it with batch_repeat_interleave or batch_select_indices"
            )

    def slot(self, stage: Stage, layer_idx: int, loop_idx: int = 0) -> SlotLayer:
        """Return the row of a layer in a loop."""
        return self.row(self.layout.slot(stage, layer_idx, loop_idx))

    def row(self, slot: int) -> SlotLayer:
        """Return a row by its number."""
        while len(self.layers) <= slot:
            below = self.layout.slot_below(len(self.layers))
            self.layers.append(SlotLayer(self.extent, None if below is None else self.layers[below]))
        return self.layers[slot]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a row by its number; transformers' name for `row(layer_idx).update(..)`."""
        return self.row(layer_idx).update(key_states, value_states)

    def advance(self, positions: Tensor, valid: Tensor | None, exit_loops: Tensor | None = None) -> None:
        """Count the new tokens; the model's forward calls it once, when all rows are written.

        Args:
            positions: Positions of the new tokens, (batch, new).
            valid: True for text and False for padding, of all tokens, (batch, tokens); None: no padding.
            exit_loops: Loops that each new token got, (batch, new); None: all of the schedule's.
        """
        if exit_loops is not None or self.exit_loops is not None:
            self.exit_loops = self._exit_loops(positions, valid, exit_loops)
        self.positions = positions if self.positions is None else torch.cat([self.positions, positions], dim=1)
        self.valid = valid
        self.extent.num_tokens += positions.shape[1]

    def _exit_loops(self, positions: Tensor, valid: Tensor | None, new: Tensor | None) -> Tensor:
        assert self.schedule is not None, "begin() has fixed it"
        past = self.exit_loops
        if past is None:
            past = positions.new_full((len(positions), self.extent.num_tokens), self.schedule.num_loops)
            past = past if valid is None else past * valid[:, : self.extent.num_tokens]
        if new is None:
            new = torch.full_like(positions, self.schedule.num_loops)
            new = new if valid is None else new * valid[:, self.extent.num_tokens :]
        return torch.cat([past, new], dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens, the same for every row."""
        return self.extent.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: Minus the number of tokens to forget; a positive number is the length to keep, as older
                transformers call it.
        """
        keep = self.extent.num_tokens + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if keep < 0:
            raise CacheError(
                f"crop({tokens_to_remove}) of a cache of {self.extent.num_tokens} tokens: there are not that many"
            )
        self.extent.num_tokens = min(keep, self.extent.num_tokens)
        self._change_bookkeeping(lambda rows: rows[:, : self.extent.num_tokens])

    def reset(self) -> None:
        """Forget everything, the schedule too."""
        self.layers.clear()
        self.extent.num_tokens = self.num_prefix_tokens = 0
        self.schedule = self.valid = self.positions = self.modulations = self.exit_loops = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of these beams."""
        super().reorder_cache(beam_idx)
        self._change_bookkeeping(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        for layer in self.layers:
            layer.change_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))
        self._change_bookkeeping(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        for layer in self.layers:
            layer.change_rows(lambda rows: rows[indices])
        self._change_bookkeeping(lambda rows: rows[indices])

    def _change_bookkeeping(self, change: Any) -> None:
        self.positions = None if self.positions is None else change(self.positions)
        self.valid = None if self.valid is None else change(self.valid)
        self.exit_loops = None if self.exit_loops is None else change(self.exit_loops)


@dataclass(frozen=True, slots=True)
class ReadOnlyRows:
    """The rows of a cache, read and not written: each run of a training step goes on from the same tokens.

    Args:
        cache: Holds the rows.
    """

    cache: LoopedCache

    def slot(self, stage: Stage, layer_idx: int, loop_idx: int = 0) -> KeyValueSlot:
        """Return the row of a layer in a loop."""
        return _ReadOnlyRow(self.cache.slot(stage, layer_idx, loop_idx))


@dataclass(frozen=True, slots=True)
class _ReadOnlyRow:
    row: SlotLayer

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row's tokens followed by the new ones: (batch, heads, tokens, dim) twice."""
        past_keys, past_values, num_past = self.row.keys, self.row.values, self.row.extent.num_tokens
        if past_keys is None or past_values is None:
            return keys, values
        return (
            torch.cat([past_keys[..., :num_past, :], keys], dim=-2),
            torch.cat([past_values[..., :num_past, :], values], dim=-2),
        )
