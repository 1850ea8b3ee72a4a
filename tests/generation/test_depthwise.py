"""Rows in different loops at once, against the same rows one token at a time."""

from __future__ import annotations

import pytest
import torch

from loopformers.generation import KLExit, StateChangeExit, depthwise, rules
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.testing import tiny_model
from tests.generation.test_adaptive import BY_TOKEN, NEVER, AfterLoops, build, greedy_by_hand, tokens

ORDINARY = [
    ("flt", {}),
    ("lt", {}),
    ("lt-input", {}),
    ("lt-query", {}),
    ("flt-residual", {}),
    ("elastic-balanced", {}),
    ("loopformer", {}),
    ("elastic-flt", {}),
    ("tmlt", {}),
    ("flt", {"num_key_value_heads": 2}),
    ("lt-input", {"window_pattern": "SL", "sliding_window": 3}),
]


@pytest.fixture
def calls(monkeypatch):
    """Counts how often the stack was called for mixed loops, and with how many rows."""
    seen = []
    run = depthwise._Rows._loop

    def watched(self):
        seen.append(len(self.running))
        return run(self)

    monkeypatch.setattr(depthwise._Rows, "_loop", watched)
    return seen


@pytest.mark.parametrize(("preset", "overrides"), ORDINARY, ids=str)
def test_tokens_and_loops_are_those_of_a_loop_that_recomputes_everything(preset, overrides, calls):
    model = build(preset, overrides)
    expected, loops = greedy_by_hand(model, tokens(), 8, BY_TOKEN)
    out = model.generate(tokens(), max_new_tokens=8, do_sample=False, exit_rule=BY_TOKEN, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert torch.equal(out[CACHE_NAME].exit_loops, loops)
    assert sum(calls) == int(loops[:, 7:].sum()), "every call runs every row that is not done"
    assert len(calls) == int(loops[:, 7:].sum(dim=1).max()), "no row waits for another"


@pytest.mark.parametrize(
    "rule", [KLExit(0.3), StateChangeExit(0.6), AfterLoops(2), NEVER], ids=["kl", "state", "after two", "never"]
)
def test_rules_remember_by_row(rule, calls):
    model = build("lt-input", {})
    expected, loops = greedy_by_hand(model, tokens(4, 5), 7, rule)
    out = model.generate(tokens(4, 5), max_new_tokens=7, do_sample=False, exit_rule=rule, return_dict_in_generate=True)
    assert calls
    assert torch.equal(out.sequences, expected)
    assert torch.equal(out[CACHE_NAME].exit_loops, loops)


@pytest.mark.parametrize("preset", ["flt", "loopformer", "elastic-flt"])
def test_padded_rows_that_stop_at_other_times_are_what_they_are_alone(preset, calls):
    model, ids = build(preset, {"pad_token_id": 0}), tokens(4, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :1] = 0
    free, _ = greedy_by_hand(model, ids[1:2], 6, BY_TOKEN)
    model.generation_config.eos_token_id = stop = int(free[0, 11])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, exit_rule=BY_TOKEN, return_dict_in_generate=True
    )
    cache = out[CACHE_NAME]
    assert calls
    for row in range(4):
        alone, loops = greedy_by_hand(model, ids[row : row + 1, mask[row].bool()], 6, BY_TOKEN)
        new = alone[0, -6:].tolist()
        new = new[: new.index(stop) + 1] if stop in new else new
        assert out.sequences[row, 9:].tolist() == new + [0] * (out.sequences.shape[1] - 9 - len(new))
        num_run = len(new) - 1
        found = cache.exit_loops[row, 9 : 9 + num_run]
        assert torch.equal(found, loops[0, -5:][:num_run])
        assert (cache.exit_loops[row, 9 + num_run :] == 0).all()


@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
@pytest.mark.parametrize("rule", [BY_TOKEN, AfterLoops(1)], ids=["by token", "after one"])
def test_tokens_may_enter_the_next_loop_one_by_one_or_many_together(preset, rule, monkeypatch, calls):
    model, caches, sizes = build(preset, {}), {}, {}
    enter = depthwise._Rows._enter

    def counted(self):
        sizes.setdefault(depthwise.MOST_ENTERING, []).append(len(self.entering))
        enter(self)

    monkeypatch.setattr(depthwise._Rows, "_enter", counted)
    for most in (1, 5, 256):
        monkeypatch.setattr(depthwise, "MOST_ENTERING", most)
        asked = {"max_new_tokens": 8, "do_sample": False, "exit_rule": rule, "return_dict_in_generate": True}
        caches[most] = model.generate(tokens(), **asked)[CACHE_NAME]
    assert calls
    assert len(sizes[1]) > len(sizes[5]) >= len(sizes[256])
    assert sum(sizes[1]) == sum(sizes[5]) == sum(sizes[256]) > 0
    for most in (5, 256):
        assert torch.equal(caches[1].exit_loops, caches[most].exit_loops)
        for one, other in zip(caches[1].layers, caches[most].layers, strict=True):
            assert one.num_filled == other.num_filled
            for name in ("keys", "values"):
                mine, theirs = (getattr(slot, name)[:, :, : one.num_filled] for slot in (one, other))
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_cache_that_comes_back_goes_on_exactly(calls):
    model = build("elastic-flt", {})
    expected, loops = greedy_by_hand(model, tokens(), 9, BY_TOKEN)
    cache = model.new_cache()
    asked = {"do_sample": False, "exit_rule": BY_TOKEN, CACHE_NAME: cache}
    first = model.generate(tokens(), max_new_tokens=4, **asked)
    assert cache.get_seq_length() == first.shape[1] - 1
    second = model.generate(first, max_new_tokens=5, **asked)
    assert calls
    assert torch.equal(second, expected)
    assert torch.equal(cache.exit_loops, loops)
    cache.crop(-3)
    with torch.no_grad():
        again = model(expected[:, -4:-1], exit_rule=BY_TOKEN, **{CACHE_NAME: cache})
    assert torch.equal(again.exit_loops, loops[:, -3:])


