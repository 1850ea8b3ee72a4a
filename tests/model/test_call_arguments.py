"""The models called as PEFT, TRL and transformers' trainer call any model."""

from __future__ import annotations

import pytest
import torch

from loopformers import ConfigError
from loopformers.nn.head import padded_product
from loopformers.testing import tiny_model

IDS = torch.randint(61, (1, 9), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
BOUNDS = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]], dtype=torch.int32)
PRESETS = ["flt", "loopformer", "elastic-flt"]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_trunk_takes_what_is_passed_to_any_model(preset):
    trunk = tiny_model(preset).base_model
    plain = trunk(IDS).last_hidden_state
    out = trunk(IDS, return_dict=True, output_attentions=None, output_hidden_states=None, use_cache=False, labels=None)
    assert torch.equal(out.last_hidden_state, plain)
    assert torch.equal(trunk(IDS, return_dict=False)[0], plain)
    harmless = {
        "is_causal": True,
        "num_items_in_batch": 3,
        "token_type_ids": torch.zeros_like(IDS),
        "cache_position": None,
    }
    assert torch.equal(trunk(IDS, **harmless).last_hidden_state, plain)


def test_a_configuration_may_ask_for_tuples():
    model = tiny_model("flt", return_dict=False)
    for part in (model, model.base_model):
        assert isinstance(part(IDS), tuple)
        assert not isinstance(part(IDS, return_dict=True), tuple)


@pytest.mark.parametrize(
    "packing",
    [
        {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 4, "max_length_k": 4},
        {"cu_seq_lens_q": BOUNDS},
        {"seq_idx": DOCUMENTS, "cu_seq_lens_k": BOUNDS},
        {"seq_idx": DOCUMENTS, "max_length_q": 9},
    ],
)
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("preset", PRESETS)
def test_packing_that_is_told_in_another_way_keeps_documents_apart(preset, positions, packing):
    model = tiny_model(preset)
    expected = model(IDS, position_ids=POSITIONS, labels=IDS)
    out = model(IDS, position_ids=positions, labels=IDS, **packing)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)
    assert not torch.allclose(out.logits, model(IDS).logits)
    assert torch.equal(model.base_model(IDS, **packing).last_hidden_state, model.base_model(IDS, None, POSITIONS)[0])
    model.train()
    model.set_draw(2)
    trained = model(IDS, position_ids=positions, labels=IDS, **packing).loss
    model.set_draw(2)
    assert torch.equal(trained, model(IDS, position_ids=POSITIONS, labels=IDS).loss)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"cu_seq_lens_q": BOUNDS, "position_ids": torch.arange(9)[None]}, "cu_seq_lens_q and position_ids disagree"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9]), "position_ids": POSITIONS},
            "disagree on where packed documents begin",
        ),
        (
            {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": torch.tensor([0, 5, 9])},
            "cu_seq_lens_q and cu_seq_lens_k disagree",
        ),
        ({"cu_seq_lens_q": BOUNDS, "max_length_q": 3}, "max_length_q=3 is below the longest packed document, of 4"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "must rise from 0 to the 9 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 4, 9])}, "must rise from 0 to the 9 tokens"),
        ({"cu_seq_lens_q": [0, 9]}, "cu_seq_lens_q must be a tensor of whole numbers"),
        ({"seq_idx": DOCUMENTS[:, :5]}, "seq_idx of 5 numbers for 9 tokens"),
        ({"max_length_q": 9}, "max_length_q without cu_seq_lens_q"),
        ({"is_causal": False}, "is_causal=False: a looped model sees only earlier tokens"),
        ({"output_router_logits": True}, "a looped model has no router"),
        ({"token_type_ids": torch.ones_like(IDS)}, "a looped model has no segments"),
        ({"num_lops": 3}, "argument='num_lops' is not known; did you mean 'num_loops'"),
        ({"head_mask": torch.ones(2)}, "argument='head_mask' is not known"),
    ],
)
def test_what_contradicts_itself_or_cannot_be_done_is_refused(arguments, match):
    model = tiny_model("flt")
    for part in (model, model.base_model):
        with pytest.raises(ConfigError, match=match):
            part(IDS, **arguments)


def test_packing_of_several_rows_and_of_cached_tokens_is_refused():
    model = tiny_model("flt")
    with pytest.raises(ConfigError, match="cu_seq_lens_q with 2 rows and 0 cached tokens"):
        model(IDS.expand(2, 9), cu_seq_lens_q=torch.tensor([0, 9, 18]))
    cache = model(IDS).cache if hasattr(model(IDS), "cache") else model(IDS).past_key_values
    with pytest.raises(ConfigError, match="cu_seq_lens_q with 1 rows and 9 cached tokens"):
        model(IDS, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 9]))


def test_shift_labels_stand_in_for_labels():
    model = tiny_model("flt")
    targets = torch.roll(IDS, 1, dims=1)
    expected = model(IDS, targets=targets).loss
    assert torch.equal(model(IDS, shift_labels=targets).loss, expected)
    assert torch.equal(model(IDS, labels=IDS, shift_labels=targets).loss, expected)
    with pytest.raises(ConfigError, match="the trunk has no loss"):
        model.base_model(IDS, labels=IDS)


@pytest.mark.parametrize("missing", [1, 3])
def test_a_product_with_padded_rows_gives_the_same_logits_and_gradients(missing):
    hidden = torch.randn(5, 7, requires_grad=True, dtype=torch.float64)
    weight = torch.randn(11, 7, requires_grad=True, dtype=torch.float64)
    results = []
    for logits in (padded_product(hidden, weight, missing), hidden @ weight.T):
        gradients = torch.autograd.grad(logits.square().sum(), (hidden, weight))
        results.append((logits, *gradients))
    for padded, plain in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)


def test_a_seed_gives_the_weights_that_it_gave_when_rows_were_padded():
    torch.manual_seed(4)
    padded = tiny_model("flt", randomize=False, vocab_size=64)
    cut = tiny_model("flt", randomize=False, vocab_size=61)
    assert cut.config.padded_vocab_size == 64
    for name, tensor in cut.state_dict().items():
        assert torch.equal(tensor, padded.state_dict()[name][: len(tensor)]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_seen_by_those_who_look_for_layers_of_its_kind(reentrant, checkpoint_activations):
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = tiny_model("flt").train()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert len(layers) == 1
    loss = model(IDS, labels=IDS).loss
    expected = torch.autograd.grad(loss, model.lm_head.weight)[0]
    checkpoint_activations(model, use_reentrant=reentrant)
    calls = []
    layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    assert layers[0].gradient_checkpointing
    model.model.embed_tokens.weight.requires_grad_(True)
    again = model(IDS, labels=IDS).loss
    assert len(calls) == 3
    torch.testing.assert_close(
        torch.autograd.grad(again, model.lm_head.weight)[0], expected
    ) if not reentrant else again.backward()
    if reentrant:
        torch.testing.assert_close(model.lm_head.weight.grad, expected)
