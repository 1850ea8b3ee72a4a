"""The page's example, run: a recurrence from outside the package, through everything that knows recurrences by name."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.cli.main import main
from loopformers.errors import ConfigError
from loopformers.extensions import VARIABLE
from loopformers.model.presets import PRESETS
from loopformers.recurrence.injection import INJECTIONS, Injection
from loopformers.recurrence.stream import STREAMS
from loopformers.studies.grid import load_grid
from loopformers.testing import tiny_model
from loopformers.training.engine import EngineSettings
from loopformers.training.memory import matrix_parameters, optimizer_state_bytes
from loopformers.training.optimizers import MuonAdamW, flt_parameter_groups

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "own-recurrence.md").read_text(encoding="utf-8")
REGISTRIES: tuple[dict[str, Any], ...] = (STREAMS, INJECTIONS, PRESETS)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries that forget, after the test, what it entered; the example's folder is on the path."""
    before = [dict(registry) for registry in REGISTRIES]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("decaying_injection", "balanced_variants"):
        sys.modules.pop(name, None)
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture
def example(registries: None) -> ModuleType:
    return importlib.import_module("decaying_injection")


def model_of(**overrides: Any) -> LoopedForCausalLM:
    """A model of the example whose every number counts."""
    return tiny_model("lt", stream="decaying", **{"num_hidden_layers": 2, "num_loops": 3, **overrides}).double()


