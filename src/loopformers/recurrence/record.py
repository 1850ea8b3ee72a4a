"""What a run leaves behind: states, norms and gradients of every loop, kept by an observer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LoopDiagnostics", "LoopRecord", "mean_token_norm"]


def mean_token_norm(x: Tensor) -> Tensor:
    """Return the mean over tokens of the L2 norm, a scalar. `x`: (batch, seq, dim)."""
    return torch.linalg.vector_norm(x, dim=-1).mean()


@dataclass(frozen=True, slots=True)
class LoopDiagnostics:
    """How loops behave in one run.

    Attributes:
        residual_norms: Mean over tokens of the L2 norm of the residual stream before the closing norm, (loops,). Divide by
            sqrt(dim) for a number that does not depend on the width.
        state_cosines: Mean over tokens of the cosine between a loop's state and the one before, (loops - 1,). Near 1: the
            loops have come to a fixed point.
        gradient_norms: L2 norm of the loss's gradient by the loop's output, the residual stream after its last layer,
            (loops,). Zero until the backward pass has been there.
    """

    residual_norms: Tensor
    state_cosines: Tensor
    gradient_norms: Tensor


class LoopRecord:
    """An observer that keeps what was asked for.

    Args:
        num_loops: Loops of the run.
        states: Keep every loop's state.
        residual_norms: Keep the mean token norm of every loop's residual stream.
        diagnostics: Keep `LoopDiagnostics`. Gradients are caught by hooks that are set in the forward pass: set after it
            they would never fire.
    """

    def __init__(
        self, num_loops: int, *, states: bool = False, residual_norms: bool = False, diagnostics: bool = False
    ) -> None:
        self._states: list[Tensor] | None = [] if states else None
        self._norms: list[Tensor] | None = [] if residual_norms or diagnostics else None
        self._cosines: list[Tensor] | None = [] if diagnostics else None
        self._gradient_norms = torch.zeros(num_loops) if diagnostics else None
        self._previous: Tensor | None = None

    def __call__(self, loop_idx: int, residual: Tensor, state: Tensor) -> None:
        """Keep this loop's."""
        if self._states is not None:
            self._states.append(state)
        if self._norms is not None:
            self._norms.append(mean_token_norm(residual.detach()))
        if self._cosines is not None:
            if self._previous is not None:
                self._cosines.append(F.cosine_similarity(state.detach(), self._previous, dim=-1).mean())
            self._previous = state.detach()
        if self._gradient_norms is not None and residual.requires_grad:
            self._gradient_norms = norms = self._gradient_norms.to(residual.device)

            def catch(gradient: Tensor) -> None:
                norms[loop_idx] = torch.linalg.vector_norm(gradient)

            residual.register_hook(catch)

    @property
    def states(self) -> tuple[Tensor, ...] | None:
        """Every loop's state, (batch, seq, dim) each."""
        return None if self._states is None else tuple(self._states)

    @property
    def residual_norms(self) -> Tensor | None:
        """Every loop's mean token norm, (loops,)."""
        return None if self._norms is None else torch.stack(self._norms)

    @property
    def diagnostics(self) -> LoopDiagnostics | None:
        """The diagnostics; their gradient norms fill in the backward pass."""
        if self._cosines is None or self._gradient_norms is None or self.residual_norms is None:
            return None
        cosines = torch.stack(self._cosines) if self._cosines else self.residual_norms.new_zeros(0)
        return LoopDiagnostics(self.residual_norms, cosines, self._gradient_norms)
