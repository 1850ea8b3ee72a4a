"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves convention."""

from __future__ import annotations

import torch
from torch import Tensor

from loopformers.nn.frequencies import cosines_and_sines, geometric_frequencies

__all__ = ["apply_rotary", "rotary_tables"]


def rotary_tables(
    positions: Tensor, *, head_dim: int, theta: float, table_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles `p * theta^(-2k / head_dim)`.

    Angles are computed in float64, whatever the model's dtype, and anew in each call: there is no table to grow, cast or
    save.

    Args:
        positions: Token positions, (batch, seq), integers.
        head_dim: Size of a head; even.
        theta: Base of the geometric series of frequencies.
        table_dtype: Precision that the tables are rounded to (FLT's released code: bfloat16).
        dtype: Precision that they are returned in.

    Returns:
        Cosines and signed sines, two tensors (batch, 1, seq, head_dim), ready to broadcast over heads: the angles stand
        once for each half, and the second half's sines are negative.
    """
    frequencies = geometric_frequencies(theta, head_dim // 2, positions.device)
    rows = positions[:1] if positions.stride(0) == 0 else positions  # rows that were made by `expand` are one row
    tables = cosines_and_sines(rows[:, None], frequencies, table_dtype)
    cos, sin = (table.to(dtype).expand(len(positions), -1, -1, -1) for table in tables)
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head: `y1 = x1 cos + x2 sin`, `y2 = -x1 sin + x2 cos`.

    Both halves at once, `y = x cos + swap(x) (sin, -sin)`: the same products and sums in half the time.

    Args:
        x: Queries or keys, (batch, heads, seq, head_dim).
        tables: What `rotary_tables` returned for their positions.
    """
    cos, signed_sin = tables
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin
