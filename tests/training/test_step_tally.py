from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopformers.recurrence.record import LoopDiagnostics
from loopformers.testing import tiny_model
from loopformers.training.step_tally import StepTally, layer_of


def tally(world_size=1, **options):
    return StepTally(
        world_size=world_size,
        reduce_sum=options.pop("reduce_sum", lambda vector: vector * world_size),
        microbatches_add_up=options.pop("microbatches_add_up", True),
        ranks_add_up=options.pop("ranks_add_up", True),
    )


def report(norms, cosines, gradients, **parts):
    diagnostics = LoopDiagnostics(*map(torch.tensor, (norms, cosines, gradients)))
    return SimpleNamespace(
        loss_parts={name: torch.tensor(value) for name, value in parts.items()}, loop_diagnostics=diagnostics
    )


def test_layer_norms_are_those_of_each_layers_parameters():
    model = tiny_model("elastic-flt", num_prelude_layers=1).train()
    ids = torch.randint(61, (3, 7))
    model(ids, labels=ids).loss.backward()
    sums = tally()
    sums.add_loss(torch.tensor(1.0))
    numbers = sums.read(model)
    by_layer = {}
    for name, p in model.named_parameters():
        by_layer.setdefault(layer_of(name), []).append(p.grad)
    assert {"prelude.0", "layers.0", "layers.1", "embed_tokens", "lm_head", "conditioning"} <= set(by_layer)
    assert list(numbers.layer_gradient_norms) == list(by_layer)
    for layer, gradients in by_layer.items():
        expected = float(torch.nn.utils.get_total_norm(gradients))
        assert numbers.layer_gradient_norms[layer] == pytest.approx(expected, rel=1e-6)
    everything = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert numbers.gradient_norm == pytest.approx(everything, rel=1e-6)


def test_microbatches_of_unequal_depth_average_over_those_that_ran_a_loop():
    sums = tally()
    for loss, output in (
        (0.5, report([2.0, 4.0, 6.0], [0.1, 0.2], [3.0, 0.0, 1.0], cross_entropy=1.0)),
        (0.25, report([4.0], [], [4.0], cross_entropy=2.0)),
    ):
        sums.add_outputs(output)
        sums.add_loss(torch.tensor(loss))
    numbers = sums.read(nn.Linear(2, 2))
    assert numbers.loss == 0.75
    assert numbers.loss_parts == {"cross_entropy": 3.0}
    assert numbers.residual_norms == [3.0, 4.0, 6.0]
    assert numbers.state_cosines == pytest.approx([0.1, 0.2])
    assert numbers.loop_gradient_norms == [5.0, 0.0, 1.0]


def test_sums_over_ranks_are_those_of_the_whole_batch():
    """Two ranks that report alike: their objective is the mean, gradients by activation are half of each rank's."""
    sums = tally(world_size=2)
    sums.add_outputs(report([2.0], [], [3.0], cross_entropy=0.5))
    sums.add_loss(torch.tensor(1.0))
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0]])  # reduced: the same on both
    numbers = sums.read(model)
    assert numbers.loss == 1.0
    assert numbers.loss_parts == {"cross_entropy": 1.0}
    assert numbers.residual_norms == [2.0]
    assert numbers.loop_gradient_norms == pytest.approx([3.0 / math.sqrt(2)])
    assert numbers.gradient_norm == pytest.approx(3.0)


def test_means_are_not_added_up():
    sums = tally(world_size=2, microbatches_add_up=False, ranks_add_up=False)
    for value in (1.0, 2.0):
        sums.add_outputs(report([1.0], [], [0.0], cross_entropy=value))
        sums.add_loss(torch.tensor(value))
    assert sums.read(nn.Linear(1, 1)).loss_parts == {"cross_entropy": 1.5}


def test_huge_norms_do_not_overflow_and_infinities_show():
    model = nn.Linear(1, 2, bias=False)
    model.weight.grad = torch.full((2, 1), 1e18)
    sums = tally()
    sums.add_loss(torch.tensor(0.0))
    assert sums.read(model).gradient_norm == pytest.approx(math.sqrt(2) * 1e18, rel=1e-5)
    for bad in (math.inf, math.nan):
        model.weight.grad = torch.tensor([[1.0], [bad]])
        sums.add_loss(torch.tensor(0.0))
        assert not math.isfinite(sums.read(model).gradient_norm)


def test_a_frozen_parameter_may_thaw():
    model = nn.Linear(2, 3)
    model.weight.grad = torch.ones(3, 2)
    sums = tally()
    sums.add_loss(torch.tensor(0.0))
    assert sums.read(model).layer_gradient_norms == pytest.approx({"weight": math.sqrt(6)})
    model.bias.grad = torch.ones(3)
    sums.add_loss(torch.tensor(0.0))
    assert list(sums.read(model).layer_gradient_norms) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "layers.11"),
        ("module._orig_mod.model.coda.0.mlp.up_proj.weight", "coda.0"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight", "layers.0"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("model.conditioning.time.0.bias", "conditioning"),
    ],
)
def test_parameters_belong_to_layers(name, layer):
    assert layer_of(name) == layer
