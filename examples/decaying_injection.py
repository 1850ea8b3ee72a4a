"""A recurrence of your own: the state decays by the loop's step size, and the inputs come in anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformers.model.presets import PRESETS
from loopformers.nn.init import as_role
from loopformers.recurrence.stream import STREAMS, Norm, Stream


class Decaying(Stream):
    """`x = exp(-Δ softplus(a)) h + B norm(e)`: what a loop wrote fades in model time, so no state can grow without end."""

    uses_step_size = True

    def __init__(self, hidden_size: int, norm: Norm) -> None:
        super().__init__(hidden_size, norm)
        self.decay = nn.Parameter(torch.zeros(hidden_size))  # a: softplus(0) = ln 2, so a run of Δ = 1 halves the state
        self.inputs_proj = as_role("identity", nn.Linear(hidden_size, hidden_size, bias=False))  # B

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the stream at the start of a loop after the first."""
        kept = torch.exp(-step_size * F.softplus(self.decay))
        return kept * state + self.inputs_proj(self.norm(inputs))


STREAMS["decaying"] = Decaying
PRESETS["lt-decaying"] = {**PRESETS["lt"], "stream": "decaying"}
