"""The study at the paper's sizes: its cells load, plan, and train three updates once they are made small."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from loopformers.model.modeling import LoopedForCausalLM
from loopformers.studies.cell import run_cell
from loopformers.studies.grid import Cell, load_grid
from loopformers.training.recipe_file import override
from loopformers.training.run import model_config

CELLS = {name: {cell.id: cell for cell in load_grid(name).cells} for name in ("small", "base")}

PARAMETERS = {"small": 127, "base": 318}
"""Millions, as the paper states them."""


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_builds_on_the_meta_device_and_its_cost_grows_with_loops(name: str) -> None:
    costs = {}
    for cell in CELLS[name].values():
        config = model_config(cell.recipe)
        with torch.device("meta"):
            model = LoopedForCausalLM(config)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == PARAMETERS[name]
        costs.setdefault(cell.axes["loops"], set()).add(
            config.training_flops_per_token(seq_len=cell.recipe.data.seq_len)
        )
    assert sorted(costs) == [1, 3, 6, 9, 12]
    assert all(len(values) == 1 for values in costs.values()), "systems of one T cost the same"
    ordered = [costs[loops].pop() for loops in sorted(costs)]
    assert ordered == sorted(ordered)
    systems = {cell.axes["system"] for cell in CELLS[name].values()} - {"one-pass"}
    assert systems == {"lt", "lt-input", "lt-query", "flt-residual", "flt"}


def shrink(cell: Cell, texts: Path) -> Cell:
    """Make a cell small in everything but its system, its loops and how it is trained."""
    sizes = {
        "model.hidden_size": 24, "model.num_attention_heads": 2, "model.num_hidden_layers": 2, "model.vocab_size": 2048,
        "model.max_position_embeddings": 17,
        "data.seq_len": 17, "data.sources": [str(texts)], "data.streaming": False, "data.tokenizer": "bundled",
        "data.split_by": "tail", "data.cache_dir": str(texts.parent / "cache"), "data.fractions": [0.8, 0.1, 0.1],
        "training.steps": 3, "training.batch_size": 4, "training.gradient_accumulation": 2, "training.precision": "float32",
        "evaluation.windows": 4,
    }  # fmt: skip
    return dataclasses.replace(cell, recipe=override(cell.recipe, sizes, origin="test"))


@pytest.mark.parametrize("id", [cell for cell in CELLS["small"] if "T3_" in cell or "T12_" in cell or "T1_" in cell])
def test_a_cell_made_small_trains_three_updates(id: str, texts: Path, tmp_path: Path) -> None:
    result = run_cell(shrink(CELLS["small"][id], texts), tmp_path / "cell")
    assert (result.status, result.run["steps"], result.curves["step"]) == ("finished", 3, [1, 2, 3])
    assert result.run["budgets"][0]["num_loops"] == result.axes["loops"]
    assert [len(row) for row in result.curves["residual_norms"]] == [result.axes["loops"]] * 3