def ids(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(61, (batch, seq), generator=torch.Generator().manual_seed(4))


def test_the_page_shows_the_example_as_it_is() -> None:
    assert blocks("python")[0] == (EXAMPLES / "decaying_injection.py").read_text(encoding="utf-8")


def test_the_pages_program_runs(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(compile(blocks("python")[1], "own-recurrence.md", "exec"), space)
    assert space["ids"].shape == (1, 6)
    assert json.loads((tmp_path / "runs/decaying/config.json").read_text())["stream"] == "decaying"
    again = LoopedForCausalLM.from_pretrained(tmp_path / "runs/decaying")
    assert all(map(torch.equal, space["model"].parameters(), again.parameters()))
    assert again.model.stream.decay.shape == (64,)


def test_a_loop_is_the_pages_formula(example: ModuleType) -> None:
    model = model_of()
    stream = model.model.stream
    e, h = torch.randn(2, 3, 5, model.config.hidden_size, dtype=torch.float64)
    rate = torch.log1p(torch.exp(stream.decay))
    normed = e / (e**2).mean(dim=-1, keepdim=True).sqrt()
    by_hand = torch.exp(-0.25 * rate) * h + normed @ stream.inputs_proj.weight.T
    torch.testing.assert_close(stream(e, h, 0.25), by_hand)
    fresh = LoopedForCausalLM(model.config).model.stream
    assert fresh.decay.tolist() == [0.0] * model.config.hidden_size
    assert torch.equal(fresh.inputs_proj.weight, torch.eye(model.config.hidden_size))
    assert torch.exp(-nn.functional.softplus(fresh.decay[0])).item() == pytest.approx(0.5)


def test_loops_depend_on_the_step_size_and_one_loop_on_nothing_of_it(example: ModuleType) -> None:
    model, tokens = model_of(conditioning="time", modulation_init="open"), ids(2, 7)
    with torch.no_grad():
        plain = [model(tokens, schedule=s).logits for s in ("1/3,2/3", "2/3,1/3", "1")]
        model.model.stream.decay += 1
        other = [model(tokens, schedule=s).logits for s in ("1/3,2/3", "2/3,1/3", "1")]
    assert not torch.allclose(plain[0], plain[1])
    assert not torch.allclose(plain[0], other[0])
    assert torch.equal(plain[2], other[2])


def test_cached_decoding_is_exact(example: ModuleType) -> None:
    model, tokens = model_of(), ids(2, 9)
    with torch.no_grad():
        full = model(tokens, num_loops=4, use_cache=False).logits
        cache = model.new_cache()
        pieces = [model(p, num_loops=4, past_key_values=cache).logits for p in tokens.split([4, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full)


def test_gradients_are_those_without_activation_checkpointing_and_reach_its_parameters(example: ModuleType) -> None:
    model, tokens = model_of(), ids(3, 7)
    recomputing = copy.deepcopy(model)
    EngineSettings(activation_checkpointing=True).apply(recomputing)
    assert recomputing.model.gradient_checkpointing
    for m in (model, recomputing):
        m.train()(tokens, labels=tokens).loss.backward()
    for p, q in zip(model.parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert model.model.stream.decay.grad.abs().min() > 0
    assert model.model.stream.inputs_proj.weight.grad.abs().min() > 0


def test_parameters_and_operations_are_counted(example: ModuleType) -> None:
    model = model_of()
    config, d = model.config, model.config.hidden_size
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    assert config.parameter_groups()["recurrence"] == d + d * d
    model.set_attn_implementation("eager")  # two products that the counter sees
    for num_loops in (1, 4):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids(3, 7), num_loops=num_loops, use_cache=False)
        assert counter.get_total_flops() == config.forward_flops(batch_size=3, seq_len=7, num_loops=num_loops)


def test_its_parameters_are_updated_in_the_group_other(example: ModuleType) -> None:
    model = model_of()
    groups = flt_parameter_groups(model)
    assert {id(p) for p in groups["other"]} >= {id(p) for p in model.model.stream.parameters()}
    assert sum(p.numel() for p in groups["matrices"]) == matrix_parameters(model.config)
    optimizer = MuonAdamW(other_lr=0.5).build(model)
    before = copy.deepcopy(model.model.stream.state_dict())
    model(ids(3, 7), labels=ids(3, 7)).loss.backward()
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in model.model.stream.named_parameters())
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim)
    assert held * 4 == optimizer_state_bytes(model.config, MuonAdamW())


def test_an_injection_of_your_own_works_alike(registries: None) -> None:
    class Gated(Injection):
        """`x <- x + sigmoid(g) W h` before every layer."""

        def __init__(self, hidden_size: int, norm: Any) -> None:
            super().__init__(hidden_size, norm)
            self.gate = nn.Parameter(torch.zeros(hidden_size))
            self.proj = nn.Linear(hidden_size, hidden_size, bias=False)

        def forward(self, layer_idx: int, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x + torch.sigmoid(self.gate) * self.proj(state), None

    INJECTIONS["gated"] = Gated
    model = tiny_model("flt", injection="gated", num_hidden_layers=3, num_loops=2)
    config = LoopConfig.from_dict(model.config.to_dict())
    assert config.injection == "gated"
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids(2, 5), use_cache=False)
    assert counter.get_total_flops() == config.forward_flops(batch_size=2, seq_len=5)


# -- by name, in commands and other processes ------------------------------------------------------------------


def test_commands_know_it_where_the_environment_names_its_module(
    registries: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="preset='lt-decaying' is not known"):
        LoopConfig.from_preset("lt-decaying")
    monkeypatch.setenv(VARIABLE, "decaying_injection")
    arguments = ["train", "--config", "task-pointer-chasing", "--model.preset", "lt-decaying", "--training.steps", "2"]
    small = ["--training.batch_size", "4", "--evaluation.windows", "3", "--training.report_to", "none"]
    assert main([*arguments, *small, "--training.output_dir", str(tmp_path / "run"), "--json"]) == 0
    assert math.isfinite(json.loads(capsys.readouterr().out)["loss"])
    assert LoopedForCausalLM.from_pretrained(tmp_path / "run").config.stream == "decaying"


def test_a_study_takes_it_as_a_system(registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "decaying_injection")
    grid = load_grid(EXAMPLES / "decaying-injection.yaml")
    assert {cell.axes["system"] for cell in grid.cells} == {"lt-decaying", "lt", "lt-input", "flt", "one-pass"}


def test_variants_of_balanced_change_what_they_say_and_decode_exactly(registries: None) -> None:
    variants = importlib.import_module("balanced_variants")
    norm = torch.nn.RMSNorm(8, elementwise_affine=False)
    e, h = 3 * torch.randn(2, 5, 8), norm(torch.randn(2, 5, 8))
    expected = {
        "raw-inputs": h + e,
        "normed-sum": norm(h + norm(e)),
        "leaky": 0.9 * h + norm(e),
        "more-state": 2 * h + norm(e),
        "more-inputs": 0.5 * h + norm(e),
        "small-writes": 6**0.5 * (h + norm(e)),
        "large-writes": 0.5 * (h + norm(e)),
        "mapped": h + norm(e),
        "gated": torch.sigmoid(torch.tensor(2.0)) * h + norm(e),
    }
    assert set(expected) == set(variants.VARIANTS)
    for name, x in expected.items():
        stream = variants.VARIANTS[name](8, norm)
        for matrix, start in (("inputs_proj", torch.eye(8)), ("gate", torch.zeros(8, 8))):
            if hasattr(stream, matrix):
                getattr(stream, matrix).weight.data = start
        torch.testing.assert_close(stream.restart(e, h, 0.5), x)
        model = tiny_model("lt", stream=name, num_hidden_layers=2, num_loops=3).double()
        tokens = ids(2, 6)
        whole = model(tokens, use_cache=False).logits
        first = model(tokens[:, :4], use_cache=True)
        rest = model(tokens[:, 4:], past_key_values=first.past_key_values, use_cache=True).logits
        torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-10, atol=1e-10)


def test_the_ablation_of_balanced_is_a_grid(registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "balanced_variants")
    grid = load_grid(EXAMPLES / "balanced-variants.yaml")
    variants = importlib.import_module("balanced_variants").VARIANTS
    presets = {cell.recipe.model.preset for cell in grid.cells}
    assert {f"lt-{name}" for name in variants} <= presets
    assert len({cell.axes["system"] for cell in grid.cells}) == len(variants) + 6


def test_a_new_process_knows_it_and_one_that_was_not_told_says_which_name_is_unknown(
    example: ModuleType, tmp_path: Path
) -> None:
    model_of().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "loopformers", "info", str(tmp_path), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    told = {**environment, VARIABLE: "decaying_injection", "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["parameters"]["recurrence"] > 0
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "stream='decaying' is not known" in " ".join(done.stderr.split())
