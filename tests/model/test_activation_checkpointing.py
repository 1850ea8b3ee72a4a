"""Gradients with activation checkpointing per loop equal those without (fault 8)."""

from __future__ import annotations

import pytest
import torch

from loopformers import CacheError, ConfigError
from loopformers.model.presets import PRESETS
from loopformers.objectives import OBJECTIVES
from loopformers.testing import tiny_model

CASES = [(p, o) for p in PRESETS for o in OBJECTIVES if (p, o) != ("base", "shortcut_consistency")]
LOOPS = {"base": 1}


def tokens():
    return torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(2))


def gradients(model, **run):
    labels = tokens()
    labels[1, 4:] = -100
    model.zero_grad()
    model.set_draw(5, 1)
    loss = model(tokens(), labels=labels, **run).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(("preset", "objective"), CASES, ids=str)
def test_gradients_are_equal_with_and_without(preset, objective, checkpoint_activations):
    model = tiny_model(preset, objective=objective, num_loops=LOOPS.get(preset, 4)).double().train()
    plain = gradients(model)
    recomputed = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: recomputed.append(1))
    assert all(map(torch.equal, plain, gradients(model)))
    runs = len(recomputed)
    for use_reentrant in (False, True):
        recomputed.clear()
        checkpoint_activations(model, use_reentrant=use_reentrant)
        for ours, theirs in zip(plain, gradients(model), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-14)
        assert len(recomputed) == 2 * runs
    hook.remove()


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_prelude_layers": 1, "num_coda_layers": 1},
        {"kv_lora_rank": 5},
        {"window_pattern": "SL", "sliding_window": 3},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_every_part_is_recomputed_alike(overrides, checkpoint_activations):
    model = tiny_model("elastic-flt", num_loops=5, **overrides).double().train()
    plain = gradients(model, short_schedule="coarse-first:3")
    checkpoint_activations(model)
    for ours, theirs in zip(plain, gradients(model, short_schedule="coarse-first:3"), strict=True):
        assert torch.equal(ours, theirs)


def test_saved_activations_do_not_grow_with_the_layers_of_a_loop(checkpoint_activations):
    saved = []

    def measure(num_layers, checkpointed):
        model = tiny_model("flt", num_hidden_layers=num_layers, num_loops=6).train()
        if checkpointed:
            checkpoint_activations(model)
        numbers = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: numbers.append(t.numel()) or t, lambda t: t):
            model(tokens(), labels=tokens())
        saved.append(sum(numbers))
        return sum(numbers)

    assert measure(2, True) == measure(5, True) < measure(2, False) / 3


def test_evaluation_mode_and_generation_ignore_it(checkpoint_activations):
    model = tiny_model("flt")
    before = model.generate(tokens(), max_new_tokens=3, do_sample=False)
    checkpoint_activations(model)
    assert torch.equal(before, model.generate(tokens(), max_new_tokens=3, do_sample=False))


def test_a_cache_under_checkpointing_is_refused(checkpoint_activations):
    model = checkpoint_activations(tiny_model("flt").train())
    with pytest.raises(CacheError, match=r"written twice.*use_cache=False"):
        model(tokens(), past_key_values=model.new_cache())


def test_checkpointing_of_every_nth_layer_is_refused():
    model = tiny_model("flt")
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no such option")
    with pytest.raises(ConfigError, match="every_n_layers=2: a looped model checkpoints whole loops"):
        model.activation_checkpointing_enable(every_n_layers=2)


def gradients_of_a_forward_with_passing_hooks(model, **run):
    """Hooks of three kinds, all removed before the backward pass, as PEFT does for activated LoRA."""
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    handles = [
        attention.q_proj.register_forward_hook(lambda module, inputs, output: 3 * output),
        mlp.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,)),
        attention.v_proj.register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
        ),
    ]
    loss = model(tokens(), labels=tokens(), **run).loss
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
def test_hooks_that_are_gone_by_the_backward_pass_count_in_it(preset, use_reentrant, checkpoint_activations):
    model = tiny_model(preset).double().train()
    run = {"short_schedule": "uniform:2"} if model.config.objective == "shortcut_consistency" else {}
    without = model(tokens(), labels=tokens(), **run).loss
    plain = gradients_of_a_forward_with_passing_hooks(model, **run)
    assert not torch.allclose(plain[0], without)
    checkpointed = checkpoint_activations(model, use_reentrant=use_reentrant)
    again = gradients_of_a_forward_with_passing_hooks(checkpointed, **run)
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
