"""Every attention function equals the slow truth, in values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from loopformers.nn.attention import Attention, AttentionContext, LatentAttention, attention_reference
from loopformers.nn.mask import attention_mask
from loopformers.nn.rope import apply_rotary, rotary_tables

SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]


def build(kind, *, heads=6, kv_heads=3, window=None, qk_norm=True):
    sizes = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4, "qk_norm": qk_norm, "norm_eps": None}
    torch.manual_seed(0)
    if kind == "latent":
        return LatentAttention(24, kv_lora_rank=5, window=window, config=None, **sizes).double()
    return Attention(24, window=window, config=None, **sizes).double()


def context(function, x, window, valid=None):
    positions = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    tables = rotary_tables(positions, head_dim=4, theta=100.0, table_dtype=torch.float32, dtype=x.dtype)
    mask = attention_mask(valid, num_queries=x.shape[1], num_keys=x.shape[1], window=window, device=x.device)
    return AttentionContext(function, {window: mask}, rotary=tables, key_rotary=tables)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("kind", ["ordinary", "latent"])
@pytest.mark.parametrize("padded", [False, True])
def test_sdpa_equals_the_reference_in_values_and_gradients(kind, kv_heads, window, padded):
    attention = build(kind, kv_heads=kv_heads, window=window)
    x, source = torch.randn(3, 7, 24, dtype=torch.double), torch.randn(3, 7, 24, dtype=torch.double)
    valid = torch.ones(3, 7, dtype=torch.bool)
    if padded:
        valid[1, :3] = False
    results = []
    for function in (SDPA, attention_reference):
        inputs = x.clone().requires_grad_(), source.clone().requires_grad_()
        out = attention(*inputs, context(function, x, window, valid), None)
        out[valid].square().sum().backward()
        gradients = [p.grad.clone() for p in attention.parameters()]
        attention.zero_grad()
        results.append((out[valid], inputs[0].grad, inputs[1].grad, *gradients))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


def test_the_reference_is_softmax_of_scaled_scores_by_hand():
    q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    out, weights = attention_reference(None, q, k, v, None)
    for i in range(3):
        scores = torch.stack([(q[0, 0, i] * k[0, 0, j]).sum() / math.sqrt(4) for j in range(i + 1)])
        torch.testing.assert_close(weights[0, 0, i, : i + 1], scores.softmax(0))
        torch.testing.assert_close(out[0, i, 0], scores.softmax(0) @ v[0, 0, : i + 1])


def test_a_query_from_elsewhere_leaves_keys_and_values_alone():
    """The recurrent signal enters through queries, so position 0, with one visible key, never sees it."""
    attention = build("ordinary")
    x = torch.randn(2, 5, 24, dtype=torch.double)
    plain = attention(x, x, context(SDPA, x, None), None)
    other = attention(x, torch.randn_like(x), context(SDPA, x, None), None)
    torch.testing.assert_close(plain[:, 0], other[:, 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(plain[:, 1:], other[:, 1:])


@pytest.mark.parametrize(("queries", "keys", "window"), [(5, 5, None), (1, 6, None), (3, 3, 9), (1, 4, 4)])
def test_no_mask_is_built_where_plain_causal_attention_says_the_same(queries, keys, window):
    arguments = {"num_queries": queries, "num_keys": keys, "window": window, "device": torch.device("cpu")}
    assert attention_mask(None, **arguments) is None
    assert attention_mask(torch.ones(2, keys, dtype=torch.bool), **arguments) is None


@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_a_mask_says_for_each_query_and_key_what_the_rule_says(window):
    valid = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    mask = attention_mask(valid, num_queries=4, num_keys=6, window=window, device=torch.device("cpu"))
    for row in range(2):
        for i in range(4):
            for key in range(6):
                query = i + 2
                seen = 0 <= query - key < (window or 99) and bool(valid[row, key])
                assert bool(mask[row, 0, i, key]) == (seen or query == key)


def test_rotation_turns_pairs_of_halves_and_depends_on_distance_alone():
    tables = rotary_tables(
        torch.tensor([[0, 1, 5]]), head_dim=4, theta=100.0, table_dtype=torch.float32, dtype=torch.double
    )
    x = torch.randn(1, 2, 3, 4, dtype=torch.double)
    y = apply_rotary(x, tables)
    torch.testing.assert_close(y[:, :, 0], x[:, :, 0])
    angle = 5 / 10.0
    torch.testing.assert_close(
        y[0, 0, 2, 1], x[0, 0, 2, 1] * math.cos(angle) + x[0, 0, 2, 3] * math.sin(angle), rtol=1e-6, atol=1e-6
    )
    far = rotary_tables(
        torch.tensor([[10, 11, 15]]), head_dim=4, theta=100.0, table_dtype=torch.float32, dtype=torch.double
    )
    z = apply_rotary(x, far)
    torch.testing.assert_close(
        (y[:, :, 1] * y[:, :, 2]).sum(-1), (z[:, :, 1] * z[:, :, 2]).sum(-1), rtol=1e-5, atol=1e-5
    )


def test_tables_can_be_rounded_to_bfloat16():
    positions = torch.tensor([[3, 77]])
    cos, _ = rotary_tables(positions, head_dim=8, theta=1e4, table_dtype=torch.bfloat16, dtype=torch.float32)
    assert torch.equal(cos, cos.bfloat16().float())
