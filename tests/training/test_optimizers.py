from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.errors import ConfigError
from loopformers.model.presets import PRESETS
from loopformers.training.lr_schedules import ConstantThenLinear
from loopformers.training.optimizers import (
    CompositeOptimizer,
    DecayedAdamW,
    MuonAdamW,
    flt_parameter_groups,
    muon_momentum,
)


class TinyLanguageModel(nn.Module):
    """The least that the optimisers read: an embedding, a layer with modulation and a norm, and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.ModuleDict({"up_proj": nn.Linear(6, 18), "modulation": nn.Linear(6, 12)})])
        self.conditioning = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        x = x + self.layers[0]["up_proj"](x).unflatten(-1, (3, 6)).sum(-2) + self.layers[0]["modulation"](x)[..., :6]
        return self.lm_head(self.norm(x + self.conditioning(x[..., :5])))


def make(*, tied: bool = False, seed: int = 0) -> TinyLanguageModel:
    torch.manual_seed(seed)
    return TinyLanguageModel(tied=tied)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: object = None) -> None:
    for step in steps:
        ids = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_momentum_ramps_from_085_to_095_over_300_steps() -> None:
    assert [muon_momentum(step) for step in (0, 150, 300, 5000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = make(tied=tied)
    groups = flt_parameter_groups(model)
    placed = [id(p) for params in groups.values() for p in params]
    assert sorted(placed) == sorted(id(p) for p in model.parameters())
    assert len(placed) == len(set(placed))
    assert [p is model.embed_tokens.weight for p in groups["embedding"]] == [True]
    assert ("head" in groups) is (not tied)
    assert [p is model.layers[0]["up_proj"].weight for p in groups["matrices"]] == [True]


@pytest.mark.parametrize("preset", PRESETS)
def test_each_parameter_of_every_preset_is_in_exactly_one_group(preset: str) -> None:
    sizes = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}
    config = LoopConfig.from_preset(preset, num_hidden_layers=2, num_prelude_layers=1, num_coda_layers=1, **sizes)
    model = LoopedForCausalLM(config)
    names = {id(p): name for name, p in model.named_parameters()}
    for settings in (MuonAdamW(), DecayedAdamW()):
        placed = [id(p) for group in settings.build(model).param_groups for p in group["params"]]
        assert sorted(placed) == sorted(names)
    groups = {name: {names[id(p)] for p in params} for name, params in flt_parameter_groups(model).items()}
    assert groups["embedding"] == {"model.embed_tokens.weight"}
    assert groups.get("head", set()) == (set() if config.tie_word_embeddings else {"lm_head.weight"})
    assert len(groups["matrices"]) == 6 * 4  # q, k, v, o, up and down of two core, one prelude and one coda layer
    assert all(".self_attn." in name or ".mlp." in name for name in groups["matrices"])
    assert not any("_proj" in name for name in groups.get("other", ()) if ".stream." not in name)


def test_frozen_parameters_are_left_out() -> None:
    model = make()
    model.embed_tokens.weight.requires_grad_(False)
    assert "embedding" not in flt_parameter_groups(model)
    for p in model.parameters():
        p.requires_grad_(False)
    for settings in (MuonAdamW(), DecayedAdamW()):
        with pytest.raises(ConfigError, match="no trainable parameter"):
            settings.build(model)


def test_rates_of_embedding_and_head_scale_with_the_width() -> None:
    rates = {group["name"]: group["lr"] for group in MuonAdamW().build(make()).param_groups}
    scale = math.sqrt(768 / 6)
    assert rates == pytest.approx({"matrices": 0.02, "embedding": 0.2 * scale, "head": 0.004 * scale, "other": 1e-3})


def test_flt_settings_are_those_of_the_recipe() -> None:
    optimizer = MuonAdamW().build(make())
    muon, adamw = optimizer.parts
    assert (muon.param_groups[0]["nesterov"], muon.param_groups[0]["ns_steps"]) == (True, 5)
    assert muon.param_groups[0]["adjust_lr_fn"] == "original"
    assert {g["betas"] for g in adamw.param_groups} == {(0.8, 0.95)}
    assert {g["eps"] for g in adamw.param_groups} == {1e-10}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0}


def test_a_composite_step_equals_the_steps_of_its_parts() -> None:
    together, apart = make(), make()
    optimizer = MuonAdamW().build(together)
    parts = MuonAdamW().build(apart).parts
    composite_free = CompositeOptimizer(parts)
    train(together, optimizer, range(1))
    train(apart, composite_free, range(1))  # without the ramp the first momentum is the same
    for name, value in weights(together).items():
        torch.testing.assert_close(value, dict(apart.named_parameters())[name].detach(), rtol=0, atol=0)


def test_schedulers_reach_the_parts_through_shared_group_dicts() -> None:
    optimizer = MuonAdamW().build(make())
    scheduler = ConstantThenLinear(decay_fraction=1.0).build(optimizer, 4)
    train(make(), optimizer, range(0))
    optimizer.step()
    scheduler.step()
    assert optimizer.parts[0].param_groups[0]["lr"] == pytest.approx(0.02 * 0.75)
    assert all(
        a is b
        for a, b in zip(optimizer.param_groups, [g for p in optimizer.parts for g in p.param_groups], strict=True)
    )


def test_momentum_follows_the_ramp_and_survives_the_state_dict() -> None:
    model = make()
    optimizer = MuonAdamW().build(model)
    train(model, optimizer, range(5))
    assert optimizer.param_groups[0]["momentum"] == muon_momentum(4)
    fresh = MuonAdamW().build(model)
    fresh.load_state_dict(optimizer.state_dict())
    train(model, fresh, range(5, 6))
    assert fresh.parts[0].param_groups[0]["momentum"] == muon_momentum(5)


def test_training_continues_bit_for_bit_from_a_saved_state(tmp_path) -> None:  # type: ignore[no-untyped-def]
    whole = make(tied=True)
    optimizer = MuonAdamW().build(whole)
    train(whole, optimizer, range(8), ConstantThenLinear().build(optimizer, 8))

    first = make(tied=True)
    optimizer = MuonAdamW().build(first)
    scheduler = ConstantThenLinear().build(optimizer, 8)
    train(first, optimizer, range(3), scheduler)
    saved = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved, tmp_path / "state.pt")

    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    second = make(tied=True, seed=5)
    second.load_state_dict(loaded["model"])
    optimizer = MuonAdamW().build(second)
    scheduler = ConstantThenLinear().build(optimizer, 8)
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    train(second, optimizer, range(3, 8), scheduler)
    for name, value in weights(whole).items():
        assert torch.equal(value, dict(second.named_parameters())[name]), name


def test_a_deep_copy_is_independent_and_whole() -> None:
    model = make()
    optimizer = MuonAdamW().build(model)
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(twin_model, twin, range(2))
    assert not torch.equal(twin_model.lm_head.weight, model.lm_head.weight)
    assert optimizer.param_groups[0]["steps_done"] == 0


def test_a_closure_is_evaluated_once() -> None:
    model, calls = make(), []
    assert MuonAdamW().build(model).step(lambda: calls.append(1) or 2.5) == 2.5
    assert len(calls) == 1


def test_loopformer_decays_matrices_only() -> None:
    model = make()
    optimizer = DecayedAdamW().build(model)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decay) == len(list(model.parameters()))
    assert all(decay[id(p)] == (0.2 if p.ndim == 2 else 0.0) for p in model.parameters())
    assert {g["betas"] for g in optimizer.param_groups} == {(0.9, 0.95)}


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="matrix_lr=-1"):
        MuonAdamW(matrix_lr=-1)
    with pytest.raises(ConfigError, match="lr=nan"):
        DecayedAdamW(lr=math.nan)
    optimizer = MuonAdamW().build(make())
    with pytest.raises(ConfigError, match="no further parameter group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
