"""Documents packed into one row equal the same documents run alone: no token sees another document's."""

from __future__ import annotations

import pytest
import torch

from loopformers.errors import ConfigError
from loopformers.model.presets import PRESETS
from loopformers.testing import tiny_model

VARIANTS = {
    "multi-head": {},
    "grouped-query": {"num_key_value_heads": 2},
    "latent": {"kv_lora_rank": 5},
    "sliding": {"window_pattern": "SL", "sliding_window": 3},
    "latent-sliding": {"kv_lora_rank": 5, "window_pattern": "SSL", "sliding_window": 4, "num_hidden_layers": 3},
    "prelude-and-coda": {"num_prelude_layers": 1, "num_coda_layers": 2, "window_pattern": "SL", "sliding_window": 5},
}
ROWS = ((5, 1, 4, 3), (2, 8, 3), (13,))
"""Lengths of the documents of three rows of 13 tokens."""


def packed():
    ids = torch.randint(61, (3, 13), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])
    return ids, positions


def documents():
    """Row, first token and end of every document."""
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            yield row, start, start + length
            start += length


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def check(model, **run):
    ids, positions = packed()
    with torch.no_grad():
        together = model(ids, position_ids=positions, use_cache=False, **run).logits
        for row, start, end in documents():
            close(together[row, start:end], model(ids[row : row + 1, start:end], use_cache=False, **run).logits[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_documents_equal_separate_documents(preset):
    check(tiny_model(preset).double().eval())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("preset", ["lt-input", "flt", "elastic-flt", "loopformer"])
def test_packed_documents_equal_separate_documents_in_every_kind_of_attention(preset, variant):
    check(tiny_model(preset, **VARIANTS[variant]).double().eval(), num_loops=3)


def test_the_reference_attention_keeps_documents_apart_too():
    model = tiny_model("flt", window_pattern="SL", sliding_window=3).double().eval()
    model.set_attn_implementation("eager")
    check(model)


@pytest.mark.parametrize("preset", ["flt", "base-loop"])
def test_the_loss_and_its_gradient_are_those_of_separate_documents(preset):
    """With no target at the first token of a document."""
    model = tiny_model(preset).double().train()
    ids, positions = packed()
    labels = ids.masked_fill(positions == 0, -100)

    def gradients():
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    model.set_draw(0)
    together = model(ids, position_ids=positions, labels=labels, num_items_in_batch=29).loss
    together.backward()
    expected = gradients()
    separate = 0.0
    for row, start, end in documents():
        if end - start > 1:  # a document of one token has no target
            piece = ids[row : row + 1, start:end]
            model.set_draw(0)
            loss = model(piece, labels=piece, num_items_in_batch=29).loss
            loss.backward()
            separate += loss.detach()
    close(together.detach(), separate)
    found = gradients()
    assert set(found) <= set(expected)
    for name, gradient in found.items():
        close(expected[name], gradient)


@pytest.mark.parametrize("chunks", [[6, 1, 1, 5], [13], [1] * 13])
@pytest.mark.parametrize("variant", ["multi-head", "latent-sliding"])
def test_a_cache_over_packed_documents_is_exact(variant, chunks):
    model = tiny_model("elastic-flt", **VARIANTS[variant]).double().eval()
    ids, positions = packed()
    cache = model.new_cache()
    with torch.no_grad():
        full = model(ids, position_ids=positions, use_cache=False).logits
        pieces = [
            model(piece, position_ids=place, past_key_values=cache).logits
            for piece, place in zip(ids.split(chunks, dim=1), positions.split(chunks, dim=1), strict=True)
        ]
        close(torch.cat(pieces, dim=1), full)


def test_a_cached_row_goes_on_with_its_last_document_when_no_positions_are_given():
    model = tiny_model("flt").double().eval()
    ids, positions = packed()
    cache = model.new_cache()
    with torch.no_grad():
        model(ids[:1, :11], position_ids=positions[:1, :11], past_key_values=cache)
        continued = model(ids[:1, 11:], past_key_values=cache).logits
        close(continued, model(ids[:1, 10:13], use_cache=False).logits[:, 1:])
    cache.reset()
    with torch.no_grad():
        close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


def test_positions_without_a_restart_are_one_document():
    model = tiny_model("flt").double().eval()
    ids, _ = packed()
    with torch.no_grad():
        close(model(ids, position_ids=torch.arange(13).expand(3, 13)).logits, model(ids).logits)


def test_a_mask_of_ones_as_collators_add_is_no_mask():
    model = tiny_model("flt").double().train()
    ids, positions = packed()
    bare = model(ids, position_ids=positions, labels=ids).loss
    assert torch.equal(bare, model(ids, position_ids=positions, labels=ids, attention_mask=torch.ones_like(ids)).loss)


def test_restarting_positions_beside_an_attention_mask_are_refused():
    model = tiny_model("flt").eval()
    ids, positions = packed()
    padded = torch.ones_like(ids)
    padded[0, -1] = 0
    with pytest.raises(ConfigError, match="leave attention_mask out"):
        model(ids, position_ids=positions, attention_mask=padded)
    cache = model.new_cache()
    model(ids, position_ids=positions, past_key_values=cache)
    with pytest.raises(ConfigError, match="leave attention_mask out"):
        model(ids[:, :1], position_ids=positions[:, :1], attention_mask=torch.ones(3, 14), past_key_values=cache)


def test_padding_is_no_document():
    """transformers counts positions of left padding as 0 or 1, beside the mask that says so."""
    model = tiny_model("flt").double().eval()
    ids, _ = packed()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        given = model(ids, position_ids=positions, attention_mask=mask).logits
        close(given[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])
