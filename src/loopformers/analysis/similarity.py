"""Similarity of loops over any number of tokens, from sums of fixed size: linear CKA and the plane in which loops move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loopformers.errors import ConfigError

__all__ = ["StateMoments", "linear_cka"]


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the linear centred kernel alignment of two representations of the same tokens, a scalar from 0 to 1.

    `|Yᵀ X|² / (|Xᵀ X| |Yᵀ Y|)` with Frobenius norms and columns centred over tokens (Kornblith et al. 2019, arXiv
    1905.00414, section 3). 1: equal up to rotation and one scale. nan where one is constant. The readable reference of
    `StateMoments.cka`.

    Args:
        x: (tokens, dim).
        y: (tokens, other dim).
    """
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


class StateMoments:
    """First and second moments of all loops' states together, in float64, summed up batch by batch.

    Exact: what is computed from them is what all tokens at once would give. States are taken relative to the first batch's
    mean, so that a large common part costs no digits.

    Args:
        num_loops: M.
        dim: Width of a state.
        max_bytes: Memory that the sums may take, 8 (M dim)² bytes.

    Raises:
        ConfigError: More would be needed.
    """

    def __init__(self, num_loops: int, dim: int, *, max_bytes: int = 1 << 31) -> None:
        width = num_loops * dim
        if 8 * width**2 > max_bytes:
            raise ConfigError(
                f"num_loops={num_loops} states of width {dim} need {8 * width**2 / 2**30:.1f} GiB of sums, more than the "
                f"{max_bytes / 2**30:.1f} GiB allowed; analyse at most {int((max_bytes / 8) ** 0.5 / dim)} loops"
            )
        self.num_loops, self.dim = num_loops, dim
        self.num_tokens = 0
        self._shift: Tensor | None = None
        self._sums = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros(width, width, dtype=torch.float64)

    def add(self, states: Sequence[Tensor]) -> None:
        """Take in a batch: every loop's states, (batch, seq, dim) each."""
        rows = torch.cat([state.flatten(0, -2).to("cpu", torch.float64) for state in states], dim=-1)
        if self._shift is None:
            self._shift = rows.mean(dim=0)
        rows = rows - self._shift
        self.num_tokens += len(rows)
        self._sums += rows.sum(dim=0)
        self._products.addmm_(rows.T, rows)

    @property
    def means(self) -> Tensor:
        """Mean state of each loop, (loops, dim)."""
        assert self._shift is not None, "moments of no tokens"
        return (self._shift + self._sums / self.num_tokens).view(self.num_loops, self.dim)

    @property
    def covariances(self) -> Tensor:
        """Covariance over tokens of every loop with every other, (loops, dim, loops, dim)."""
        mean = self._sums / self.num_tokens
        full = self._products / self.num_tokens - torch.outer(mean, mean)
        return full.view(self.num_loops, self.dim, self.num_loops, self.dim)

    def cka(self) -> Tensor:
        """Return the linear CKA of every two loops, (loops, loops); see `linear_cka`."""
        squares = self.covariances.square().sum(dim=(1, 3))
        scale = squares.diagonal().sqrt()
        return squares / torch.outer(scale, scale)

    def movement(self) -> Tensor:
        """Return the covariance of where loops take a token about the token's own mean over loops, (dim, dim).

        `1/M Σ_t E[(h_t - m)(h_t - m)ᵀ]`, `m = 1/M Σ_t h_t`: what tokens differ in does not count, what loops change does.
        """
        covariances = self.covariances
        within = torch.einsum("tatb->ab", covariances) - covariances.sum(dim=(0, 2)) / self.num_loops
        drift = self.means - self.means.mean(dim=0)
        return (within + drift.T @ drift) / self.num_loops
