from __future__ import annotations

import math

import pytest
import torch

from loopformers import Schedule
from loopformers.nn.conditioning import Conditioning, frequency_embedding
from loopformers.nn.layer import Modulation
from loopformers.testing import tiny_model


def test_frequencies_are_cosines_then_sines_of_powers_of_ten_thousand():
    out = frequency_embedding(torch.tensor([0.0, 0.375]))
    assert out.shape == (2, 256)
    assert out.dtype == torch.float32
    assert torch.equal(out[0], torch.cat([torch.ones(128), torch.zeros(128)]))
    for k in (0, 1, 64, 127):
        w = 10000 ** (-k / 128)
        assert abs(float(out[1, k]) - math.cos(0.375 * w)) < 1e-6
        assert abs(float(out[1, 128 + k]) - math.sin(0.375 * w)) < 1e-6


def test_gates_and_scales_come_in_the_papers_order():
    torch.manual_seed(0)
    module = Conditioning(6, 2, "time_and_step", 1.0)
    times, steps = torch.tensor([0.0, 0.25]), torch.tensor([0.25, 0.75])
    out = module(times, steps)
    code = module.time_embedder(frequency_embedding(times)) + module.step_embedder(frequency_embedding(steps))
    raw = module.modulation[1](torch.nn.functional.silu(code))[1]
    assert out.shape == (2, 2, 4, 6)
    torch.testing.assert_close(out[1, 1].flatten(), raw)
    torch.testing.assert_close(Modulation(*out[1, 1]).attention_scale, raw[12:18])


def test_loop_index_counts_loops_whatever_the_times():
    torch.manual_seed(0)
    module = Conditioning(6, 1, "loop_index", 1.0)
    a = module(torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5]))
    b = module(torch.tensor([0.0, 0.1]), torch.tensor([0.1, 0.9]))
    assert torch.equal(a, b)


def test_a_time_scale_tells_loops_apart():
    spread = []
    for scale in (1.0, 1000.0):
        torch.manual_seed(0)
        out = Conditioning(6, 1, "time", scale)(torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5]))
        spread.append(float((out[0] - out[1]).detach().norm()))
    assert spread[1] > 2 * spread[0]


def test_a_bfloat16_model_is_told_the_time_in_float32():
    """Fault 17: loop 24 of 24 starts at 23/24, not at a bfloat16 sum."""
    model = tiny_model("loopformer", num_loops=24).bfloat16()
    seen = []
    model.model.conditioning.register_forward_pre_hook(lambda module, args: seen.extend(args))
    model(torch.tensor([[1, 2, 3]]), use_cache=False)
    times, steps = seen
    assert times.dtype == steps.dtype == torch.float32
    assert torch.equal(times, torch.tensor(Schedule.uniform(24).times))
    assert float(times[-1]) == torch.tensor(23 / 24).item()


@pytest.mark.parametrize("scale", [1.0, 0.3, 1000.0])
def test_an_embedding_is_the_exact_one_rounded_once(scale):
    values = torch.tensor(Schedule.uniform(7).times) * scale
    exact = [[float(u) * 10000.0 ** (-k / 128) for k in range(128)] for u in values]
    cosines = torch.tensor([[math.cos(angle) for angle in row] for row in exact], dtype=torch.float64)
    sines = torch.tensor([[math.sin(angle) for angle in row] for row in exact], dtype=torch.float64)
    assert torch.equal(frequency_embedding(values), torch.cat([cosines, sines], dim=-1).float())