def test_sampling_is_seeded_and_processors_see_each_rows_own_text(calls):
    model = build("flt", {})
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(model.generate(tokens(), max_new_tokens=8, do_sample=True, top_k=7, exit_rule=BY_TOKEN))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    asked = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 1, "exit_rule": BY_TOKEN}
    together = model.generate(tokens(), **asked)
    assert calls
    for row in range(3):
        assert torch.equal(model.generate(tokens()[row : row + 1], **asked), together[row : row + 1])


@pytest.mark.parametrize(
    ("preset", "overrides", "asked"),
    [
        ("flt", {"num_coda_layers": 1}, {}),
        ("flt", {"num_prelude_layers": 1}, {}),
        ("flt", {"kv_lora_rank": 7}, {}),
        ("flt", {}, {"use_cache": False}),
        ("flt", {}, {"return_dict_in_generate": True, "output_logits": True}),
        ("flt", {}, {"num_beams": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_know_is_decoded_token_by_token(preset, overrides, asked, calls):
    model = build(preset, overrides)
    out = model.generate(tokens(), max_new_tokens=3, do_sample=False, exit_rule=BY_TOKEN, **asked)
    assert not calls
    assert (out.sequences if hasattr(out, "sequences") else out).shape == (3, 10)


def test_token_by_token_gives_the_same(monkeypatch, calls):
    model = build("elastic-flt", {})
    asked = {"max_new_tokens": 6, "do_sample": False, "exit_rule": BY_TOKEN}
    mixed = model.generate(tokens(5, 6), **asked)
    num_calls = len(calls)
    monkeypatch.setattr(rules, "can_decode_depthwise", lambda *_: False)
    assert torch.equal(model.generate(tokens(5, 6), **asked), mixed)
    assert len(calls) == num_calls > 0


def test_one_new_token_and_learned_positions_at_their_end():
    model = tiny_model("loopformer", num_loops=5).double()
    one = model.generate(tokens(), max_new_tokens=1, do_sample=False, exit_rule=BY_TOKEN)
    assert torch.equal(one, greedy_by_hand(model, tokens(), 1, BY_TOKEN)[0])
    full = model.generate(tokens(3, 36), max_new_tokens=5, do_sample=False, exit_rule=BY_TOKEN)
    assert torch.equal(full, greedy_by_hand(model, tokens(3, 36), 5, BY_TOKEN)[0])


@pytest.mark.parametrize(("preset", "overrides"), [("flt", {"num_key_value_heads": 2}), ORDINARY[-1]], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_copies_of_keys_say_what_views_of_them_say(preset, overrides, implementation, monkeypatch, calls):
    """Views are for a CPU's SDPA alone; an accelerator and any other attention function get copies."""
    model, ids = build(preset, {"pad_token_id": 0, **overrides}), tokens(4, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :1] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "exit_rule": BY_TOKEN}
    views = model.generate(ids, **asked)
    seen = []
    copies = depthwise.attend_by_copies
    monkeypatch.setattr(depthwise, "attend_by_copies", lambda *given: seen.append(1) or copies(*given))
    if implementation == "eager":
        model.set_attn_implementation("eager")
    else:
        make = depthwise._Rows.__init__

        def without_views(self, *given):
            make(self, *given)
            self.by_views = False

        monkeypatch.setattr(depthwise._Rows, "__init__", without_views)
    assert torch.equal(model.generate(ids, **asked), views)
    assert seen


def test_what_memory_held_before_changes_nothing(monkeypatch):
    model = build("elastic-flt", {})
    expected = model.generate(tokens(), max_new_tokens=8, do_sample=False, exit_rule=BY_TOKEN)
    plain = torch.Tensor.new_empty
    dirty = lambda self, *shape, **more: plain(self, *shape, **more).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", dirty)
    assert torch.equal(model.generate(tokens(), max_new_tokens=8, do_sample=False, exit_rule=BY_TOKEN), expected)
