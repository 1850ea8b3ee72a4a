"""Adaptive exit against its readable reference: every recurrence, chunking, padding and decoding (fault 6)."""

from __future__ import annotations

import math

import pytest
import torch

from loopformers import CacheError, ConfigError
from loopformers.generation import ArgmaxExit, EntropyExit, KLExit, StateChangeExit, adaptive, exit_logits
from loopformers.generation.reference import exit_reference
from loopformers.generation.rules import ExitRule
from loopformers.model.presets import PRESETS
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.testing import tiny_model


class AfterLoops(ExitRule):
    """Leave after a fixed number of loops."""

    name = "after"

    def __init__(self, num_loops):
        self.threshold = -num_loops

    def score(self, look, memory):
        done = torch.ones(len(look.state)) if memory is None else memory + 1
        return -done, done


class ByToken(AfterLoops):
    """Leave after as many loops as the token's best guess says: any depth for any token."""

    def score(self, look, memory):
        if memory is None:
            wanted = 1 + look.logits.argmax(dim=-1) % 5
            memory = torch.stack([wanted, torch.zeros_like(wanted)], dim=-1)
        memory = memory + torch.tensor([0, 1])
        return (memory[:, 0] - memory[:, 1]).float(), memory


NEVER, BY_TOKEN = AfterLoops(10**6), ByToken(0)
VARIANTS = [
    *((preset, {}) for preset in PRESETS if preset != "base"),
    ("flt", {"kv_lora_rank": 7}),
    ("lt-input", {"kv_lora_rank": 7}),
    ("flt", {"window_pattern": "SL", "sliding_window": 3}),
    ("flt", {"num_key_value_heads": 2}),
    ("flt", {"num_prelude_layers": 1}),
    ("lt-query", {"conditioning": "time_and_step"}),
]
CODAS = [("flt", {"num_coda_layers": 1}), ("lt-input", {"num_coda_layers": 2, "num_prelude_layers": 1})]


def build(preset, overrides, **more):
    return tiny_model(preset, num_loops=5, **overrides, **more).double()


def tokens(batch=3, length=7):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(4))


def one_by_one(model, ids, rule, split=1, mask=None, **run):
    """Feed a prompt of `split` tokens, then one token at a time, with a cache."""
    cache, logits = model.new_cache(), []
    with torch.no_grad():
        for start, stop in [(0, split), *((i, i + 1) for i in range(split, ids.shape[1]))]:
            seen = None if mask is None else mask[:, :stop]
            out = model(ids[:, start:stop], attention_mask=seen, past_key_values=cache, exit_rule=rule, **run)
            logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


# -- the reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "overrides"), VARIANTS, ids=str)
def test_tokens_leave_when_and_with_what_the_reference_says(preset, overrides):
    model = build(preset, overrides)
    expected, loops = exit_reference(model, tokens(), BY_TOKEN)
    assert len(loops.unique()) > 2, "a test of different depths needs some"
    found, found_loops = exit_logits(model, tokens(), BY_TOKEN)
    assert torch.equal(found_loops, loops)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("preset", "overrides"), VARIANTS, ids=str)
@pytest.mark.parametrize("split", [1, 4])
def test_decoding_token_by_token_is_the_same(preset, overrides, split):
    model = build(preset, overrides)
    expected, loops = exit_reference(model, tokens(), BY_TOKEN)
    found, cache = one_by_one(model, tokens(), BY_TOKEN, split)
    assert torch.equal(cache.exit_loops, loops)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rule", [KLExit(0.3), EntropyExit(0.2), StateChangeExit(0.6), ArgmaxExit(1)], ids=str)
@pytest.mark.parametrize("preset", ["flt", "lt-input", "elastic-flt"])
def test_each_rule_remembers_through_exits_what_the_reference_remembers(preset, rule):
    model = build(preset, {})
    expected, loops = exit_reference(model, tokens(4, 11), rule)
    assert len(loops.unique()) > 1
    found, found_loops = exit_logits(model, tokens(4, 11), rule)
    assert torch.equal(found_loops, loops)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("preset", ["flt", "lt", "elastic-flt"])
def test_what_a_token_does_depends_on_no_later_token(preset):
    """So loops in the outer order are tokens in the outer order."""
    model = build(preset, {})
    whole, loops = exit_reference(model, tokens(), BY_TOKEN)
    part, part_loops = exit_reference(model, tokens()[:, :4], BY_TOKEN)
    assert torch.equal(loops[:, :4], part_loops)
    torch.testing.assert_close(whole[:, :4], part, atol=1e-9, rtol=1e-9)


