"""Conditioning: a loop is told where it stands in time and how far it jumps (LoopFormer, arXiv 2602.11451, section 3.1)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from loopformers.nn.frequencies import cosines_and_sines, geometric_frequencies
from loopformers.nn.init import as_role

__all__ = ["CONDITIONINGS", "Conditioning", "ConditioningKind", "frequency_embedding"]

ConditioningKind = Literal["none", "loop_index", "time", "time_and_step"]
CONDITIONINGS: tuple[str, ...] = get_args(ConditioningKind)

NUM_FREQUENCIES = 128


def frequency_embedding(values: Tensor) -> Tensor:
    """Return `[cos(u w), sin(u w)]` with `w_k = 10000^(-k/128)`, k = 0..127, each entry the nearest float32.

    Args:
        values: u, (loops,).

    Returns:
        (loops, 256), float32.
    """
    frequencies = geometric_frequencies(10000.0, NUM_FREQUENCIES, values.device)
    return torch.cat(cosines_and_sines(values, frequencies, torch.float32), dim=-1)


class Embedder(nn.Sequential):
    """Linear, SiLU, Linear on a frequency embedding: (loops, 256) -> (loops, dim)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(
            as_role("embedder", nn.Linear(2 * NUM_FREQUENCIES, hidden_size)),
            nn.SiLU(),
            as_role("embedder", nn.Linear(hidden_size, hidden_size)),
        )


class Conditioning(nn.Module):
    """Turns a schedule into each layer's gates and scales.

        c_i = MLP_t(freq(t_i)) + MLP_Δ(freq(Δ_i));   g_a, g_m, s_a, s_m = Linear(SiLU(c_i)) per layer

    All loops of a run are conditioned in one call: a schedule is the same for every row of a batch, so the cost is that
    of one token per loop.

    Args:
        hidden_size: Width of the stream.
        num_layers: Layers to modulate.
        kind: `loop_index` (integers 0, 1, .., as TMLT), `time` (t in [0, 1]) or `time_and_step` (t and Δ).
        time_scale: Factor on t and Δ before `freq`. At 1, the papers' value, loops look nearly alike at the start.
    """

    def __init__(self, hidden_size: int, num_layers: int, kind: ConditioningKind, time_scale: float) -> None:
        super().__init__()
        self.kind = kind
        self.time_scale = time_scale
        self.time_embedder = Embedder(hidden_size)
        if kind == "time_and_step":
            self.step_embedder = Embedder(hidden_size)
        self.modulation = nn.ModuleList(
            as_role("modulation", nn.Linear(hidden_size, 4 * hidden_size)) for _ in range(num_layers)
        )

    def forward(self, times: Tensor, step_sizes: Tensor) -> Tensor:
        """Return the modulation of every loop and layer, (loops, layers, 4, dim), in the order of `Modulation`'s fields.

        Args:
            times: Where each loop starts, (loops,), float32.
            step_sizes: How far each jumps, (loops,), float32.
        """
        first: Any = self.time_embedder[0]
        dtype = first.bias.dtype  # the weight's may be that of a quantised matrix, in which nothing can be computed
        if self.kind == "loop_index":
            times = torch.arange(len(times), dtype=torch.float32, device=times.device)
        code = self.time_embedder(frequency_embedding(times * self.time_scale).to(dtype))
        if self.kind == "time_and_step":
            code = code + self.step_embedder(frequency_embedding(step_sizes * self.time_scale).to(dtype))
        code = nn.functional.silu(code)
        return torch.stack([linear(code).unflatten(-1, (4, -1)) for linear in self.modulation], dim=1)
