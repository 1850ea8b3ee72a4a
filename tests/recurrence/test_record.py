"""Diagnostics of a run against direct computations (fault 15: charts that stay empty)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from loopformers.testing import tiny_model

IDS = torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("preset", ["lt", "flt", "loopformer"])
def test_gradient_norms_are_those_of_each_loops_output(preset, checkpointed):
    model = tiny_model(preset, num_loops=4, objective="last_loop").double().train()
    by_hand = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: (out.retain_grad(), by_hand.append(out))[1]
    )
    model(IDS, labels=IDS).loss.backward()
    hook.remove()
    expected = torch.stack([x.grad.norm() for x in by_hand])
    if checkpointed:
        model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    out = model(IDS, labels=IDS, output_loop_diagnostics=True)
    assert torch.equal(out.loop_diagnostics.gradient_norms, torch.zeros(4))
    out.loss.backward()
    torch.testing.assert_close(out.loop_diagnostics.gradient_norms.double(), expected, rtol=1e-6, atol=0)
    assert (out.loop_diagnostics.gradient_norms > 0).all()


def test_state_cosines_compare_each_state_with_the_one_before():
    model = tiny_model("flt").double()
    out = model(IDS, num_loops=4, output_loop_states=True, output_loop_diagnostics=True, output_residual_norms=True)
    pairs = zip(out.loop_states[:-1], out.loop_states[1:], strict=True)
    expected = torch.stack([F.cosine_similarity(a, b, dim=-1).mean() for a, b in pairs])
    torch.testing.assert_close(out.loop_diagnostics.state_cosines, expected)
    assert torch.equal(out.loop_diagnostics.residual_norms, out.residual_norms)
    assert len(model(IDS, num_loops=1, output_loop_diagnostics=True).loop_diagnostics.state_cosines) == 0


def test_diagnostics_describe_the_long_trajectory_and_change_no_gradient():
    gradients = []
    for asked in (False, True):
        model = tiny_model("loopformer", num_loops=5).double().train()
        out = model(IDS, labels=IDS, output_loop_diagnostics=asked)
        out.loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        assert (out.loop_diagnostics is not None) == asked
    assert out.loop_diagnostics.residual_norms.shape == (5,)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
