from __future__ import annotations

import pytest
import torch

from loopformers.training.muon import Muon, orthogonalise

torch_orthogonalise = pytest.importorskip("torch.optim._muon")._zeropower_via_newtonschulz


def low_rank_safe_matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 24), (96, 24), (24, 96), (7, 5)])
def test_bfloat16_iteration_equals_torch(shape: tuple[int, int]) -> None:
    matrix = low_rank_safe_matrix(*shape)
    theirs = torch_orthogonalise(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    ours = orthogonalise(matrix, dtype=torch.bfloat16)
    # The products are the same; only the roundings of the division by the norm may differ.
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("shape", [(24, 24), (96, 24), (24, 96)])
def test_float32_iteration_equals_torch_to_bfloat16_tolerance(shape: tuple[int, int]) -> None:
    matrix = low_rank_safe_matrix(*shape)
    theirs = torch_orthogonalise(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    ours = orthogonalise(matrix)
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() / theirs.norm() < 0.03  # bfloat16 has 8 bits: 0.4 % a product, 15 products


def test_singular_values_end_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(low_rank_safe_matrix(12, 40)))
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"weight_decay": 0.3}, {"adjust_lr_fn": "match_rms_adamw"}]
)
def test_cpu_steps_equal_torch_to_bfloat16_tolerance(options: dict[str, object]) -> None:
    start = low_rank_safe_matrix(30, 10, seed=1)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, **options}
    mine, torchs = Muon([ours], **settings), torch.optim.Muon([theirs], **settings)
    for step in range(4):
        ours.grad = low_rank_safe_matrix(30, 10, seed=10 + step)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() / moved < 0.03
    torch.testing.assert_close(mine.state[ours]["momentum_buffer"], torchs.state[theirs]["momentum_buffer"])


def test_parameters_without_gradient_stay_and_a_closure_is_called() -> None:
    p = torch.nn.Parameter(torch.ones(3, 2))
    assert Muon([p], lr=0.1).step(lambda: 1.5) == 1.5
    torch.testing.assert_close(p.detach(), torch.ones(3, 2))