def test_long_prompts_exit_in_chunks(monkeypatch):
    model, ids = build("flt", {}), tokens(3, 11)
    whole, loops = exit_logits(model, ids, BY_TOKEN)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    padded, padded_loops = exit_logits(model, ids, BY_TOKEN, attention_mask=mask)
    monkeypatch.setattr(adaptive, "CHUNK_TOKENS", 12)
    again, again_loops = exit_logits(model, ids, BY_TOKEN)
    assert torch.equal(loops, again_loops)
    torch.testing.assert_close(whole, again, atol=1e-9, rtol=1e-9)
    again, again_loops = exit_logits(model, ids, BY_TOKEN, attention_mask=mask)
    assert torch.equal(padded_loops, again_loops)
    torch.testing.assert_close(padded[mask.bool()], again[mask.bool()], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("preset", ["flt", "loopformer", "lt-input"])
def test_padded_rows_leave_as_they_do_alone(preset):
    """Fault 4, and 6: exit that works at batch 1 only."""
    model, ids = build(preset, {}), tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :1] = 0
    for found, loops in (exit_logits(model, ids, BY_TOKEN, attention_mask=mask),
                         (lambda out: (out[0], out[1].exit_loops))(one_by_one(model, ids, BY_TOKEN, 6, mask))):  # fmt: skip
        assert (loops[~mask.bool()] == 0).all()
        for row in range(3):
            text = mask[row].bool()
            alone, alone_loops = exit_logits(model, ids[row : row + 1, text], BY_TOKEN)
            assert torch.equal(loops[row, text], alone_loops[0])
            torch.testing.assert_close(found[row, text], alone[0], atol=1e-9, rtol=1e-9)


def test_the_first_layer_of_the_loop_that_a_token_enters_is_true():
    """So in a stack of one layer a token that is one loop deeper sees nothing but what is true."""

    class TwoOrThree(AfterLoops):
        def score(self, look, memory):
            if memory is None:
                memory = torch.stack([2 + look.logits.argmax(dim=-1) % 2, torch.zeros(len(look.state))], dim=-1).long()
            memory = memory + torch.tensor([0, 1])
            return (memory[:, 0] - memory[:, 1]).float(), memory

    for preset in ("lt-input", "lt", "loopformer", "elastic-flt"):
        model = build(preset, {"num_hidden_layers": 1})
        exact, loops = exit_reference(model, tokens(4, 9), TwoOrThree(0), deeper_rows="exact")
        assert len(loops.unique()) == 2
        found, found_loops = exit_logits(model, tokens(4, 9), TwoOrThree(0))
        assert torch.equal(found_loops, loops)
        torch.testing.assert_close(found, exact, atol=1e-9, rtol=1e-9)
        copied, _ = exit_reference(model, tokens(4, 9), TwoOrThree(0), deeper_rows="copy")
        assert not torch.allclose(copied, exact)


# -- fixed depths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "overrides"), [*VARIANTS, *CODAS], ids=str)
def test_a_rule_that_never_fires_changes_nothing(preset, overrides):
    model = build(preset, overrides)
    with torch.no_grad():
        plain = model(tokens()).logits
    found, loops = exit_logits(model, tokens(), NEVER)
    assert (loops == 5).all()
    if overrides.get("num_coda_layers"):
        torch.testing.assert_close(found, plain, atol=1e-9, rtol=1e-9)
    else:
        assert torch.equal(found, plain)


@pytest.mark.parametrize(("preset", "overrides"), [*VARIANTS, *CODAS], ids=str)
@pytest.mark.parametrize("num_loops", [1, 3])
def test_a_rule_that_always_fires_is_that_budget(preset, overrides, num_loops):
    model = build(preset, overrides)
    told_step = model.config.conditioning == "time_and_step"
    if model.config.understands_time:  # the first loops of five, which no schedule of its own is
        model.config.num_loops = 5
        with torch.no_grad():
            state = model(tokens(), output_loop_states=True).loop_states[num_loops - 1]
            plain = model.head(state if model.config.loop_norm else model.model.norm(state))
    else:
        with torch.no_grad():
            plain = model(tokens(), num_loops=num_loops).logits
    found, loops = exit_logits(model, tokens(), AfterLoops(num_loops))
    assert (loops == num_loops).all()
    torch.testing.assert_close(found, plain, atol=1e-9, rtol=1e-9)
    found, cache = one_by_one(model, tokens(), AfterLoops(num_loops))
    torch.testing.assert_close(found, plain, atol=1e-9, rtol=1e-9)
    assert len(cache) == model.config.slot_layout.num_slots(num_loops) + 1, "deeper rows take no memory"
    if told_step:
        with torch.no_grad():
            assert not torch.allclose(plain, model(tokens(), num_loops=num_loops).logits)


