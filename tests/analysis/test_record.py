"""Recorded states against those that the model itself returns."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from loopformers import ConfigError
from loopformers.analysis import record_loops
from loopformers.model.presets import PRESETS
from loopformers.testing import tiny_model

IDS = torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_forward_leaves_every_loops_states(preset):
    model = tiny_model(preset)
    with record_loops(model) as trace:
        out = model(IDS, output_loop_states=True)
    assert len(trace.runs) == 1
    assert len(trace.states) == model.config.num_loops == len(out.loop_states)
    for ours, theirs in zip(trace.states, out.loop_states, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad
        assert ours.device.type == "cpu"


@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_generation_leaves_what_one_forward_over_its_tokens_gives(preset):
    model = tiny_model(preset)
    with record_loops(model) as trace:
        ids = model.generate(IDS, num_loops=2, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [run[0].shape[1] for run in trace.runs] == [7, 1, 1, 1]  # the last token is not run
    out = model(ids[:, :-1], num_loops=2, output_loop_states=True)
    torch.testing.assert_close(trace.states, out.loop_states)


def test_training_leaves_both_trajectories_and_the_gradients_are_untouched():
    model = tiny_model("loopformer").train()
    expected = torch.autograd.grad(model(IDS, labels=IDS, short_schedule="uniform:2").loss, list(model.parameters()))
    with record_loops(model) as trace:
        loss = model(IDS, labels=IDS, short_schedule="uniform:2").loss
    assert [len(run) for run in trace.runs] == [3, 2]
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match=r"2 runs of \(loops, rows\) \[\(2, 3\), \(3, 3\)\]"):
        _ = trace.states


def test_loops_that_trajectories_share_are_shared_in_the_trace_and_a_mere_prefix_is_no_run():
    model = tiny_model("loopformer", num_loops=4).train()
    with record_loops(model) as trace:
        model(IDS, labels=IDS, short_schedule="1/4,1/4,1/2")
    long, short = trace.runs
    assert (len(long), len(short)) == (4, 3)
    assert [a is b for a, b in zip(long, short, strict=False)] == [True, True, False]
    assert trace.num_bytes == 5 * long[0].nbytes
    exits = tiny_model("base-loop-exit").train()
    with record_loops(exits) as trace:
        exits(IDS, labels=IDS, short_schedule="uniform:2")
    assert [len(run) for run in trace.runs] == [3]


def test_nothing_is_recorded_outside_the_block_not_even_after_an_error():
    model = tiny_model("flt")
    with pytest.raises(ConfigError, match="contradict"), record_loops(model) as trace:
        model(IDS, num_loops=2, schedule="uniform:3")
    model(IDS)
    assert trace.runs == []
    assert model.model.observers == []
    with pytest.raises(ConfigError, match="call the model inside the with block"):
        _ = trace.states


def test_a_run_is_still_shown_to_its_own_observer():
    model = tiny_model("flt")
    with record_loops(model), record_loops(model) as inner:
        out = model(IDS, output_residual_norms=True)
    assert out.residual_norms.shape == (3,)
    assert len(inner.states) == 3


def test_memory_is_bounded_and_the_bound_is_stated():
    model = tiny_model("flt")
    one = 3 * 7 * 24 * 4
    with record_loops(model, max_bytes=3 * one) as trace:
        model(IDS)
    assert trace.num_bytes == 3 * one
    with record_loops(model, max_bytes=3 * one):
        model(IDS)
        with pytest.raises(ConfigError, match=rf"max_bytes={3 * one} is less than the {4 * one} bytes"):
            model(IDS)


def test_wrapped_models_are_found_and_foreign_ones_refused():
    model = tiny_model("flt")
    with record_loops(nn.Sequential(model)) as trace:
        model(IDS)
    assert len(trace.states) == 3
    with pytest.raises(ConfigError, match="a Linear has no loops to record"), record_loops(nn.Linear(2, 2)):
        pass


def test_the_package_imports_without_torch():
    code = "import sys, loopformers.analysis; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
