"""What transformers' users rely on: saving and loading, Auto classes, dtypes, attention functions, outputs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

from loopformers import ConfigError, LoopConfig, LoopedForCausalLM, LoopedModel
from loopformers.model.presets import PRESETS
from loopformers.testing import tiny_model

ATTENTION = {
    "multi-head": {},
    "grouped-query": {"num_key_value_heads": 2},
    "latent": {"kv_lora_rank": 5},
    "sliding": {"window_pattern": "SL", "sliding_window": 3},
    "latent-sliding": {"kv_lora_rank": 5, "window_pattern": "SL", "sliding_window": 3},
}


def tokens(batch=3, length=7, vocab_size=61):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def bit_equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# -- saving and loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_model_loads_with_equal_bits(preset, tmp_path):
    model = tiny_model(preset)
    model.save_pretrained(tmp_path)
    again = LoopedForCausalLM.from_pretrained(tmp_path)
    assert bit_equal(model.state_dict(), again.state_dict())
    assert torch.equal(model(tokens()).logits, again(tokens()).logits)
    assert not again.training
    ours, theirs = model.config.to_dict(), again.config.to_dict()
    assert {name: ours[name] for name in LoopConfig.own_fields()} == {n: theirs[n] for n in LoopConfig.own_fields()}
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied
    assert sum(tensor.numel() for tensor in stored.values()) == model.config.num_parameters()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", ["folder", "shards", "trunk", "state dict", "load_state_dict"])
def test_padding_that_a_checkpoint_stores_is_cut_off(way, tied, tmp_path):
    """Checkpoints once held rows that stand for no token."""
    model = tiny_model("flt", vocab_size=37, pad_vocab_size_multiple=16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in stored.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        stored[name] = torch.cat([stored[name], torch.full((11, 24), 9.0)])
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if way == "load_state_dict":
        again = tiny_model("flt", vocab_size=37, pad_vocab_size_multiple=16, tie_word_embeddings=tied, seed=1)
        again.load_state_dict(stored, strict=not tied)
    elif way == "state dict":
        again = LoopedForCausalLM.from_pretrained(None, config=model.config, state_dict=stored)
    elif way == "trunk":
        trunk = LoopedModel.from_pretrained(tmp_path)
        assert torch.equal(trunk.embed_tokens.weight, model.model.embed_tokens.weight)
        return
    else:
        if way == "shards":
            halves = [dict(list(stored.items())[i::2]) for i in range(2)]
            (tmp_path / "model.safetensors").unlink()
            for i, half in enumerate(halves):
                save_file(half, tmp_path / f"part-{i}.safetensors", metadata={"format": "pt"})
            index = {
                "metadata": {},
                "weight_map": {name: f"part-{i}.safetensors" for i in range(2) for name in halves[i]},
            }
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        again = LoopedForCausalLM.from_pretrained(tmp_path)
    assert again.model.embed_tokens.weight.shape == again.lm_head.weight.shape == (37, 24)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(model(tokens(vocab_size=37)).logits, again(tokens(vocab_size=37)).logits)


@pytest.mark.parametrize("preset", ["flt", "elastic-flt", "loopformer"])
def test_who_multiplies_by_the_head_itself_gets_the_same_loss(preset):
    """As trainers do that call the trunk and compute their own loss: no row takes probability from the tokens."""
    model = tiny_model(preset, vocab_size=37, pad_vocab_size_multiple=64)
    ids = tokens(vocab_size=37)
    logits = model.base_model(ids, return_dict=True).last_hidden_state[:, :-1] @ model.lm_head.weight.T
    cap = model.config.final_logit_softcapping
    logits = cap * torch.tanh(logits / cap) if cap else logits
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, by_hand)


def test_the_generation_configuration_is_saved_too(tmp_path):
    model = tiny_model("flt", eos_token_id=60, pad_token_id=59, bos_token_id=58)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (60, 59, 58)
    assert LoopedForCausalLM.from_pretrained(tmp_path).generate(tokens(1, 3), do_sample=False).shape[1] <= 8


def test_shards_load_as_one(tmp_path):
    model = tiny_model("elastic-flt")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert bit_equal(model.state_dict(), LoopedForCausalLM.from_pretrained(tmp_path).state_dict())


def test_overrides_at_loading_are_fields_like_any_other(tmp_path):
    tiny_model("loopformer").save_pretrained(tmp_path)
    model = LoopedForCausalLM.from_pretrained(tmp_path, num_loops=5, objective="last_loop")
    assert (model.config.num_loops, model.config.objective) == (5, "last_loop")
    assert len(model(tokens(), output_loop_states=True).loop_states) == 5
    with pytest.raises(ConfigError, match="num_loops=0"):
        LoopedForCausalLM.from_pretrained(tmp_path, num_loops=0)
    with pytest.raises(ConfigError, match="objective='last' is not known; did you mean 'last_loop'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, objective="last")


def test_the_trunk_loads_alone(tmp_path):
    model = tiny_model("flt")
    model.save_pretrained(tmp_path)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert isinstance(trunk, LoopedModel)
    expected = model.model(tokens()).last_hidden_state
    assert torch.equal(trunk(tokens()).last_hidden_state, expected)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_weights_load_in_another_dtype(name, tmp_path):
    model = tiny_model("elastic-flt")
    model.save_pretrained(tmp_path)
    again = LoopedForCausalLM.from_pretrained(tmp_path, **{name: torch.bfloat16})
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    out = again(tokens())
    assert out.logits.dtype == torch.float32
    assert bit_equal({n: t.bfloat16() for n, t in model.state_dict().items()}, again.state_dict())
    again.save_pretrained(tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.bfloat16


# -- Auto classes ----------------------------------------------------------------------------------------------

LOAD = """
from transformers import AutoConfig
assert type(AutoConfig.from_pretrained(sys.argv[1])).__name__ == "LoopConfig"
from transformers import AutoModelForCausalLM
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__ == "LoopedForCausalLM"
"""
ORDERS = {
    "loopformers first": "import loopformers\nassert 'transformers' not in sys.modules",
    "loopformers between": "import transformers\nfrom transformers import AutoConfig\nimport loopformers",
    "loopformers last": "from transformers import AutoModelForCausalLM\nimport loopformers",
    "a part of ours first": "from loopformers import LoopConfig",
}


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_our_models_in_either_order_of_import(order, tmp_path):
    tiny_model("flt").save_pretrained(tmp_path)
    script = f"import sys\n{ORDERS[order]}\n{LOAD}"
    result = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_auto_config_reads_our_configuration(tmp_path):
    config = tiny_model("loopformer").config
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LoopConfig)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert AutoConfig.from_pretrained(tmp_path, num_loops=7).num_loops == 7
    assert isinstance(AutoModelForCausalLM.from_config(loaded), LoopedForCausalLM)


def test_a_text_generation_pipeline_takes_a_budget(tmp_path):
    from transformers import pipeline

    from loopformers.data.tokenizer import bundled_tokenizer

    tokenizer = bundled_tokenizer()
    tiny_model("elastic-flt", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path), device="cpu")
    prompts = ["Call me Ishmael. Some", "It is"]
    out = generate(prompts, max_new_tokens=4, do_sample=False, num_loops=2, return_full_text=False)
    assert len(out) == 2
    ids = tokenizer(prompts[0], return_tensors="pt").input_ids
    expected = generate.model.generate(ids, max_new_tokens=4, do_sample=False, num_loops=2)
    assert out[0][0]["generated_text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


# -- attention functions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", ATTENTION)
@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_sdpa_equals_the_written_out_attention_in_values_and_gradients(preset, variant, padded):
    model = tiny_model(preset, **ATTENTION[variant]).double()
    mask = torch.ones(3, 7, dtype=torch.long)
    if padded:
        mask[0, :3] = mask[2, 5:] = 0
    results = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(tokens(), attention_mask=mask, use_cache=False).logits
        logits[mask.bool()].square().mean().backward()
        results.append([logits[mask.bool()], *(p.grad for p in model.parameters())])
    for sdpa, eager in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, eager, rtol=1e-9, atol=1e-11)


def test_the_attention_function_is_chosen_at_loading_and_unknown_ones_are_refused(tmp_path):
    tiny_model("flt").save_pretrained(tmp_path)
    model = LoopedForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="eagre"):
        LoopedForCausalLM.from_pretrained(tmp_path, attn_implementation="eagre")


@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
def test_attention_weights_come_out_one_for_each_application_of_a_layer(preset):
    model = tiny_model(preset, num_prelude_layers=1)
    out = model(tokens(), output_attentions=True)  # by sdpa, which gives none: the call runs eager
    model.set_attn_implementation("eager")
    weights = model(tokens(), output_attentions=True).attentions
    assert all(torch.equal(a, b) for a, b in zip(out.attentions, weights, strict=True))
    assert torch.equal(out.logits, model(tokens()).logits)
    assert [w.shape for w in weights] == [(3, 4, 7, 7)] * (1 + 2 * 3)
    for matrix in weights:
        torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 4, 7))
        assert not matrix.triu(1).any()


# -- outputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["lt", "flt", "loopformer"])
def test_hidden_states_are_the_inputs_and_every_loops_state(preset):
    """Fault 25."""
    model = tiny_model(preset)
    out = model(tokens(), num_loops=5, output_hidden_states=True, output_loop_states=True, output_residual_norms=True)
    assert len(out.hidden_states) == 6
    assert all(torch.equal(a, b) for a, b in zip(out.hidden_states[1:], out.loop_states, strict=True))
    final = out.loop_states[-1] if model.config.loop_norm else model.model.norm(out.loop_states[-1])
    assert torch.equal(model.head(final), out.logits)
    assert out.residual_norms.shape == (5,)


def test_a_configuration_may_ask_for_hidden_states():
    model = tiny_model("flt", output_hidden_states=True)
    assert len(model(tokens()).hidden_states) == 4
    assert model(tokens(), output_hidden_states=False).hidden_states is None


def test_tuples_on_request():
    model = tiny_model("flt")
    out = model(tokens(), labels=tokens())
    as_tuple = model(tokens(), labels=tokens(), return_dict=False)
    assert torch.equal(as_tuple[0], out.loss)
    assert torch.equal(as_tuple[1], out.logits)
    assert torch.equal(model(tokens(), use_cache=False, return_dict=False)[0], out.logits)


def test_logits_of_chosen_positions_equal_those_of_all():
    model = tiny_model("flt")
    full = model(tokens()).logits
    torch.testing.assert_close(model(tokens(), logits_to_keep=2).logits, full[:, -2:])
    torch.testing.assert_close(model(tokens(), logits_to_keep=torch.tensor([0, 4])).logits, full[:, [0, 4]])
    with pytest.raises(ConfigError, match="all positions"):
        model(tokens(), labels=tokens(), logits_to_keep=1)


def test_embeddings_may_stand_in_for_tokens():
    model = tiny_model("loopformer")
    embeddings = model.get_input_embeddings()(tokens())
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(tokens()).logits)


def test_labels_not_shifted_equal_targets_shifted_by_hand():
    model = tiny_model("flt")
    labels = tokens()
    labels[0, :3] = -100
    targets = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    by_hand = torch.nn.functional.cross_entropy(model(tokens()).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens(), labels=labels).loss, by_hand)
    torch.testing.assert_close(model(tokens(), targets=targets).loss, by_hand)


# -- vocabulary ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_wanted", [70, 50, 130])
@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_a_resized_vocabulary_keeps_old_tokens_and_loads_again(preset, tokens_wanted, tmp_path):
    model = tiny_model(preset)
    ids = tokens(vocab_size=50)
    before = model(ids).logits
    model.resize_token_embeddings(tokens_wanted)
    assert model.config.vocab_size == tokens_wanted
    assert len(model.get_input_embeddings().weight) == len(model.lm_head.weight) == tokens_wanted
    after = model(ids).logits
    assert after.shape == (3, 7, tokens_wanted)
    kept = min(61, tokens_wanted)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
    assert model.num_parameters() == model.config.num_parameters()
    model.save_pretrained(tmp_path)
    assert torch.equal(LoopedForCausalLM.from_pretrained(tmp_path)(ids).logits, after)


def test_new_rows_may_start_as_the_initialiser_has_it():
    model = tiny_model("flt", vocab_size=64)
    model.resize_token_embeddings(640, mean_resizing=False)
    assert 0.0008 < float(model.lm_head.weight.detach()[64:].std()) < 0.0012
    assert 0.9 < float(model.get_input_embeddings().weight.detach()[64:].std()) < 1.1


def test_another_multiple_for_products_adds_no_token(tmp_path):
    model = tiny_model("loopformer")
    model.resize_token_embeddings(pad_to_multiple_of=32)
    assert (model.config.vocab_size, len(model.get_input_embeddings().weight)) == (61, 61)
    assert model.lm_head.drawn_rows == model.config.padded_vocab_size == 64
    model.save_pretrained(tmp_path)
    assert LoopedForCausalLM.from_pretrained(tmp_path)(tokens()).logits.shape[-1] == 61


# -- a checkpoint that lacks weights ---------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "gates"), [("loopformer", 0), ("elastic-flt", 1)])
def test_missing_conditioning_starts_as_after_construction_and_the_rest_is_loaded(preset, gates, tmp_path):
    """Fault 16, on the path through the meta device."""
    model = tiny_model(preset)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if "conditioning" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = LoopedForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == stored.keys() - kept.keys()
    for linear in again.model.conditioning.modulation:
        assert not linear.weight.any()
        assert torch.equal(linear.bias, torch.tensor([gates] * 48 + [0] * 48).float())
    embedder = again.model.conditioning.time_embedder
    assert 0.015 < float(embedder[0].weight.detach().std()) < 0.025
    assert not embedder[0].bias.any()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in kept.items())


def test_a_half_missing_modulation_keeps_its_loaded_half(tmp_path):
    model = tiny_model("elastic-flt")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.conditioning.modulation.0.weight"], stored["model.conditioning.modulation.1.bias"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    first, second = LoopedForCausalLM.from_pretrained(tmp_path).model.conditioning.modulation
    assert not first.weight.any()
    assert torch.equal(first.bias, model.model.conditioning.modulation[0].bias)
    assert torch.equal(second.weight, model.model.conditioning.modulation[1].weight)
    assert torch.equal(second.bias, torch.tensor([1.0] * 48 + [0.0] * 48))


def test_config_json_says_every_field(tmp_path):
    """Fault 20."""
    tiny_model("elastic-flt").save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert LoopConfig.own_fields().keys() <= stored.keys()
