"""Labels in training mode: what else a call asks for is given as in evaluation mode, or refused by name."""

from __future__ import annotations

import pytest
import torch

from loopformers import CacheError
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.testing import tiny_model

PRESETS = ["lt", "flt", "loopformer", "elastic-balanced"]


def tokens(length=9):
    return torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(8))


def double(preset, **overrides):
    return tiny_model(preset, **overrides).double()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("objective", ["last_loop", "every_loop", "last_third"])
def test_a_context_in_a_cache_is_seen_by_the_loss(preset, objective):
    model = double(preset, objective=objective)
    ids = tokens()
    labels = ids.clone()
    labels[:, :6] = -100  # position 5 and those before predict nothing
    whole = model.train()(ids, labels=labels).loss
    cache = model.new_cache()
    with torch.no_grad():
        model.eval()(ids[:, :5], cache=cache)
    out = model.train()(ids[:, 5:], labels=ids[:, 5:], cache=cache)
    torch.testing.assert_close(out.loss, whole, rtol=1e-9, atol=1e-12)
    assert out[CACHE_NAME] is cache
    assert cache.get_seq_length() == 9


def test_conditioning_learns_from_a_cache_that_was_filled_without_gradients():
    model = double("loopformer", objective="last_loop")
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens()[:, :5], cache=cache)
    model.train()(tokens()[:, 5:], labels=tokens()[:, 5:], cache=cache).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.model.conditioning.modulation.parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cache_that_training_has_filled_decodes_on(preset):
    model = double(preset).train()
    out = model(tokens(), labels=tokens(), use_cache=True)
    model.eval()
    with torch.no_grad():
        next_ids = torch.tensor([[7], [8]])
        cached = model(next_ids, cache=out[CACHE_NAME]).logits
        whole = model(torch.cat([tokens(), next_ids], dim=1)).logits[:, -1:]
    torch.testing.assert_close(cached, whole, rtol=1e-9, atol=1e-9)


def test_training_makes_no_cache_unasked():
    assert CACHE_NAME not in double("flt").train()(tokens(), labels=tokens())


def test_a_context_is_refused_where_the_objective_trains_a_second_run():
    model = double("elastic-flt")
    cache = model.new_cache()
    model(tokens()[:, :5], cache=cache)
    with pytest.raises(CacheError, match=r"cache of 5 tokens .*'shortcut_consistency' also trains a short trajectory"):
        model.train()(tokens()[:, 5:], labels=tokens()[:, 5:], cache=cache)
    assert cache.get_seq_length() == 5


def test_a_context_is_refused_where_a_coda_reads_earlier_loops():
    model = double("flt", objective="every_loop", num_coda_layers=1)
    cache = model.new_cache()
    model(tokens()[:, :5], cache=cache)
    with pytest.raises(CacheError, match="also trains a coda after earlier loops"):
        model.train()(tokens()[:, 5:], labels=tokens()[:, 5:], cache=cache)


@pytest.mark.parametrize("preset", [*PRESETS, "elastic-flt"])
@pytest.mark.parametrize("stages", [{}, {"num_prelude_layers": 1, "num_coda_layers": 1}], ids=["core", "stages"])
def test_states_and_attentions_are_those_of_evaluation_mode(preset, stages):
    model = double(preset, **stages)
    model.set_attn_implementation("eager")
    asked = {"labels": tokens(), "output_hidden_states": True, "output_attentions": True}
    want = model.eval()(tokens(), **asked)
    out = model.train()(tokens(), **asked)
    assert out.loss_parts is not None
    assert want.loss_parts is None
    for name in ("hidden_states", "attentions"):
        assert len(out[name]) == len(want[name])
        for ours, theirs in zip(out[name], want[name], strict=True):
            torch.testing.assert_close(ours, theirs)
    assert out.loop_states is None


def test_a_configuration_that_asks_for_states_gets_them_in_training():
    model = double("flt", output_hidden_states=True).train()
    assert len(model(tokens(), labels=tokens()).hidden_states) == 4
    assert model(tokens(), labels=tokens(), output_hidden_states=False).hidden_states is None


def test_attentions_that_a_kernel_does_not_give_are_computed_by_another_in_training():
    model = double("flt").train()
    given = model(tokens(), labels=tokens(), output_attentions=True)
    model.set_attn_implementation("eager")
    eager = model(tokens(), labels=tokens(), output_attentions=True)
    assert len(given.attentions) == len(eager.attentions)
    for ours, theirs in zip(given.attentions, eager.attentions, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(given.loss, eager.loss)
