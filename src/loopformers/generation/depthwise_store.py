"""Keys and values of rows that are in different loops: one tensor of all loops, what layers write into it, and how it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformers.model.cache import LoopedCache
from loopformers.nn.attention import AttentionFunction, KeyValueSlot

__all__ = ["DepthwiseStore", "EnteredSlot", "Entering", "attend_by_copies", "attend_by_views"]


class DepthwiseStore:
    """Keys and values of all loops in one tensor, (layers, loops, batch, tokens, 2, heads, dim): a row can be in any loop.

    What a token leaves in a layer lies together, so that it is written at once. Loops are filled as they are reached, so that
    what nobody reaches is never touched.
    """

    def __init__(self, cache: LoopedCache, num_loops: int, capacity: int) -> None:
        self.cache = cache
        self.num_layers = cache.layout.num_core_layers
        self.num_reached = 0
        first = cache.slot("core", 0).keys
        assert first is not None, "the prompt has been cached"
        self.batch_size, num_heads, _, head_dim = first.shape
        self.capacity = capacity
        self.rows = first.new_empty(self.num_layers, num_loops, self.batch_size, capacity, 2, num_heads, head_dim)

    def reach(self, num_loops: int, num_tokens: int) -> None:
        """See that the first `num_loops` loops hold what there is of the first `num_tokens` tokens."""
        for loop_idx in range(self.num_reached, num_loops):
            if loop_idx:
                self.rows[:, loop_idx, :, :num_tokens] = self.rows[:, loop_idx - 1, :, :num_tokens]
            # Zeros: a kernel weighs what it masks by 0, and 0 times the NaN that memory may hold is NaN.
            self.rows[:, loop_idx, :, num_tokens if loop_idx else 0 :] = 0
            for i in range(self.num_layers):
                slot = self.cache.slot("core", i, loop_idx)
                for store, mine in zip(self._of_slot(i, loop_idx), (slot.keys, slot.values), strict=True):
                    if mine is not None:
                        store[..., : slot.num_filled, :] = mine[..., : slot.num_filled, :]
        self.num_reached = max(self.num_reached, num_loops)

    def slot(self, layer_idx: int, places: Tensor) -> KeyValueSlot:
        """Return a cache row for one layer that takes a token of each running row.

        Args:
            layer_idx: Which layer.
            places: Of each row's token among those of all lines, `line * capacity + column`, (rows,).
        """
        return _Lines(self.rows[layer_idx].flatten(0, 1), places)

    def views(self, spans: Iterable[tuple[int, int, int, int]]) -> Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Return where keys and values of some rows lie, by layer: of each row (1, heads, tokens, dim).

        Args:
            spans: Loop, row, first token and end of each.
        """
        keys, values = [], []
        for loop_idx, row, first, end in spans:
            k, v = self.rows[:, loop_idx, row : row + 1, first:end].permute(3, 0, 1, 4, 2, 5)
            keys.append(k.unbind())
            values.append(v.unbind())
        return zip(zip(*keys, strict=True), zip(*values, strict=True), strict=True)

    def fill_deeper(self, row: int, column: int, num_loops: int) -> None:
        """Let a token's keys and values of its last loop stand in for those of deeper ones."""
        mine = self.rows[:, :, row, column]
        mine[:, num_loops : self.num_reached] = mine[:, num_loops - 1 : num_loops]

    def give_back(self, num_tokens: int) -> None:
        """Make the cache's rows of this tensor."""
        for loop_idx in range(self.num_reached):
            for i in range(self.num_layers):
                slot = self.cache.slot("core", i, loop_idx)
                slot.keys, slot.values = self._of_slot(i, loop_idx)
                slot.num_filled = num_tokens
                slot.is_initialized = True

    def _of_slot(self, layer_idx: int, loop_idx: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer in a loop, (batch, heads, tokens, dim) each."""
        keys, values = self.rows[layer_idx, loop_idx].permute(2, 0, 3, 1, 4)
        return keys, values


@dataclass(frozen=True, eq=False, slots=True)
class Entering:
    """A token that has left, with what its keys and values in the loop that it enters are made of.

    Attributes:
        row: Its row.
        column: Its place.
        loop_idx: The loop.
        inputs: The core's inputs, (1, dim).
        state: What it left with, (1, dim).
    """

    row: int
    column: int
    loop_idx: int
    inputs: Tensor
    state: Tensor


class EnteredSlot:
    """The first layer's rows of the loops that tokens enter and do not run, and of deeper ones: written, and not read."""

    def __init__(self, store: DepthwiseStore, entering: list[Entering]) -> None:
        self.store, self.entering = store, entering

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write (tokens, heads, 1, dim) twice, each into all loops from its own on, and return them."""
        for new, mine in zip(_of_tokens(keys, values), self.entering, strict=True):
            self.store.rows[0, mine.loop_idx : self.store.num_reached, mine.row, mine.column] = new
        return keys, values


@dataclass(frozen=True, eq=False, slots=True)
class _Lines:
    """One layer's keys and values, (lines, tokens, 2, heads, dim); a line is a row of the batch in a loop."""

    lines: Tensor
    places: Tensor

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token of each running row, (rows, heads, 1, dim) twice, and return all lines."""
        self.lines.flatten(0, 1).index_copy_(0, self.places, _of_tokens(keys, values))
        keys, values = self.lines.permute(2, 0, 3, 1, 4)
        return keys, values


def _of_tokens(keys: Tensor, values: Tensor) -> Tensor:
    """Put what one token each leaves together, (tokens, heads, 1, dim) twice -> (tokens, 2, heads, dim)."""
    return torch.stack([keys[:, :, 0], values[:, :, 0]], dim=1)


def attend_by_copies(attention: AttentionFunction, line: Tensor, num_keys: int) -> AttentionFunction:
    """Return an attention function that copies the running rows' lines together: few kernels, for an accelerator."""

    def function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        key, value = (x[:, :, :num_keys].index_select(0, line) for x in (key, value))
        return attention(module, query, key, value, mask, **options)

    return function


def attend_by_views(keys: Sequence[Tensor], values: Sequence[Tensor]) -> AttentionFunction:
    """Return SDPA that reads each running row's keys where they lie: no copies, which are what a CPU waits for.

    Args:
        keys: Of each row's text, (1, heads, tokens, dim).
        values: The same.
    """

    def function(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        *,
        scaling: float,
        sliding_window: int | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        shares_keys = query.shape[1] != key.shape[1]
        outputs = []
        for row, k, v in zip(query.split(1), keys, values, strict=True):
            if sliding_window is not None:
                k, v = k[:, :, -sliding_window:], v[:, :, -sliding_window:]
            outputs.append(F.scaled_dot_product_attention(row, k, v, scale=scaling, enable_gqa=shares_keys))
        return torch.cat(outputs).transpose(1, 2), None

    return function
