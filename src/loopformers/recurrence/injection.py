"""Injections: what the layers of a loop see of the previous loop's state (FLT, arXiv 2605.18797, section 3).

Add one: write a class with this contract and enter it in `INJECTIONS`; it may own parameters.
"""

from __future__ import annotations

from torch import Tensor, nn

from loopformers.recurrence.stream import Norm

__all__ = ["INJECTIONS", "Injection", "NoInjection", "QueryAll", "QueryFirst", "ResidualAll"]


class Injection(nn.Module):
    """Contract: called before each layer of each loop after the first.

    Args:
        hidden_size: Width of the stream.
        norm: Norm of the model's loops; the identity in models that chain raw states.
    """

    def __init__(self, hidden_size: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, layer_idx: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the stream that the layer gets and the signal that its query is made of (None: the stream).

        Args:
            layer_idx: Index of the layer in the looped stack.
            x: Stream before the layer, (batch, seq, dim).
            state: State after the previous loop, same shape.
        """
        raise NotImplementedError


class NoInjection(Injection):
    """Nothing more than the stream's start carries (LT, LT_i)."""

    def forward(self, layer_idx: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Leave the stream alone."""
        return x, None


class QueryFirst(Injection):
    """The first layer takes its query from the state (LT_ia)."""

    def forward(self, layer_idx: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hand the state to layer 0."""
        return x, state if layer_idx == 0 else None


class QueryAll(Injection):
    """Every layer takes its query from the state (FLT)."""

    def forward(self, layer_idx: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hand the state to every layer."""
        return x, state


class ResidualAll(Injection):
    """Every layer first sets `x <- norm(x + h)` (FLT_res)."""

    def forward(self, layer_idx: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add the state to the stream."""
        return self.norm(x + state), None


INJECTIONS: dict[str, type[Injection]] = {
    "none": NoInjection,
    "query_first": QueryFirst,
    "query_all": QueryAll,
    "residual_all": ResidualAll,
}
