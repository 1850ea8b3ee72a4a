"""The loop: `(r_i, h_i) = L(e, h_{i-1}, i, c_i)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Checkpoint", "Loop", "Observer", "unroll"]

Loop = Callable[[Tensor, Tensor | None, int, Tensor | None], tuple[Tensor, Tensor]]
"""(inputs, previous state or None, loop index, what the loop is told) -> (residual stream before the closing norm, state)."""

Checkpoint = Callable[..., tuple[Tensor, Tensor]]
"""`torch.utils.checkpoint.checkpoint` or its like: (function, *arguments) -> the function's value."""


class Observer(Protocol):
    """Sees every loop of a run; the way in for diagnostics and analysis."""

    def __call__(self, loop_idx: int, residual: Tensor, state: Tensor) -> None:
        """Look at the residual stream before the closing norm and at the state, (batch, seq, dim) each."""
        ...


def unroll(
    loop: Loop,
    inputs: Tensor,
    num_loops: int,
    *,
    told: Tensor | None = None,
    checkpoint: Checkpoint | None = None,
    num_kept_loops: int = 0,
    num_grad_loops: int | None = None,
    observer: Observer | None = None,
    start: tuple[int, Tensor] | None = None,
) -> Tensor:
    """Run `loop` and return the last state.

    With a checkpoint each loop keeps its inputs alone and is run again in the backward pass. Everything that a loop
    depends on is passed to it by value, so the second run sees the state that the first one saw; a loop that closed over
    a changing `state` would see the final one, and its gradients would be wrong while the loss is right.

    Args:
        loop: One pass through the stack.
        inputs: What every loop may see, (batch, seq, dim).
        num_loops: How often, at least 1.
        told: What each loop is told, such as its modulation, (loops, ...); None: nothing.
        checkpoint: How to save activations; None: keep them all.
        num_kept_loops: Loops, counted from the last, that keep their activations all the same.
        num_grad_loops: Loops, counted from the last, that gradients flow through; the state that enters the first of
            them is a constant. None: all.
        observer: Called after each loop.
        start: Loops that are done already, and the state that they left; None: none.
    """
    num_done, state = (0, None) if start is None else start
    for loop_idx in range(num_done, num_loops):
        given = (inputs, state, loop_idx, None if told is None else told[loop_idx])
        left = num_loops - loop_idx
        with torch.set_grad_enabled(torch.is_grad_enabled() and (num_grad_loops is None or left <= num_grad_loops)):
            if checkpoint is None or left <= num_kept_loops or not torch.is_grad_enabled():
                residual, state = loop(*given)
            else:
                residual, state = checkpoint(loop, *given)
        if observer is not None:
            observer(loop_idx, residual, state)
    assert state is not None, "a schedule has at least one loop"
    return state
