"""Prefix tuning's cache: keys and values of virtual tokens before the first real one, for every loop or for each."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import DynamicCache, StaticCache

from loopformers import CacheError, ConfigError
from loopformers.testing import tiny_model

IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(4))
NUM_PREFIX = 4
peft_asks_by_an_older_name = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
SYSTEMS = {
    "lt": {},
    "flt": {"num_key_value_heads": 2},
    "loopformer": {"window_pattern": "SL", "sliding_window": 3},
    "elastic-balanced": {"num_prelude_layers": 1, "num_coda_layers": 2},
}


def build(preset, **overrides):
    return tiny_model(preset, **{**SYSTEMS.get(preset, {}), **overrides}).double()


def random_prefix(model, num_entries, batch_size=2, requires_grad=False):
    config = model.config
    shape = (num_entries, 2, batch_size, config.num_key_value_heads, NUM_PREFIX, config.head_dim)
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return numbers.requires_grad_(requires_grad)


def as_cache(numbers):
    return DynamicCache([(keys, values) for keys, values in numbers])


def num_layers(model):
    config = model.config
    return config.num_prelude_layers + config.num_hidden_layers + config.num_coda_layers


@pytest.mark.parametrize("preset", SYSTEMS)
@pytest.mark.parametrize("num_loops", [1, 3, 4])
@torch.no_grad()
def test_what_real_tokens_left_in_every_layer_and_loop_serves_as_their_prefix(preset, num_loops):
    model = build(preset)
    cache = model.new_cache()
    model(IDS[:, :NUM_PREFIX], past_key_values=cache, num_loops=num_loops)
    config, loops = model.config, range(num_loops)
    places = [("prelude", i, 0) for i in range(config.num_prelude_layers)]
    places += [("core", i, loop) for loop in loops for i in range(config.num_hidden_layers)]
    places += [("coda", i, 0) for i in range(config.num_coda_layers)]
    rows = [cache.slot(*place) for place in places]
    prefix = DynamicCache([(row.keys[..., :NUM_PREFIX, :], row.values[..., :NUM_PREFIX, :]) for row in rows])
    logits = model(IDS[:, NUM_PREFIX:], past_key_values=prefix, num_loops=num_loops).logits
    torch.testing.assert_close(logits, model(IDS, num_loops=num_loops).logits[:, NUM_PREFIX:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("preset", SYSTEMS)
@torch.no_grad()
def test_one_entry_for_each_layer_serves_every_loop(preset):
    model = build(preset)
    before, core = model.config.num_prelude_layers, model.config.num_hidden_layers
    numbers = random_prefix(model, num_layers(model))
    repeated = torch.cat([numbers[:before], *[numbers[before : before + core]] * 3, numbers[before + core :]])
    short, long = (model(IDS, past_key_values=as_cache(entries), num_loops=3).logits for entries in (numbers, repeated))
    assert torch.equal(short, long)
    assert not torch.allclose(short, model(IDS, num_loops=3).logits)


@pytest.mark.parametrize("preset", SYSTEMS)
@torch.no_grad()
def test_decoding_goes_on_exactly_and_leaves_the_prefix_as_it_was(preset):
    model = build(preset)
    numbers = random_prefix(model, num_layers(model))
    untouched = numbers.clone()
    full = model(IDS, past_key_values=as_cache(numbers)).logits
    first = model(IDS[:, :5], past_key_values=as_cache(numbers))
    cache = first.cache if "cache" in first else first.past_key_values
    rest = [model(IDS[:, i : i + 1], past_key_values=cache).logits for i in range(5, 9)]
    torch.testing.assert_close(torch.cat([first.logits, *rest], dim=1), full, rtol=1e-9, atol=1e-10)
    assert cache.get_seq_length() == NUM_PREFIX + 9
    cache.crop(2)
    model(IDS[:, :3], past_key_values=cache)
    assert torch.equal(numbers, untouched)


@torch.no_grad()
def test_padding_after_a_prefix_changes_nothing():
    model = build("flt")
    numbers = random_prefix(model, 2)
    alone = model(IDS[:1, 3:], past_key_values=as_cache(numbers[:, :, :1])).logits
    mask = torch.ones(2, NUM_PREFIX + 9)
    mask[0, NUM_PREFIX : NUM_PREFIX + 3] = 0
    together = model(IDS, attention_mask=mask, past_key_values=as_cache(numbers)).logits
    torch.testing.assert_close(together[:1, 3:], alone, rtol=1e-9, atol=1e-10)


def test_the_objective_sees_the_prefix_on_both_trajectories():
    model = build("loopformer", short_weight=0.3, consistency_weight=0.7)
    prefix = as_cache(random_prefix(model, 2))
    with torch.no_grad():
        long, short = (
            model(IDS, labels=IDS, past_key_values=prefix, schedule=run).loss for run in ("uniform:3", "1/3,2/3")
        )
    model.train()
    output = model(IDS, labels=IDS, past_key_values=prefix, short_schedule="1/3,2/3")
    torch.testing.assert_close(output.loss_parts["cross_entropy"], long)
    torch.testing.assert_close(output.loss_parts["short_cross_entropy"], short)


@pytest.mark.parametrize("preset", SYSTEMS)
@pytest.mark.parametrize("num_grad_loops", [None, 2])
def test_gradients_of_the_prefix_are_those_of_finite_differences(preset, num_grad_loops):
    model = build(preset).train()
    numbers = random_prefix(model, num_layers(model), requires_grad=True)
    if num_grad_loops is not None:
        if model.config.stream == "state":
            pytest.skip("a system whose later loops do not see the inputs refuses truncation")
        # Truncation drops the first loops' gradient, which a difference would see: give these loops entries of their own.
        core = model.config.num_hidden_layers
        before = model.config.num_prelude_layers
        with torch.no_grad():
            entries = torch.cat([numbers[:before], *[numbers[before : before + core]] * 3, numbers[before + core :]])
        numbers = entries.clone().requires_grad_()
    if model.config.objective == "shortcut_consistency":
        model.config.consistency_weight = 0.0  # its target is a constant to gradients, and not to differences
    run = {"short_schedule": "uniform:2"} if model.config.objective == "shortcut_consistency" else {}
    run |= {} if num_grad_loops is None else {"num_grad_loops": num_grad_loops}

    def loss(entries):
        return model(IDS, labels=IDS, past_key_values=as_cache(entries), **run).loss

    (gradient,) = torch.autograd.grad(loss(numbers), numbers)
    direction = torch.randn(numbers.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if num_grad_loops is not None:  # only the last loop, which no truncation cuts off on either trajectory
        first = model.config.num_prelude_layers + 2 * model.config.num_hidden_layers
        direction[:first] = 0
        gradient[:first] = 0
    with torch.no_grad():
        step = 1e-5
        difference = (loss(numbers + step * direction) - loss(numbers - step * direction)) / (2 * step)
    assert float(difference.abs()) > 1e-6
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("given", "overrides", "message"),
    [
        (lambda m: as_cache(random_prefix(m, 5)), {}, "5 layers for a model of 2; give .*or 6, one for each time"),
        (lambda m: as_cache(random_prefix(m, 2)[..., :3]), {}, "core layer 0 has keys and values of shape .*needs"),
        (lambda m: as_cache(random_prefix(m, 2)[:, :, :1]), {}, "a batch of 2 on a cache of 1 rows"),
        (lambda m: as_cache(random_prefix(m, 2)), {"kv_lora_rank": 5}, "kv_lora_rank=5: its cache holds latents"),
        (lambda m: DynamicCache(), {}, "an empty DynamicCache .* pass model.new_cache()"),
        (lambda m: StaticCache(m.config, max_cache_len=8), {}, "a StaticCache has one row for each layer"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_other_caches_are_refused_by_name(given, overrides, message, training):
    model = build("flt", num_key_value_heads=4, **overrides).train(training)
    with pytest.raises(CacheError, match=message):
        model(IDS, labels=IDS, past_key_values=given(model))


def test_a_prefix_before_packed_documents_is_refused():
    model = build("flt", num_key_value_heads=4)
    positions = torch.tensor([[4, 5, 6, 7, 4, 5, 6, 7, 8]]).expand(2, -1)
    with pytest.raises(ConfigError, match="only the first of them would see the prefix"):
        model(IDS, position_ids=positions, past_key_values=as_cache(random_prefix(model, 2)))


def test_a_prefix_under_activation_checkpointing_is_refused(checkpoint_activations):
    model = checkpoint_activations(build("flt", num_key_value_heads=4)).train()
    with pytest.raises(CacheError, match="turn activation checkpointing off to train a prefix"):
        model(IDS, labels=IDS, past_key_values=as_cache(random_prefix(model, 2)))


@peft_asks_by_an_older_name
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT counts them itself
@pytest.mark.filterwarnings("ignore::loopformers.errors.ExitWarning")
@pytest.mark.parametrize("method", [PrefixTuningConfig, PromptTuningConfig])
@pytest.mark.parametrize("preset", ["flt", "loopformer"])
@pytest.mark.parametrize("exit_rule", [None, "state:1e-9"])
def test_generating_with_pefts_virtual_tokens_gives_what_full_forwards_give(method, preset, exit_rule):
    from loopformers.generation import parse_exit_rule

    base = tiny_model(preset)
    base.generation_config.eos_token_id = base.config.eos_token_id = None
    model = get_peft_model(base, method(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=NUM_PREFIX)).eval()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_()
    rule = {} if exit_rule is None else {"exit_rule": parse_exit_rule(exit_rule)}
    ids, mask = IDS[:, :5], torch.ones(2, 5, dtype=torch.long)
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, **rule
    )
    expected = ids
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=expected, attention_mask=torch.ones_like(expected)).logits[:, -1]
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(out, expected)


@peft_asks_by_an_older_name
def test_a_trained_prefix_changes_and_nothing_else_does():
    base = tiny_model("loopformer")
    before = copy.deepcopy(base.state_dict())
    model = get_peft_model(
        base, PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=NUM_PREFIX)
    ).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0)
    losses = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
