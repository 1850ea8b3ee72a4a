"""Our models against numbers that the papers' released code computed, for every loop count and schedule stored.

Goldens were computed in float64, and ours are compared at 1e-9. The FLT code casts its logits to float32 itself, so its
logits, losses and residual norms are float32 tensors, and its gradients went through a float32 cross entropy: those are
compared at what float32 leaves. The LoopFormer code makes its frequency embeddings in float32, whose last bits are the
processor's: the rest is compared with the goldens' own embeddings in place of ours, and two tests say how far ours are from
these and what that moves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from loopformers import from_official
from loopformers.model.convert import FLT_RULES, LOOPFORMER_RULES, _targets
from loopformers.nn import conditioning
from tests.parity.embeddings import TABLE, goldens_embedding

FOLDER = Path(__file__).parent
FLT_CASES = sorted(path.stem for path in FOLDER.glob("flt_*.json"))
LOOPFORMER_CASES = sorted(path.stem for path in FOLDER.glob("lf_*.json"))
OUR_EMBEDDING = conditioning.frequency_embedding


@pytest.fixture(autouse=True)
def on_the_goldens_processor(monkeypatch):
    """Compute with the embeddings that the goldens were computed with, whatever processor this is."""
    monkeypatch.setattr(conditioning, "frequency_embedding", goldens_embedding)


def load(case_name):
    case = json.loads((FOLDER / f"{case_name}.json").read_text())
    golden = load_file(FOLDER / f"{case_name}.safetensors")
    weights = {name.removeprefix("weights."): tensor for name, tensor in golden.items() if name.startswith("weights.")}
    return case, golden, from_official(weights, case).double()


def relative_error(ours, golden):
    ours, golden = ours.detach().double(), golden.double()
    return float((ours - golden).norm() / golden.norm())


def gradient_norm(model, rules, official_name):
    parameters = dict(model.named_parameters())
    squares = [parameters[m.expand(target)].grad.square().sum() for m, target in _targets(official_name, rules)]
    return torch.stack(squares).sum().sqrt()


def test_every_golden_is_tried():
    assert len(FLT_CASES) == 11
    assert len(LOOPFORMER_CASES) == 4


@pytest.mark.parametrize("case_name", FLT_CASES)
def test_flt_logits_losses_and_residual_norms(case_name):
    case, golden, model = load(case_name)
    for loops in case["K"]:
        out = model(golden["input_ids"], targets=golden["targets"], num_loops=loops, output_residual_norms=True)
        assert relative_error(out.logits, golden[f"logits.{loops}"]) < 1e-6
        assert relative_error(out.loss, golden[f"loss.{loops}"]) < 1e-6
        assert relative_error(out.residual_norms, golden[f"residual_norm.{loops}"]) < 1e-6


@pytest.mark.parametrize("case_name", FLT_CASES)
def test_flt_is_exact_once_ours_is_cast_as_theirs(case_name):
    """With their cast logits agree to float32's last bit; gradients then differ by one float32 cross entropy's rounding."""
    case, golden, model = load(case_name)
    loops = max(case["K"])
    hidden = model.model(golden["input_ids"], num_loops=loops, use_cache=False).last_hidden_state
    logits = 15 * torch.tanh(model.lm_head(hidden)[..., : case["vocab_size"]].float() / 15)
    loss = F.cross_entropy(logits.flatten(0, 1), golden["targets"].flatten())
    loss.backward()
    assert relative_error(logits, golden[f"logits.{loops}"]) < 1e-7
    assert relative_error(loss, golden[f"loss.{loops}"]) < 1e-7
    prefix = f"grad_norm.{loops}."
    names = [name.removeprefix(prefix) for name in golden if name.startswith(prefix)]
    assert len(names) == sum(1 for name in golden if name.startswith("weights."))
    for name in names:
        assert relative_error(gradient_norm(model, FLT_RULES, name), golden[prefix + name]) < 3e-8, name


@pytest.mark.parametrize("case_name", FLT_CASES)
def test_flt_losses_of_every_loop(case_name):
    case, golden, model = load(case_name)
    stored = [loops for loops in case["K"] if f"losses_every_loop.{loops}" in golden]
    model.config.objective = "every_loop"
    model.train()
    for loops in stored:
        out = model(golden["input_ids"], targets=golden["targets"], num_loops=loops)
        ours = torch.stack([out.loss_parts[f"cross_entropy_loop_{i + 1}"] for i in range(loops)])
        assert relative_error(ours, golden[f"losses_every_loop.{loops}"]) < 1e-6
        assert relative_error(out.loss, golden[f"losses_every_loop.{loops}"].mean()) < 1e-6
    assert stored or case["model_type"] in ("LT_i", "LT_ia")


@pytest.mark.parametrize("case_name", LOOPFORMER_CASES)
def test_loopformer_logits_losses_and_final_hidden_states(case_name):
    case, golden, model = load(case_name)
    runs = [name for name in golden if name == "logits" or name.startswith("logits.")]
    assert runs
    for name in runs:
        run = name.removeprefix("logits").removeprefix(".")
        asked = {"num_loops": int(run)} if run.isdigit() else {"schedule": case["schedules"][run]} if run else {}
        out = model(golden["input_ids"], targets=golden["targets"], **asked)
        hidden = model.model(golden["input_ids"], **asked).last_hidden_state
        suffix = f".{run}" if run else ""
        assert relative_error(out.logits, golden["logits" + suffix]) < 1e-9
        assert relative_error(out.loss, golden["loss" + suffix]) < 1e-9
        if run:
            assert relative_error(hidden, golden["final_hidden" + suffix]) < 1e-9


def test_loopformer_consistency_objective_and_its_gradients():
    case, golden, model = load("lf_loopformer")
    assert case["schedules"]["coarse_first"] == golden["objective.short"].tolist()
    model.train()
    out = model(golden["input_ids"], targets=golden["targets"], short_schedule=case["schedules"]["coarse_first"])
    out.loss.backward()
    assert relative_error(out.loss, golden["objective.total"]) < 1e-9
    assert relative_error(out.loss_parts["consistency"], golden["objective.consistency"]) < 1e-9
    prefix = "objective.grad_norm."
    names = [name.removeprefix(prefix) for name in golden if name.startswith(prefix)]
    assert len(names) == sum(1 for name in golden if name.startswith("weights."))
    for name in names:
        assert relative_error(gradient_norm(model, LOOPFORMER_RULES, name), golden[prefix + name]) < 1e-9, name


def test_our_embeddings_are_those_of_the_goldens_to_float32_rounding():
    """A float32 frequency is off by up to 7 units in the last place, so an angle of 7 by up to 7 * 7 * 2^-24."""
    ours = OUR_EMBEDDING(TABLE["values"])
    assert ours.dtype == TABLE["embeddings"].dtype
    assert float((ours - TABLE["embeddings"]).abs().max()) < 1e-6


@pytest.mark.parametrize("case_name", ["lf_tmlt", "lf_loopformer"])
def test_a_converted_checkpoint_keeps_its_meaning_to_float32_rounding(case_name, monkeypatch):
    monkeypatch.setattr(conditioning, "frequency_embedding", OUR_EMBEDDING)
    case, golden, model = load(case_name)
    asked = {str(loops): {"num_loops": loops} for loops in (1, 3, 8)}
    asked |= {name: {"schedule": steps} for name, steps in case.get("schedules", {}).items()}
    compared = [name for name in asked if f"logits.{name}" in golden]
    assert len(compared) >= 3
    for name in compared:
        out = model(golden["input_ids"], **asked[name])
        assert relative_error(out.logits, golden[f"logits.{name}"]) < 1e-7