@pytest.mark.parametrize(("preset", "overrides"), CODAS, ids=str)
def test_a_coda_sees_each_earlier_token_as_it_left(preset, overrides):
    model = build(preset, overrides)
    whole, loops = exit_logits(model, tokens(), BY_TOKEN)
    assert len(loops.unique()) > 2
    found, cache = one_by_one(model, tokens(), BY_TOKEN, 4)
    assert torch.equal(cache.exit_loops, loops)
    torch.testing.assert_close(found, whole, atol=1e-9, rtol=1e-9)
    for row in range(3):
        alone, _ = exit_logits(model, tokens()[row : row + 1], BY_TOKEN)
        torch.testing.assert_close(alone[0], whole[row], atol=1e-9, rtol=1e-9)
    first = tokens()[:, :1]  # with no context a token that left is a run of its loops
    for row, depth in enumerate(loops[:, 0].tolist()):
        with torch.no_grad():
            alone = model(first[row : row + 1], num_loops=depth).logits
        torch.testing.assert_close(whole[row : row + 1, :1], alone, atol=1e-9, rtol=1e-9)


# -- compute and memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [7, 3])
def test_layers_run_on_the_tokens_that_are_left_and_on_no_others(split):
    """Fault 6: exit that runs every loop all the same."""
    model, seen = build("flt", {}), []
    _, loops = exit_logits(model, tokens(8, 7), BY_TOKEN)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[:2].numel()))
    one_by_one(model, tokens(8, 7), BY_TOKEN, split)
    if split == 7:
        lines = [(loops > i).sum(1) for i in range(int(loops.max()))]
        grids = [int((line > 0).sum() * line.max()) for line in lines]
        assert seen == grids
        assert sum(seen) < 8 * 7 * 5
    else:
        assert sum(seen[-int(loops[:, -1].max()) :]) == int(loops[:, -1].sum())


def test_rows_that_nobody_reaches_are_not_allocated_and_are_filled_when_somebody_does():
    model = build("lt-input", {})
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens()[:, :4], past_key_values=cache, exit_rule=AfterLoops(2))
        assert len(cache) == 2 * 2 + 1, "two loops of two layers, and the first layer of the loop behind"
        deep = model(tokens()[:, 4:5], past_key_values=cache, exit_rule=NEVER).logits
    assert len(cache) == 2 * 5
    for layer in range(2):
        shallow, deepest = cache.slot("core", layer, 2 if layer == 0 else 1), cache.slot("core", layer, 4)
        assert torch.equal(shallow.keys[..., :4, :], deepest.keys[..., :4, :])
        assert torch.equal(shallow.values[..., :4, :], deepest.values[..., :4, :])
        assert not torch.equal(shallow.keys[..., 4:5, :], deepest.keys[..., 4:5, :])
    assert deep.isfinite().all()
    assert cache.exit_loops.tolist() == [[2, 2, 2, 2, 5]] * 3


def test_a_plain_call_goes_on_from_tokens_that_left_and_reads_the_same_rows():
    model = build("lt-input", {})
    caches = [model.new_cache(), model.new_cache()]
    with torch.no_grad():
        for cache in caches:
            model(tokens()[:, :5], past_key_values=cache, exit_rule=AfterLoops(2))
        plain = model(tokens()[:, 5:], past_key_values=caches[0])
        adaptive_ = model(tokens()[:, 5:], past_key_values=caches[1], exit_rule=NEVER)
    torch.testing.assert_close(plain.logits, adaptive_.logits, atol=1e-9, rtol=1e-9)
    assert torch.equal(caches[0].exit_loops, caches[1].exit_loops)


