"""What every preset starts from, asserted after construction (fault 16)."""

from __future__ import annotations

import math

import pytest
import torch

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.model.presets import PRESETS

SIZES = {"vocab_size": 509, "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 3, "num_loops": 2}
EVERYTHING = {"num_prelude_layers": 1, "num_coda_layers": 1, "hidden_act": "swiglu", "kv_lora_rank": 20}


def build(preset, **overrides):
    sizes = {**SIZES, **({"num_loops": 1} if preset == "base" else {})}
    return LoopedForCausalLM(LoopConfig.from_preset(preset, **{**sizes, **overrides}))


def spread(weight):
    return float(weight.detach().square().mean().sqrt())


def role(name):
    if "conditioning" in name:
        return "modulation" if ".modulation." in name else "embedder"
    if name.endswith(("o_proj.weight", "down_proj.weight")) and "kv_down" not in name:
        return "output"
    return "norm" if "norm" in name else "embedding" if "embed" in name else "head" if "lm_head" in name else "input"


def expected_spread(name, parameter, config):
    """Standard deviation that the papers give this parameter, or the constant it holds."""
    if name.endswith("bias"):
        return 0.0
    flt = config.init_scheme == "flt"
    match role(name):
        case "norm":
            return 1.0
        case "embedder":
            return 0.02
        case "modulation":
            return 0.02 if config.modulation_init == "normal" else 0.0
        case "embedding":
            return 1.0 if flt else 0.02
        case "head":
            return 0.001 if flt else 0.02
        case "output":
            return 0.0 if flt else 0.02 / math.sqrt(2 * config.num_hidden_layers)
        case _:
            return 1 / math.sqrt(parameter.shape[1]) if flt else 0.02


@pytest.mark.parametrize("overrides", [{}, EVERYTHING], ids=["plain", "every part"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_starts_with_its_papers_spread(preset, overrides):
    model = build(preset, **overrides)
    for name, parameter in model.named_parameters():
        if model.config.modulation_init == "open" and role(name) == "modulation" and name.endswith("bias"):
            continue
        expected = expected_spread(name, parameter, model.config)
        assert spread(parameter) == pytest.approx(expected, rel=0.1, abs=1e-12), name


@pytest.mark.parametrize("preset", ["lt", "flt", "elastic-flt"])
def test_input_projections_of_the_flt_family_are_uniform(preset):
    weight = build(preset).model.layers[1].self_attn.q_proj.weight
    assert float(weight.detach().abs().max()) == pytest.approx(math.sqrt(3 / 48), rel=0.01)


@pytest.mark.parametrize(("kind", "gate"), [("zero", 0.0), ("open", 1.0), ("normal", 0.0)])
def test_modulations_start_shut_open_or_normal(kind, gate):
    model = build("loopformer", modulation_init=kind)
    for linear in model.model.conditioning.modulation:
        gates, scales = linear.bias.detach().chunk(2)
        assert torch.equal(gates, torch.full((96,), gate))
        assert not scales.any()
        assert bool(linear.weight.any()) == (kind == "normal")


def test_a_model_with_shut_gates_is_the_identity_between_embedding_and_head():
    model = build("loopformer").eval()
    ids = torch.randint(509, (2, 5))
    x = model.model.embed_tokens(ids) + model.model.embed_positions(torch.arange(5))
    assert torch.equal(model(ids).logits, model.head(model.model.norm(x)))


def test_a_model_with_open_gates_starts_as_the_unconditioned_one():
    conditioned = build("loopformer", modulation_init="open").eval()
    plain = build("loopformer", conditioning="none").eval()
    plain.load_state_dict({n: t for n, t in conditioned.state_dict().items() if "conditioning" not in n})
    ids = torch.randint(509, (2, 5))
    torch.testing.assert_close(conditioned(ids, schedule="coarse-first:2").logits, plain(ids, num_loops=2).logits)


@pytest.mark.parametrize("preset", ["lt", "lt-input", "lt-query", "flt-residual", "flt", "elastic-flt"])
def test_the_residual_stream_of_the_flt_family_starts_at_unit_scale(preset):
    model = build(preset).eval()
    norms = model(torch.randint(509, (2, 5)), output_residual_norms=True).residual_norms
    expected = [math.sqrt(48)] * 2
    assert norms.tolist() == pytest.approx(expected, rel=1e-4)


def test_two_constructions_with_one_seed_are_equal():
    weights = []
    for _ in range(2):
        torch.manual_seed(7)
        weights.append(build("elastic-flt").state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
