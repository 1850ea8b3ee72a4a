"""Costs against counts: parameters of the papers, torch's operation counter, the bytes of real caches (fault 14)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loopformers import LoopConfig, LoopedForCausalLM, Schedule
from loopformers.model.presets import PRESETS
from loopformers.objectives import OBJECTIVES
from loopformers.testing import tiny_config, tiny_model

VARIANTS = {
    "grouped-query": {"num_key_value_heads": 2},
    "latent": {"kv_lora_rank": 5},
    "swiglu": {"hidden_act": "swiglu"},
    "prelude and coda": {"num_prelude_layers": 1, "num_coda_layers": 2},
    "windows": {"window_pattern": "SL", "sliding_window": 3},
    "head size": {"head_dim": 10},
    "padded, tied": {"pad_vocab_size_multiple": 16, "tie_word_embeddings": True},
    "learned norms": {"learned_norms": "all"},
}
CASES = [(preset, {}) for preset in PRESETS]
CASES += [(preset, VARIANTS[name]) for preset in ("flt", "loopformer") for name in VARIANTS]


def tokens(batch=3, length=7):
    return torch.randint(61, (batch, length))


def eager(preset, overrides):
    """A model whose attention is two products that the counter sees."""
    model = tiny_model(preset, **overrides)
    model.set_attn_implementation("eager")
    return model


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# -- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "overrides", "parameters"),
    [
        ("loopformer", {}, 278_169_600),  # LoopFormer 3 x 8
        ("loopformer", {"num_hidden_layers": 2, "num_loops": 12}, None),
        ("flt", {}, 127_000_000),  # FLT Small
        ("flt", {"num_hidden_layers": 12, "hidden_size": 768}, 318_000_000),  # FLT Base
        ("base", {}, None),
        ("tmlt-exit", {}, None),
        ("elastic-flt", {}, None),
    ],
)
def test_full_size_models_have_the_parameters_that_the_papers_state(preset, overrides, parameters):
    config = LoopConfig.from_preset(preset, **overrides)
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    if preset == "loopformer" and not overrides:
        assert config.num_parameters() == parameters
    elif parameters is not None:
        assert config.num_parameters() == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(("preset", "overrides"), CASES, ids=str)
def test_parameters_by_part_equal_those_of_the_model(preset, overrides):
    model = tiny_model(preset, **overrides)
    names = {
        "embedding": "embed_tokens",
        "positions": "embed_positions",
        "prelude": ".prelude.",
        "core": "model.layers.",
        "coda": ".coda.",
        "conditioning": ".conditioning.",
        "norm": "model.norm.",
        "head": "lm_head",
    }
    groups = model.config.parameter_groups()
    for group, part in names.items():
        assert groups[group] == sum(p.numel() for name, p in model.named_parameters() if part in name), group
    assert sum(groups.values()) == model.config.num_parameters() == model.num_parameters()


# -- operations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "overrides"), CASES, ids=str)
@torch.no_grad()
def test_forward_operations_are_those_that_torch_counts(preset, overrides):
    model = eager(preset, overrides)
    for loops in (1, 4):
        expected = counted(lambda loops=loops: model(tokens(), num_loops=loops, use_cache=False))
        assert model.config.forward_flops(batch_size=3, seq_len=7, num_loops=loops) == expected
    one = model.config.forward_flops(seq_len=7, num_loops=4)
    assert model.config.flops_per_token(4, seq_len=7) == one / 7


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("preset", "overrides"),
    [(preset, {}) for preset in ("lt", "flt", "lt-balanced", "lt-adapter", "tmlt", "loopformer", "elastic-flt")]
    + [("flt", VARIANTS[name]) for name in ("latent", "prelude and coda", "windows")]
    + [("loopformer", VARIANTS["prelude and coda"])],
    ids=str,
)
def test_training_operations_are_those_that_torch_counts(preset, overrides, objective):
    """Fault 14: loops, both trajectories and every head count."""
    model = eager(preset, {**overrides, "objective": objective, "num_loops": 5}).train()
    short = Schedule.uniform(2) if objective == "shortcut_consistency" else None

    def step():
        model(tokens(), labels=tokens(), short_schedule=short).loss.backward()

    assert model.config.training_flops(batch_size=3, seq_len=7, short=short) == counted(step)


@pytest.mark.parametrize("preset", ["flt", "tmlt", "loopformer"])
@pytest.mark.parametrize("steps", [(1, 1, 3), (1, 4), (5,), (2, 1, 2)])
def test_loops_that_both_trajectories_share_are_counted_once(preset, steps):
    layers = VARIANTS["prelude and coda"]
    model = eager(preset, {**layers, "objective": "shortcut_consistency", "num_loops": 5}).train()
    short = Schedule(steps, 5) if model.config.understands_time else Schedule.uniform(len(steps))

    def step():
        model(tokens(), labels=tokens(), short_schedule=short).loss.backward()

    assert model.config.training_flops(batch_size=3, seq_len=7, short=short) == counted(step)


def test_a_consistency_step_counts_the_mean_of_its_short_trajectories():
    config = tiny_config("loopformer", num_loops=4)
    lengths = [config.training_flops(seq_len=9, short=Schedule.uniform(m)) for m in (1, 2, 3)]
    assert config.training_flops(seq_len=9) == pytest.approx(sum(lengths) / 3)
    assert config.training_flops_per_token(seq_len=9) == pytest.approx(sum(lengths) / 27)
    alone = tiny_config("loopformer", num_loops=4, objective="last_loop").training_flops(seq_len=9)
    assert 1.4 < config.training_flops(seq_len=9) / alone < 1.7


def test_an_exit_that_is_a_prefix_costs_no_more_than_its_head():
    exits = tiny_config("base-loop-exit", num_loops=4)
    alone = tiny_config("base-loop-exit", num_loops=4, objective="last_loop").training_flops(seq_len=9)
    head = 3 * 2 * exits.hidden_size * exits.vocab_size * 9
    for loops in (1, 2, 3):
        assert exits.training_flops(seq_len=9, short=Schedule.uniform(loops)) == alone + head
    assert exits.training_flops(seq_len=9) == alone + head


def test_operations_grow_with_the_loops_of_the_core_alone():
    config = tiny_config("flt", num_prelude_layers=1)
    costs = [config.forward_flops(seq_len=8, num_loops=loops) for loops in (1, 2, 3)]
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0
    conditioned = tiny_config("loopformer")
    assert conditioned.forward_flops(seq_len=8, schedule="coarse-first:2") == conditioned.forward_flops(
        seq_len=8, num_loops=2
    )


# -- cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "overrides"), CASES, ids=str)
@torch.no_grad()
def test_cache_bytes_per_token_are_those_that_a_cache_holds(preset, overrides):
    model = tiny_model(preset, **overrides)
    for loops, dtype in ((1, torch.float32), (4, torch.bfloat16)):
        cache = model.to(dtype).new_cache()
        model(tokens(), num_loops=loops, past_key_values=cache)
        held = sum(t[..., :7, :].numel() * t.element_size() for row in cache.layers for t in (row.keys, row.values))
        assert model.config.kv_bytes_per_token(loops, bytes_per_element=dtype.itemsize) * 3 * 7 == held
