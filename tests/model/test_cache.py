"""Cached decoding equals the full forward: every preset, loop count, schedule, chunking and padding (faults 1, 2, 4, 5)."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopformers import CacheError, Schedule
from loopformers.model.presets import PRESETS
from loopformers.testing import tiny_model

ATTENTION_VARIANTS = {
    "multi-head": {},
    "grouped-query": {"num_key_value_heads": 2},
    "latent": {"kv_lora_rank": 5},
    "sliding": {"window_pattern": "SL", "sliding_window": 3},
    "latent-sliding": {"kv_lora_rank": 5, "window_pattern": "SSL", "sliding_window": 4, "num_hidden_layers": 3},
    "prelude-and-coda": {"num_prelude_layers": 1, "num_coda_layers": 2, "window_pattern": "SL", "sliding_window": 5},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def relative_difference(a, b):
    return float((a - b).norm() / b.norm())


def tokens(batch, length, seed=1):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode_in_chunks(model, ids, chunks, **run):
    cache = model.new_cache()
    pieces = [model(piece, past_key_values=cache, **run).logits for piece in ids.split(chunks, dim=1)]
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(pieces, dim=1)


def check_exact(model, ids, chunks, **run):
    with torch.no_grad():
        full = model(ids, use_cache=False, **run).logits
    cached = decode_in_chunks(model, ids, chunks, **run)
    assert relative_difference(cached, full) < TOLERANCE[model.dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_loops", [1, 2, 3, 12])
@pytest.mark.parametrize("preset", PRESETS)
def test_cached_decoding_equals_the_full_forward(preset, num_loops, dtype):
    model = tiny_model(preset).to(dtype)
    check_exact(model, tokens(2, 9), [4, 1, 1, 3], num_loops=num_loops)


@pytest.mark.parametrize("num_loops", range(1, 13))
@pytest.mark.parametrize("preset", ["lt", "flt", "loopformer", "elastic-flt", "elastic-balanced"])
def test_every_loop_count_from_1_to_12_is_exact_token_by_token(preset, num_loops):
    check_exact(tiny_model(preset).double(), tokens(1, 5), [1] * 5, num_loops=num_loops)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
@pytest.mark.parametrize(
    "preset",
    ["lt", "lt-input", "lt-query", "flt-residual", "flt", "lt-balanced", "lt-adapter", "loopformer", "elastic-flt"],
)
def test_every_attention_variant_is_exact(preset, variant):
    model = tiny_model(preset, **ATTENTION_VARIANTS[variant]).double()
    check_exact(model, tokens(3, 11), [5, 1, 1, 4], num_loops=4)


@pytest.mark.parametrize("schedule", ["uniform:5", "coarse-first:3", "fine-first:3", "1/7,2/7,4/7", [0.5, 0.25, 0.25]])
@pytest.mark.parametrize("preset", ["loopformer", "elastic-flt"])
def test_every_kind_of_schedule_is_exact(preset, schedule):
    check_exact(tiny_model(preset, num_loops=6).double(), tokens(2, 8), [3, 1, 4], schedule=schedule)


@settings(max_examples=40)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    variant=st.sampled_from(sorted(ATTENTION_VARIANTS)),
    num_loops=st.integers(1, 12),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_any_chunking_of_any_model_at_any_budget_is_exact(preset, variant, num_loops, chunks, seed):
    model = tiny_model(preset, seed=seed, **ATTENTION_VARIANTS[variant]).double()
    check_exact(model, tokens(2, sum(chunks), seed), chunks, num_loops=num_loops)


@settings(max_examples=25)
@given(
    preset=st.sampled_from(["loopformer", "elastic-flt"]),
    numerators=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_schedule_is_exact(preset, numerators, seed):
    schedule = Schedule(tuple(numerators), sum(numerators))
    check_exact(tiny_model(preset, seed=seed).double(), tokens(2, 6, seed), [2, 1, 3], schedule=schedule)


@settings(max_examples=30)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    variant=st.sampled_from(sorted(ATTENTION_VARIANTS)),
    lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    cut=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_padded_batches_equal_their_rows_one_by_one(preset, variant, lengths, side, cut, seed):
    """Fault 4: the mask counts, in one forward and in a chunked one, whatever stands in the padding."""
    model = tiny_model(preset, seed=seed, **ATTENTION_VARIANTS[variant]).double()
    longest = max(lengths)
    batch, mask = tokens(len(lengths), longest, seed), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        row[longest - length :] = 1
        if side == "right":
            row.copy_(row.flip(0))
    cut = min(cut, longest)
    with torch.no_grad():
        together = model(batch, attention_mask=mask, use_cache=False, num_loops=3).logits
        cache = model.new_cache()
        first = model(batch[:, :cut], attention_mask=mask[:, :cut], past_key_values=cache, num_loops=3).logits
        pieces = [first]
        if cut < longest:
            pieces.append(model(batch[:, cut:], attention_mask=mask, past_key_values=cache, num_loops=3).logits)
        chunked = torch.cat(pieces, dim=1)
        for row in range(len(lengths)):
            kept = mask[row].bool()
            alone = model(batch[row : row + 1, kept], use_cache=False, num_loops=3).logits[0]
            assert relative_difference(together[row, kept], alone) < 1e-10
            assert relative_difference(chunked[row, kept], alone) < 1e-10
    assert together.isfinite().all()


@pytest.mark.parametrize("preset", ["flt", "loopformer", "base"])
def test_decoding_goes_on_after_a_padded_prefill_without_the_mask_being_given_again(preset):
    model = tiny_model(preset).double()
    ids, mask = tokens(2, 6), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        cache = model.new_cache()
        model(ids[:, :4], attention_mask=mask, past_key_values=cache)
        bare = model(ids[:, 4:], past_key_values=cache).logits
        full = model(
            ids, attention_mask=torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1), use_cache=False
        ).logits
    assert relative_difference(bare, full[:, 4:]) < 1e-10


@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_keeping_only_the_last_loop_would_be_noticed(preset):
    """Fault 1, made here on purpose: the test above must be able to fail."""
    model = tiny_model(preset).double()
    ids = tokens(1, 6)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        cache = model.new_cache()
        model(ids[:, :5], past_key_values=cache)
        for layer in range(2):
            last = cache.slot("core", layer, 2)
            for loop in range(2):
                cache.slot("core", layer, loop).keys = last.keys.clone()
                cache.slot("core", layer, loop).values = last.values.clone()
        wrong = model(ids[:, 5:], past_key_values=cache).logits
    assert relative_difference(wrong, full[:, 5:]) > 1e-3


def test_another_schedule_on_a_live_cache_is_refused():
    model = tiny_model("loopformer", num_loops=4)
    cache = model.new_cache()
    model(tokens(1, 3), past_key_values=cache, schedule="coarse-first:2")
    for other in ({"schedule": "fine-first:2"}, {"num_loops": 2}, {"num_loops": 3}, {}):
        with pytest.raises(CacheError, match=r"3 tokens of schedule '3/4,1/4'.*new_cache"):
            model(tokens(1, 1), past_key_values=cache, **other)
    assert cache.get_seq_length() == 3
    model(tokens(1, 1), past_key_values=cache, schedule="3/4,1/4")
    cache.reset()
    model(tokens(1, 2), past_key_values=cache, num_loops=3)
    assert cache.get_seq_length() == 2


def test_another_batch_size_on_a_live_cache_is_refused():
    model = tiny_model("flt")
    cache = model.new_cache()
    model(tokens(2, 3), past_key_values=cache)
    with pytest.raises(CacheError, match="a batch of 3 on a cache of 2 rows"):
        model(tokens(3, 1), past_key_values=cache)


def test_a_forward_that_fails_half_way_leaves_no_trace_in_the_cache():
    model = tiny_model("flt").double()
    ids = tokens(1, 6)
    cache = model.new_cache()
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        broken = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("cut")))
        with pytest.raises(RuntimeError, match="cut"):
            model(tokens(1, 2, seed=9), past_key_values=cache)
        broken.remove()
        again = model(ids[:, 4:], past_key_values=cache).logits
        full = model(ids, use_cache=False).logits
    assert relative_difference(again, full[:, 4:]) < 1e-10


@pytest.mark.parametrize("variant", ["multi-head", "latent", "prelude-and-coda"])
def test_rows_can_be_reordered_repeated_selected_and_cropped(variant):
    model = tiny_model("loopformer", **ATTENTION_VARIANTS[variant]).double()
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[1, :2] = 0
    new = tokens(3, 1, seed=5)
    with torch.no_grad():
        cache = model.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)

        def continued(cache, rows, length=7):
            rows = torch.tensor(rows)
            text = torch.cat([ids[rows, :length], new[: len(rows)]], dim=1)
            full_mask = torch.cat([mask[rows, :length], torch.ones(len(rows), 1, dtype=torch.long)], dim=1)
            expected = model(text, attention_mask=full_mask, use_cache=False).logits[:, -1:]
            got = model(new[: len(rows)], past_key_values=cache).logits
            assert relative_difference(got, expected) < 1e-10

        reordered = copy.deepcopy(cache)
        reordered.reorder_cache(torch.tensor([2, 1, 1]))
        continued(reordered, [2, 1, 1])
        selected = copy.deepcopy(cache)
        selected.batch_select_indices(torch.tensor([1, 2]))
        continued(selected, [1, 2])
        selected.batch_repeat_interleave(2)
        assert len(selected.positions) == 4
        cropped = copy.deepcopy(cache)
        cropped.crop(-3)
        continued(cropped, [0, 1, 2], length=4)
        cropped.crop(5)
        assert cropped.get_seq_length() == 5
        continued(cache, [0, 1, 2])
    with pytest.raises(CacheError, match="crop"):
        cache.crop(-99)


@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_gradients_flow_through_a_cache(preset):
    model = tiny_model(preset).double()
    ids = tokens(2, 6)
    cache = model.new_cache()
    pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([4, 2], dim=1)]
    torch.cat(pieces, dim=1).square().sum().backward()
    cached = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(ids, use_cache=False).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(cached[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_the_latent_cache_holds_the_latent_alone():
    model = tiny_model("flt", kv_lora_rank=5)
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens(2, 4), past_key_values=cache, num_loops=2)
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers}
    assert shapes == {(1, 5, 0)}
    assert len(cache) == model.config.slot_layout.num_slots(2) == 4


@pytest.mark.parametrize("preset", ["flt", "lt-input", "loopformer", "elastic-flt"])
@pytest.mark.parametrize("run", [{"num_loops": 2}, {"num_loops": 5}], ids=str)
def test_beams_and_several_return_sequences_equal_decoding_without_a_cache(preset, run):
    model = tiny_model(preset).double()
    ids, mask = tokens(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    arguments = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": False,
    }
    with_cache = model.generate(ids, **arguments, **run)
    without = model.generate(ids, use_cache=False, **arguments, **run)
    assert torch.equal(with_cache, without)
    assert len(with_cache) == 4


def test_sampling_several_sequences_draws_the_same_with_and_without_a_cache():
    model = tiny_model("elastic-flt").double()
    arguments = {"max_new_tokens": 7, "do_sample": True, "num_return_sequences": 3, "schedule": "coarse-first:2"}
    torch.manual_seed(3)
    with_cache = model.generate(tokens(2, 4), **arguments)
    torch.manual_seed(3)
    assert torch.equal(with_cache, model.generate(tokens(2, 4), use_cache=False, **arguments))


def test_two_forwards_do_not_differ():
    """Fault 7."""
    model = tiny_model("flt")
    assert torch.equal(model(tokens(2, 5)).logits, model(tokens(2, 5)).logits)
