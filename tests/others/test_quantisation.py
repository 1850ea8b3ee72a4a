"""Models that bitsandbytes and torchao quantise: every matrix of the layers is replaced, and all loops share the new one."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from loopformers.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(4))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}
SYSTEMS = {
    "flt": {},
    "flt, latent, tied": {"kv_lora_rank": 64, "tie_word_embeddings": True},
    "loopformer": {},
    "lt-adapter": {},
    "elastic-balanced": {"num_prelude_layers": 1, "num_coda_layers": 1},
}
ROUNDED_INPUTS = 0.1
"""bitsandbytes rounds the inputs of products too: to 8 bits, or on some processors to bfloat16; loops add that up."""
WAYS = ("bitsandbytes 8 bits", "bitsandbytes 4 bits", "torchao int8")


def way_to_quantise(name):
    if name == "torchao int8":
        return TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    if name == "bitsandbytes 8 bits":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(load_in_4bit=True)


def original(name):
    return tiny_model(name.split(",")[0], **SIZES, **SYSTEMS[name])


def matrices(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def whole_weight(linear):
    """The weight as it counts in a product, (out, in)."""
    weight = linear.weight
    if getattr(weight, "quant_state", None) is not None:
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    if getattr(weight, "SCB", None) is not None:
        return weight.data * weight.SCB[:, None] / 127
    return weight.dequantize() if hasattr(weight, "dequantize") and type(weight.data) is not torch.Tensor else weight


def difference(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture
def quantise(tmp_path):
    def run(model, way):
        model.save_pretrained(tmp_path / "model")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=way_to_quantise(way))

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("system", SYSTEMS)
@torch.no_grad()
def test_every_matrix_but_the_head_is_replaced_and_every_loop_uses_it(system, way, quantise):
    model = original(system)
    quantised = quantise(model, way)
    rounded = copy.deepcopy(model)  # the same numbers as ordinary matrices
    for name, linear in matrices(quantised).items():
        before = matrices(model)[name]
        is_replaced = type(linear) is not type(before) or type(linear.weight.data) is not type(before.weight.data)
        assert is_replaced == (name != "lm_head"), name
        matrices(rounded)[name].weight.copy_(whole_weight(linear))
    tolerance = 1e-5 if way == "torchao int8" else ROUNDED_INPUTS
    for num_loops in (1, 3, 4):
        logits = quantised(IDS, num_loops=num_loops).logits
        assert difference(logits, rounded(IDS, num_loops=num_loops).logits) < tolerance
    if way != "bitsandbytes 4 bits":
        assert difference(quantised(IDS).logits, model(IDS).logits) < 0.15


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("system", ["flt", "loopformer", "elastic-balanced"])
@torch.no_grad()
def test_a_quantised_model_decodes_with_its_cache_and_generates(system, way, quantise):
    quantised = quantise(original(system), way)
    cache = quantised.new_cache()
    pieces = [quantised(piece, past_key_values=cache).logits for piece in IDS.split([5, 1, 3], dim=1)]
    assert difference(torch.cat(pieces, dim=1), quantised(IDS).logits) < (1e-5 if way == "torchao int8" else 0.03)
    assert quantised.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)


@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_model_is_saved_and_opened_as_it_was(way, quantise, tmp_path):
    quantised = quantise(original("loopformer"), way)
    quantised.save_pretrained(tmp_path / "quantised")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, quantised(IDS).logits)


@pytest.mark.parametrize("way", ["bitsandbytes 8 bits", "bitsandbytes 4 bits"])
def test_an_adapter_trains_on_a_quantised_model(way, quantise):
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    quantised = prepare_model_for_kbit_training(quantise(original("loopformer"), way))
    model = get_peft_model(quantised, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        quantised.set_draw(0)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
