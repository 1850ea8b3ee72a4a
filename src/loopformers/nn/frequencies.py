"""Tables of sines and cosines: frequencies and angles in float64, rounded once, so that every processor makes the same table.

In float32 the power, the angle and the sine are each rounded, and each instruction set rounds them differently, by up to 5
units in the last place.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cosines_and_sines", "geometric_frequencies"]


def geometric_frequencies(base: float, count: int, device: torch.device) -> Tensor:
    """Return `base^(-k/count)`, k = 0 .. count - 1, in float64: (count,).

    On a CPU the powers are Python's, since torch's differ in the last bit between instruction sets, and an angle multiplies
    that bit by a position. An accelerator computes its own: a copy from the host would make the host wait for it, and
    could not be captured in a CUDA graph. One without float64 (MPS) gets float32.
    """
    if device.type == "cpu":
        return torch.tensor([base ** (-k / count) for k in range(count)], dtype=torch.float64)
    exponents = torch.arange(count, dtype=_widest(device), device=device) / -count
    return base**exponents


def cosines_and_sines(values: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of `values * frequencies`, rounded once.

    Args:
        values: Positions or times, (..).
        frequencies: What `geometric_frequencies` returned, (count,).
        dtype: What the tables are rounded to.

    Returns:
        Two tensors (.., count).
    """
    angles = values.to(frequencies.dtype)[..., None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
