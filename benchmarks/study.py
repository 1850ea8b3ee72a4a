"""What a cell of a study costs: trained with everything recorded, against the same training with nothing watched.

    python benchmarks/study.py --threads 1 --repeats 3 --json study.json

Both train the same recipe from its first update to its last and validate it at the same budgets, one whole run each in turn;
the cell also watches every update, measures how loops are used, and makes its line of the results file. A ratio is the median
over such pairs. With one thread, time is the CPU time of this process. The second row has the bare run validate at T alone.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from speed import Comparison, compare, interleaved

import loopformers.training.run as training_run
from loopformers.studies.cell import run_cell
from loopformers.studies.grid import Cell, expand_grid
from loopformers.training.recipe import Recipe
from training import FAST, Sizes, run

SYSTEM, NUM_LOOPS = "flt", 12


def make_cell(sizes: Sizes) -> Cell:
    base: dict[str, Any] = {
        "recipe": "quickstart-flt",
        "evaluation": {"budgets": [1, 2, 3, 6, 9, 12, 16], "windows": 128},
        "training": {"checkpoint_interval": 100},
    }
    if sizes == FAST:
        base |= {"model": {"hidden_size": 16, "num_hidden_layers": 1}, "training": {"steps": 3}}
        base["evaluation"] = {"budgets": [1, 2], "windows": 4}
    block = {"model.preset": [SYSTEM], "model.num_loops": [2 if sizes == FAST else NUM_LOOPS], "training.seed": [0]}
    (cell,) = expand_grid({"base": base, "blocks": [block]}, name="benchmark").cells
    return cell


def record(cell: Cell, folder: Path) -> None:
    """Run the cell, as a study does."""
    json.dumps(run_cell(cell, folder).to_json())
    shutil.rmtree(folder)


def train_blind(recipe: Recipe, folder: Path) -> None:
    """Train the recipe and watch nothing."""
    settings = training_run.engine_settings
    training_run.engine_settings = lambda recipe: dataclasses.replace(settings(recipe), diagnostics=False)
    try:
        training = dataclasses.replace(recipe.training, output_dir=str(folder), report_to=())
        training_run.prepare(dataclasses.replace(recipe, training=training)).train()
    finally:
        training_run.engine_settings = settings
    shutil.rmtree(folder)


def measure(sizes: Sizes, repeats: int) -> list[Comparison]:
    cell = make_cell(sizes)
    at_trained = dataclasses.replace(cell.recipe, evaluation=dataclasses.replace(cell.recipe.evaluation, budgets=()))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run"
        times = interleaved(
            {
                "cell": lambda: record(cell, folder),
                "blind": lambda: train_blind(cell.recipe, folder),
                "blind, T alone": lambda: train_blind(at_trained, folder),
            },
            repeats,
            warm_up=sizes == FAST,
        )
    seconds = {"section": "study", "unit": "s a run", "target": 1.1}
    where = f"{SYSTEM}, T = {NUM_LOOPS}"
    return [
        compare(times["cell"], times["blind"], name=f"{where}: cell / same training and validation", **seconds),
        compare(times["cell"], times["blind, T alone"], name=f"{where}: cell / validated at T alone", **seconds),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run this benchmark."""
    return run(argv, __doc__, {"study": measure})


if __name__ == "__main__":
    sys.exit(main())
