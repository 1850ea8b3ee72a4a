"""The tokens that are still looping, moved together, and their way into a cache that has a place for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopformers.model.cache import LoopedCache, SlotLayer, SlotSource

if TYPE_CHECKING:
    from loopformers.model.trunk import PreparedInputs
    from loopformers.nn.attention import AttentionContext, KeyValueSlot
    from loopformers.recurrence.slots import Stage

__all__ = ["Tokens"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Some tokens of a call, as a list and as a grid that is no larger than it must be.

    The grid has a line for each row of the batch that has a token left, and as many places as the fullest line; the
    layers run on the grid. Lines that are not full end in idle places, whose results are dropped.

    Attributes:
        prepared: The call.
        row: Row of each token, (tokens,), ascending.
        col: Position of each in the call, (tokens,).
        line: Line of each in the grid, (tokens,).
        place: Place of each in its line, (tokens,).
        rows: Row of each line, (lines,).
        inputs: The core's inputs, in the grid, (lines, places, dim).
        context: What the layers share, for the grid.
        is_all: Whether no token has left: the grid is the call itself.
    """

    prepared: PreparedInputs
    row: Tensor
    col: Tensor
    line: Tensor
    place: Tensor
    rows: Tensor
    inputs: Tensor
    context: AttentionContext
    is_all: bool

    @classmethod
    def all(cls, prepared: PreparedInputs) -> Tokens:
        """Return all tokens of a call."""
        batch_size, num_tokens = prepared.inputs.shape[:2]
        rows = torch.arange(batch_size, device=prepared.inputs.device)
        row = rows.repeat_interleave(num_tokens)
        col = torch.arange(num_tokens, device=rows.device).repeat(batch_size)
        return cls(prepared, row, col, row, col, rows, prepared.inputs, prepared.context, True)

    def only(self, stays: Tensor) -> Tokens:
        """Return the tokens that stay, by a boolean each, (tokens,); at least one does."""
        row, col = self.row[stays], self.col[stays]
        inputs = self.prepared.inputs
        if inputs.shape[1] == 1:
            line, place = torch.arange(len(row), device=row.device), torch.zeros_like(row)
            rows, columns = row, col[:, None]
        else:
            rows, line, counts = row.unique_consecutive(return_inverse=True, return_counts=True)
            first = counts.cumsum(0) - counts
            place = torch.arange(len(row), device=row.device) - first[line]
            columns = col[first][:, None].repeat(
                1, int(counts.max())
            )  # an idle place looks like its line's first token
            columns[line, place] = col
        context = _context(self.prepared, rows, columns)
        return Tokens(self.prepared, row, col, line, place, rows, inputs[rows[:, None], columns], context, False)

    def flat(self, grid: Tensor) -> Tensor:
        """Return the tokens of a grid, (lines, places, dim) -> (tokens, dim)."""
        return grid.flatten(0, 1) if self.is_all else grid[self.line, self.place]

    def gridded(self, flat: Tensor) -> Tensor:
        """Put tokens into the grid, (tokens, dim) -> (lines, places, dim); idle places hold zeros."""
        if self.is_all:
            return flat.unflatten(0, self.prepared.inputs.shape[:2])
        grid = flat.new_zeros(self.inputs.shape)
        grid[self.line, self.place] = flat
        return grid

    def without_padding(self, leaves: Tensor) -> Tensor:
        """Let padding leave, too. `leaves`: a boolean each, (tokens,)."""
        valid = self.prepared.valid
        if valid is None:
            return leaves
        return leaves | ~valid[:, -self.prepared.inputs.shape[1] :][self.row, self.col]

    def slots(self, cache: LoopedCache) -> SlotSource:
        """Return where these tokens' layers find their rows of a cache."""
        return cache if self.is_all else _Slots(self, cache)

    def first_slot(self, cache: LoopedCache, loop_idx: int) -> KeyValueSlot:
        """Return the first layer's row in a loop that these tokens enter and do not run: it takes, and gives nothing back."""
        return _Taking(self.slots(cache).slot("core", 0, loop_idx))

    @property
    def context_of_new(self) -> AttentionContext:
        """What the layers share where these tokens' keys are the only ones."""
        return replace(self.context, key_rotary=self.context.rotary)


def _context(prepared: PreparedInputs, rows: Tensor, columns: Tensor) -> AttentionContext:
    """Return what the layers share, for a grid of tokens: rows (lines,) and columns (lines, places)."""
    whole, num_new = prepared.context, prepared.inputs.shape[1]
    line = rows[:, None]

    def mask_of(mask: Tensor | None) -> Tensor | None:
        if mask is not None:
            return mask.expand(len(prepared.inputs), -1, -1, -1)[line, 0, columns][:, None]
        if num_new == 1:  # its one query sees every key
            return None
        # Several new tokens have no mask where there are no others, and attention is causal.
        return (torch.arange(num_new, device=rows.device) <= columns[..., None])[:, None]

    def tables_of(tables: tuple[Tensor, Tensor] | None, at: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
        return None if tables is None else (tables[0][:, 0][at][:, None], tables[1][:, 0][at][:, None])

    return replace(
        whole,
        masks={window: mask_of(mask) for window, mask in whole.masks.items()},
        rotary=tables_of(whole.rotary, (line, columns)),
        key_rotary=tables_of(whole.key_rotary, (rows,)),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Slots:
    """The rows of a cache, as some tokens of a call see them."""

    tokens: Tokens
    cache: LoopedCache

    def slot(self, stage: Stage, layer_idx: int, loop_idx: int = 0) -> KeyValueSlot:
        """Return a row that takes these tokens, and those that have left from the loop before."""
        row = self.cache.slot(stage, layer_idx, loop_idx)
        is_written = row.num_filled > self.cache.get_seq_length()  # by tokens that entered it, or in the coda
        return _Slot(self.tokens, row, row if is_written or row.below is None else row.below)


@dataclass(frozen=True, eq=False, slots=True)
class _Slot:
    tokens: Tokens
    row: SlotLayer
    earlier: SlotLayer
    """Holds what tokens that have left had last: the row itself where they have written it, or else the row below."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take (lines, heads, places, dim) twice, and return all keys and values of these lines."""
        tokens = self.tokens
        new = []
        for old, now in zip(self.earlier.newest(), (keys, values), strict=True):
            merged = old.clone()
            merged[tokens.row, :, tokens.col] = now[tokens.line, :, tokens.place]
            new.append(merged)
        every = self.row.update(*new)
        if len(tokens.rows) == len(merged):
            return every
        return every[0][tokens.rows], every[1][tokens.rows]


@dataclass(frozen=True, eq=False, slots=True)
class _Taking:
    """A row that is written and not read."""

    row: KeyValueSlot

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write, and return what was given."""
        self.row.update(keys, values)
        return keys, values
