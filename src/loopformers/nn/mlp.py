"""Feed-forward blocks: GELU, squared ReLU and SwiGLU."""

from __future__ import annotations

from typing import Literal, assert_never, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from loopformers.nn.init import as_role

__all__ = ["ACTIVATIONS", "MLP", "Activation"]

Activation = Literal["gelu", "relu2", "swiglu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


class MLP(nn.Module):
    """`W_down act(W_up x)`, with `act` one of exact GELU, relu(.)^2, or SwiGLU's `silu(W_gate x) * (W_up x)`.

    Args:
        hidden_size: Width of input and output.
        intermediate_size: Width between the projections.
        activation: Which of the three.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        if activation == "swiglu":
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = as_role("output", nn.Linear(intermediate_size, hidden_size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, dim) to (batch, seq, dim)."""
        match self.activation:
            case "gelu":
                hidden = F.gelu(self.up_proj(x))
            case "relu2":
                hidden = F.relu(self.up_proj(x)).square()
            case "swiglu":
                hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
            case _:
                assert_never(self.activation)
        return self.down_proj(hidden)
