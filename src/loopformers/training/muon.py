"""Muon for CPU and accelerators: `torch.optim.Muon` whose orthogonalisation runs in float32 on a CPU.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by a nearly
orthogonal matrix of the same row and column space, found with five Newton-Schulz steps. torch runs these in bfloat16.
Most CPUs emulate bfloat16: with AVX2 alone, one thread, five steps on a 256 x 64 matrix take 4.3 ms in bfloat16 and
0.35 ms in float32, on a 768 x 768 matrix 3.7 s and 0.13 s. With bfloat16 instructions the same take 0.47 against 0.33 ms
and 0.07 against 0.14 s, so float32 costs little there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["Muon", "orthogonalise"]


def orthogonalise(
    matrix: Tensor,
    *,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    num_steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Map a matrix to one with the same singular vectors and singular values near 1.

    Starting from X = M / ||M||_F, each Newton-Schulz step is X <- a X + (b A + c A A) X with A = X X^T. The default
    (a, b, c) leave the singular values between about 0.7 and 1.2 instead of at 1, and get there in five steps.

    Args:
        matrix: Shape (rows, cols).
        coefficients: (a, b, c).
        num_steps: Newton-Schulz steps.
        eps: Smallest norm that is divided by.
        dtype: Dtype of the iteration.

    Returns:
        Shape (rows, cols), in `dtype`.
    """
    a, b, c = coefficients
    wide = matrix.size(0) <= matrix.size(1)  # iterate on the side whose Gram matrix is smaller
    x = matrix.to(dtype) if wide else matrix.to(dtype).T
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`; parameters on a CPU are orthogonalised in float32, all others by torch itself.

    Parameters that are divided over ranks are gathered for it. Groups may hold CPU parameters or accelerator parameters, not
    both. Arguments as `torch.optim.Muon`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one update."""
        if not all(
            p.device.type == "cpu" or isinstance(p, DTensor) for group in self.param_groups for p in group["params"]
        ):
            loss: float | None = super().step(closure)
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place: the same formulas, in the same order, as `torch.optim.Muon`."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        momentum: float = group["momentum"]
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        direction = p.grad.lerp(buffer, momentum) if group["nesterov"] else buffer  # type: ignore[union-attr]
        # Rows and columns of the whole matrix are made orthogonal: a rank that holds a part of it gathers the rest.
        whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
        update = orthogonalise(
            whole,
            coefficients=group["ns_coefficients"],
            num_steps=group["ns_steps"],
            eps=group["eps"],
            dtype=torch.float32 if p.device.type == "cpu" else torch.bfloat16,
        )
        if isinstance(p, DTensor):  # each rank has made the whole update, and keeps its part
            update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
        rows, cols = p.shape
        scale = (
            0.2 * math.sqrt(max(rows, cols))
            if group["adjust_lr_fn"] == "match_rms_adamw"
            else math.sqrt(max(1, rows / cols))
        )
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(p.dtype), alpha=-group["lr"] * scale)
