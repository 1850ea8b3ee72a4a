"""Two gloo processes train as one: the same draws, the same gradients (faults 9 and 10)."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from loopformers.testing import tiny_model
from loopformers.testing.distributed import run_distributed

STEPS = 4
IDS = torch.randint(61, (4, 7), generator=torch.Generator().manual_seed(3))


PRESETS = ["loopformer", "elastic-flt", "tmlt-exit"]


def gradients_of_two_ranks(rank):
    return {preset: gradients_of(rank, preset) for preset in PRESETS}


def gradients_of(rank, preset):
    model = tiny_model(preset, num_loops=5).double().train()
    drawn = []
    model.model.norm.register_forward_hook(lambda *_: drawn.append(1))
    parallel = DistributedDataParallel(model)
    own = IDS[2 * rank : 2 * rank + 2]
    lengths, gradients = [], {}
    for step in range(STEPS):
        drawn.clear()
        model.zero_grad()
        model.set_draw(step)
        parallel(own, labels=own).loss.backward()
        lengths.append(len(drawn))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"lengths": lengths, "gradients": gradients}


@pytest.mark.distributed
def test_two_ranks_draw_alike_and_their_gradients_are_those_of_one(tmp_path):
    ranks = run_distributed(gradients_of_two_ranks, folder=tmp_path)
    for preset in PRESETS:
        first, second = (rank[preset] for rank in ranks)
        assert first["lengths"] == second["lengths"]
        model = tiny_model(preset, num_loops=5).double().train()
        model.set_draw(STEPS - 1)
        model(IDS, labels=IDS).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(first["gradients"][name], parameter.grad, rtol=1e-9, atol=1e-12)
            assert torch.equal(first["gradients"][name], second["gradients"][name])
