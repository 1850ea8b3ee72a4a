"""Geometry on matrices whose value is known by hand, and against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from loopformers.analysis.geometry import (
    anisotropy,
    curvature,
    max_prompt_entropy,
    prompt_entropy,
    relative_change,
    state_norm,
    update_cosine,
)

STATES = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sequence(*tokens):
    return torch.tensor([tokens], dtype=torch.float64)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([(1, 0), (3, 0), (0, 2)], 1 / 3),  # cosines 1, 0, 0
        ([(1, 2), (2, 4), (5, 10)], 1.0),
        ([(1, 0, 0), (0, 1, 0), (0, 0, 4)], 0.0),
        ([(1, 0), (-1, 0)], -1.0),
        ([(0, 0), (1, 0), (1, 0)], 1 / 3),  # a zero vector has cosine 0 with all
    ],
)
def test_anisotropy_is_the_mean_cosine_of_pairs(tokens, expected):
    assert anisotropy(sequence(*tokens)).item() == pytest.approx(expected, abs=1e-12)


def test_anisotropy_equals_the_mean_over_pairs_written_out():
    for row, value in zip(STATES, anisotropy(STATES), strict=True):
        cosines = [F.cosine_similarity(row[i], row[j], dim=0) for i in range(7) for j in range(i)]
        torch.testing.assert_close(value, torch.stack(cosines).mean())


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([(0, 0), (1, 0), (3, 0), (4, 0)], 0.0),
        ([(0, 0), (1, 0), (1, 5)], math.pi / 2),
        ([(0, 0), (1, 0), (0, 0)], math.pi),
        ([(0, 0), (1, 0), (1, 1), (2, 2)], (math.pi / 2 + math.pi / 4) / 2),
        ([(0, 0), (0, 0), (1, 0), (1, 1)], math.pi / 2),  # no movement, no angle
    ],
)
def test_curvature_is_the_mean_turn(tokens, expected):
    assert curvature(sequence(*tokens)).item() == pytest.approx(expected, abs=1e-6)


def test_curvature_does_not_depend_on_scale():
    torch.testing.assert_close(curvature(STATES * 1e-200), curvature(STATES), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([(2, 1), (4, 9)], 0.0),  # two tokens, less their mean, lie on one line
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1)], math.log(2)),  # a centred triangle fills a plane evenly
        ([(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], math.log(3)),
        ([(1, 1), (-1, 1), (-1, -1), (1, -1), (0, 0)], math.log(2)),
        ([(3, 3), (3, 3)], 0.0),
    ],
)
def test_prompt_entropy_of_known_spectra(tokens, expected):
    assert prompt_entropy(sequence(*tokens)).item() == pytest.approx(expected, abs=1e-9)


def test_prompt_entropy_has_weights_of_the_spectrum():
    # Three tokens along one axis and two along another: eigenvalues 3/5 and 2/5. Their mean is zero.
    tokens = sequence((2, 0), (1, 0), (-3, 0), (0, 1), (0, -1))
    expected = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert prompt_entropy(tokens).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shape", [(3, 7, 24), (3, 24, 7)])
def test_prompt_entropy_is_that_of_the_token_by_token_matrix(shape):
    states = STATES.reshape(shape)
    for row, value in zip(states, prompt_entropy(states), strict=True):
        z = F.normalize(row - row.mean(dim=0), dim=-1)
        kernel = z @ z.T
        spectrum = torch.linalg.eigvalsh(kernel / kernel.trace())
        spectrum = spectrum[spectrum > 1e-14]
        torch.testing.assert_close(value, -(spectrum * spectrum.log()).sum())
        assert value <= max_prompt_entropy(*shape[1:]) == pytest.approx(math.log(7))


def test_movement_by_hand():
    before, previous, current = (sequence(token) for token in [(0.0, 0.0), (3.0, 0.0), (3.0, 4.0)])
    assert state_norm(current).tolist() == [[5.0]]
    assert relative_change(previous, current).tolist() == [[0.8]]
    assert relative_change(current, current).tolist() == [[0.0]]
    assert update_cosine(before, previous, current).tolist() == [[0.0]]
    assert update_cosine(before, previous, 7 * previous).item() == pytest.approx(1.0)
    assert update_cosine(before, previous, before).item() == pytest.approx(-1.0)
    assert update_cosine(before, previous, previous).item() == 0.0


def test_a_mean_over_nothing_is_not_a_number():
    assert anisotropy(STATES[:, :1]).isnan().all()
    assert curvature(STATES[:, :2]).isnan().all()
    assert curvature(sequence((1, 2), (1, 2), (1, 2))).isnan().all()
