"""Sums over batches against formulas that see all tokens at once."""

from __future__ import annotations

import pytest
import torch

from loopformers import ConfigError
from loopformers.analysis.similarity import StateMoments, linear_cka


def tokens(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments_of(loops, sizes):
    moments = StateMoments(len(loops), loops[0].shape[-1])
    start = 0
    for size in sizes:
        moments.add([loop[start : start + size].unsqueeze(0) for loop in loops])
        start += size
    return moments


def test_cka_by_hand():
    x, y = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    assert linear_cka(x, y).item() == pytest.approx(1 / 4)  # (yᵀx)² / (xᵀx · yᵀy) = 1 / (2 · 2)
    orthogonal = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    assert linear_cka(orthogonal[:, :1], orthogonal[:, 1:]).item() == 0.0
    # Of two directions with variances 4 and 1, one is kept: |Yᵀ X| = 4, |Xᵀ X| = sqrt(16 + 1), |Yᵀ Y| = 4, up to one factor.
    both = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert linear_cka(both, both[:, :1]).item() == pytest.approx(4 / 17**0.5)


def test_cka_ignores_rotation_scale_and_shift_and_nothing_else():
    x = tokens(50, 6)
    turn = torch.linalg.qr(tokens(6, 6, seed=1)).Q
    assert linear_cka(x, 3 * x @ turn + 7).item() == pytest.approx(1.0)
    assert linear_cka(x, x @ torch.diag(torch.tensor([9.0, 1, 1, 1, 1, 1], dtype=torch.float64))).item() < 0.9


def test_cka_is_the_normalised_hilbert_schmidt_criterion():
    x, y = tokens(31, 5), tokens(31, 3, seed=1)
    centre = torch.eye(31, dtype=torch.float64) - 1 / 31
    k, l = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre  # noqa: E741
    expected = (k * l).sum() / ((k * k).sum() * (l * l).sum()).sqrt()
    torch.testing.assert_close(linear_cka(x, y), expected)


def test_accumulated_cka_is_exact_for_any_batches_and_a_large_common_part():
    shared = tokens(60, 5)
    loops = [shared + 0.5 * t * tokens(60, 5, seed=t + 1) + 1e4 * (t + 1) for t in range(4)]
    expected = torch.stack([torch.stack([linear_cka(x, y) for y in loops]) for x in loops])
    for sizes in ([60], [1, 20, 39], [7] * 8 + [4]):
        torch.testing.assert_close(moments_of(loops, sizes).cka(), expected, rtol=1e-9, atol=0)


def test_means_and_covariances_are_those_of_all_tokens():
    loops = [tokens(40, 3, seed=t) + t for t in range(3)]
    moments = moments_of(loops, [11, 29])
    torch.testing.assert_close(moments.means, torch.stack([loop.mean(dim=0) for loop in loops]))
    wide = torch.cat(loops, dim=1)
    torch.testing.assert_close(moments.covariances.reshape(9, 9), torch.cov(wide.T, correction=0))


def test_movement_is_the_covariance_about_each_tokens_own_mean():
    loops = torch.stack([tokens(40, 3, seed=t) * (t + 1) + t for t in range(4)])
    away = (loops - loops.mean(dim=0)).flatten(0, 1)
    torch.testing.assert_close(moments_of(list(loops), [17, 23]).movement(), away.T @ away / len(away))


def test_tokens_that_differ_and_do_not_move_have_no_movement():
    still = tokens(40, 3)
    assert moments_of([still, still, still], [40]).movement().abs().max() < 1e-12


def test_a_constant_loop_is_similar_to_nothing():
    cka = moments_of([tokens(20, 3), torch.ones(20, 3, dtype=torch.float64)], [20]).cka()
    assert cka[0, 0].item() == pytest.approx(1.0)
    assert cka[0, 1].isnan()


def test_sums_beyond_the_memory_allowed_are_refused_with_what_would_fit():
    with pytest.raises(ConfigError, match=r"num_loops=12 .* need .* GiB .* at most 8 loops"):
        StateMoments(12, 2048, max_bytes=8 * (8 * 2048) ** 2)
    assert StateMoments(8, 24, max_bytes=8 * (8 * 24) ** 2).num_tokens == 0
