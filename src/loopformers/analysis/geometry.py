"""Geometry of a loop's states, and of the way from loop to loop. Every measure is exact and takes a batch of sequences.

A mean over no value (one token, no movement) is nan.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "anisotropy",
    "curvature",
    "max_prompt_entropy",
    "prompt_entropy",
    "relative_change",
    "state_norm",
    "update_cosine",
]


# -- of one loop, along each sequence: (batch, seq, dim) -> (batch,) ---------------------------------------------


def anisotropy(states: Tensor) -> Tensor:
    """Return the mean cosine similarity of all pairs of different tokens of a sequence (LoopFormer, arXiv 2602.11451).

    1: all tokens point the same way; 0: no direction is preferred. Computed as (|Σ u_i|² - Σ |u_i|²) / (S (S - 1)) with unit
    vectors u_i; a zero vector has cosine 0 with all.

    Args:
        states: (batch, seq, dim).
    """
    unit = _unit(states)
    num_tokens = states.shape[-2]
    pairs = unit.sum(dim=-2).square().sum(dim=-1) - unit.square().sum(dim=(-2, -1))
    return pairs / (num_tokens * (num_tokens - 1)) if num_tokens > 1 else pairs * torch.nan


def curvature(states: Tensor) -> Tensor:
    """Return the mean turn along a sequence in radians: `arccos(cos(v_i, v_{i+1}))` with `v_i = z_{i+1} - z_i`.

    0: tokens lie on a line; π/2: each difference is orthogonal to the last. Places where a difference is zero have no angle
    and are left out.

    Args:
        states: (batch, seq, dim).
    """
    differences = states.diff(dim=-2)
    unit = _unit(differences)
    cosines = (unit[..., 1:, :] * unit[..., :-1, :]).sum(dim=-1).clamp(-1, 1)
    moves = differences.abs().amax(dim=-1) > 0
    angles = cosines.acos().masked_fill(~(moves[..., 1:] & moves[..., :-1]), torch.nan)
    return angles.nanmean(dim=-1)


def prompt_entropy(states: Tensor) -> Tensor:
    """Return how evenly a sequence's tokens spread over directions, in nats: `-Σ λ ln λ`.

    λ are the eigenvalues of `K / trace K`, `K = Z Zᵀ`, where the rows of Z are the tokens' states, less their mean over the
    sequence, scaled to length 1. 0: one direction; at most `max_prompt_entropy`.

    Args:
        states: (batch, seq, dim).
    """
    rows = _unit(states - states.mean(dim=-2, keepdim=True))
    # Z Zᵀ and Zᵀ Z have the same eigenvalues but for zeros; the smaller one is cheaper.
    gram = rows @ rows.mT if rows.shape[-2] <= rows.shape[-1] else rows.mT @ rows
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    shares = torch.linalg.eigvalsh(gram).clamp(min=0) / trace.clamp(min=torch.finfo(gram.dtype).tiny)[..., None]
    return torch.special.entr(shares).sum(dim=-1)


def max_prompt_entropy(seq_len: int, dim: int) -> float:
    """Return `min(ln S, ln d)`, which prompt entropy is divided by to compare sequences of other lengths; nats."""
    return float(torch.log(torch.tensor(min(seq_len, dim), dtype=torch.float64)))


# -- from loop to loop, by token: (batch, seq, dim) -> (batch, seq) -----------------------------------------------


def state_norm(states: Tensor) -> Tensor:
    """Return `|h_t|`, the L2 norm of each token's state. `states`: (batch, seq, dim)."""
    return torch.linalg.vector_norm(states, dim=-1)


def relative_change(previous: Tensor, current: Tensor) -> Tensor:
    """Return `|h_t - h_{t-1}| / |h_t|` of each token: how far a loop moves it. 0: a fixed point.

    Args:
        previous: h_{t-1}, (batch, seq, dim).
        current: h_t, same shape.
    """
    return state_norm(current - previous) / state_norm(current)


def update_cosine(before: Tensor, previous: Tensor, current: Tensor) -> Tensor:
    """Return `cos(h_t - h_{t-1}, h_{t-1} - h_{t-2})` of each token; 0 where one of the two is zero.

    1: loops go on in one direction; 0: each takes a new one; -1: they go back and forth.

    Args:
        before: h_{t-2}, (batch, seq, dim).
        previous: h_{t-1}, same shape.
        current: h_t, same shape.
    """
    return (_unit(current - previous) * _unit(previous - before)).sum(dim=-1)


def _unit(vectors: Tensor) -> Tensor:
    """Scale to length 1; zero stays zero. Scaled by the largest entry first, so that tiny vectors do not underflow."""
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    return F.normalize(vectors / torch.where(largest > 0, largest, 1), dim=-1)