@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
def test_cropping_and_reordering_keep_the_rows_of_tokens_that_left(preset):
    """Assisted decoding crops and beam search reorders; a call that failed leaves nothing."""
    model = build(preset, {})
    ids = tokens(3, 8)
    expected, loops = exit_logits(model, ids, BY_TOKEN)
    cache = model.new_cache()
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache, exit_rule=BY_TOKEN)
        model(torch.flip(ids, (0,))[:, 4:], past_key_values=cache, exit_rule=NEVER)
        cache.crop(-4)
        assert torch.equal(cache.exit_loops, loops[:, :4])
        order = torch.tensor([2, 0, 1])
        cache.reorder_cache(order)
        found = model(ids[order, 4:6], past_key_values=cache, exit_rule=BY_TOKEN).logits
        torch.testing.assert_close(found, expected[order, 4:6], atol=1e-9, rtol=1e-9)
        handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[order, :2], past_key_values=cache, exit_rule=BY_TOKEN)
        handle.remove()
        found = model(ids[order, 6:], past_key_values=cache, exit_rule=BY_TOKEN).logits
        torch.testing.assert_close(found, expected[order, 6:], atol=1e-9, rtol=1e-9)
    assert torch.equal(cache.exit_loops, loops[order])


# -- generate ------------------------------------------------------------------------------------------------------


def greedy_by_hand(model, ids, num_new, rule, **run):
    loops = None
    for _ in range(num_new):
        logits, loops = exit_reference(model, ids, rule, **run)
        ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids, loops


@pytest.mark.parametrize("preset", ["flt", "lt", "lt-input", "loopformer", "elastic-flt", "tmlt"])
def test_greedy_generation_equals_a_loop_that_recomputes_everything(preset):
    model = build(preset, {})
    expected, loops = greedy_by_hand(model, tokens(), 6, BY_TOKEN)
    out = model.generate(tokens(), max_new_tokens=6, do_sample=False, exit_rule=BY_TOKEN, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert torch.equal(out[CACHE_NAME].exit_loops, loops)
    plain = model.generate(tokens(), max_new_tokens=6, do_sample=False)
    assert not torch.equal(plain, expected)
    assert torch.equal(plain, model.generate(tokens(), max_new_tokens=6, do_sample=False, exit_rule=NEVER))
    uncached = model.generate(tokens(), max_new_tokens=6, do_sample=False, exit_rule=BY_TOKEN, use_cache=False)
    assert torch.equal(uncached, expected)


def test_a_schedule_bounds_what_a_token_may_get():
    model = build("elastic-flt", {})
    expected, loops = greedy_by_hand(model, tokens(), 3, BY_TOKEN, schedule="fine-first:3")
    assert int(loops.max()) == 3
    out = model.generate(tokens(), max_new_tokens=3, do_sample=False, exit_rule=BY_TOKEN, schedule="fine-first:3")
    assert torch.equal(out, expected)


def test_beams_and_assistants_and_samples_run_under_a_rule():
    model = build("flt", {"eos_token_id": 60})
    asked = {"max_new_tokens": 5, "exit_rule": BY_TOKEN}
    assert model.generate(tokens(), num_beams=3, do_sample=False, **asked).shape[0] == 3
    ids = tokens(1, 4).repeat(1, 2)
    greedy = model.generate(ids, do_sample=False, **asked)
    assert torch.equal(model.generate(ids, do_sample=False, prompt_lookup_num_tokens=3, **asked), greedy)
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(model.generate(tokens(), do_sample=True, **asked))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# -- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_no_rule_and_what_a_rule_cannot_give_is_refused():
    model = build("flt", {})
    with pytest.raises(ConfigError, match=r"exit_rule='kl:1' is no exit rule; .*parse_exit_rule"):
        model.generate(tokens(), max_new_tokens=2, exit_rule="kl:1")
    with pytest.raises(ConfigError, match="leave these out"):
        model(tokens(), labels=tokens(), exit_rule=NEVER)
    with pytest.raises(ConfigError, match="leave these out"):
        model(tokens(), output_loop_states=True, exit_rule=NEVER)
    with pytest.raises(ConfigError, match="num_loops=0"):
        model(tokens(), num_loops=0, exit_rule=NEVER)
    with pytest.raises(ConfigError, match="exactly one of input_ids"):
        model(exit_rule=NEVER)
    cache = model.new_cache()
    model(tokens(), past_key_values=cache, exit_rule=NEVER)
    with pytest.raises(CacheError, match="go on with that schedule"):
        model(tokens(), past_key_values=cache, exit_rule=NEVER, num_loops=2)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        model(tokens(), exit_rule=NEVER)


def test_scores_of_nothing_to_compare_with_are_infinite():
    assert math.isinf(KLExit(1.0).score(type("L", (), {"logits": torch.zeros(2, 3)})(), None)[0][0])
