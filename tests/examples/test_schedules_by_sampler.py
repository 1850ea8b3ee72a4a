from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml

from loopformers import Schedule
from loopformers.cli.main import main as loopformers

SCRIPT = Path(__file__).parents[2] / "examples" / "schedules_by_sampler.py"


def test_the_example_ranks_the_schedules_of_every_model_that_knows_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {
        "base": {
            "recipe": "quickstart-elastic-flt",
            "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_loops": 5},
            "data": {"seq_len": 16},
            "training": {"steps": 2, "batch_size": 2},
            "evaluation": {"windows": 2, "budgets": [1, 5]},
        },
        "blocks": [
            {
                "training.seed": [0, 1],
                "system": {
                    "elastic": {},
                    "uniform-sampler": {"model.short_sampler": "uniform"},
                    "plain": {"model.preset": "flt"},
                    "shallow": {"model.num_loops": 2},
                },
            }
        ],
    }
    grid = tmp_path / "grid.yaml"
    grid.write_text(yaml.safe_dump(content), encoding="utf-8")
    study = tmp_path / "study"
    assert loopformers(["study", "elastic", "--config", str(grid), "--jobs", "1", "--output-dir", str(study)]) == 0
    capsys.readouterr()
    found = tmp_path / "schedules.json"
    runpy.run_path(str(SCRIPT))["main"]([str(study), "--budgets", "2", "3", "--windows", "2", "--json", str(found)])
    out = capsys.readouterr().out
    assert "elastic" in out
    assert "uniform-sampler" in out
    rows = json.loads(found.read_text(encoding="utf-8"))
    assert {(r["system"], r["budget"], r["seed"]) for r in rows} == {
        (system, budget, seed)
        for system, budgets in {"elastic": (2, 3), "uniform-sampler": (2, 3), "shallow": (2,)}.items()
        for budget in budgets
        for seed in (0, 1)
    }
    for row in rows:
        losses = {score["schedule"]: score["loss"] for score in row["scores"]}
        if row["system"] == "shallow":
            assert set(losses) == {"1/2,1/2"}
            continue
        assert len(losses) == {2: 5, 3: 7}[row["budget"]]  # uniform steps are not on the grid
        coarse, fine, even = (
            losses[str(Schedule.parse(kind, num_loops=row["budget"], grid=5))]
            for kind in ("coarse-first", "fine-first", "uniform")
        )
        assert row["uniform"] == even
        assert row["coarse-first"] == pytest.approx(coarse - even)
        assert row["fine-first"] == pytest.approx(fine - even)
        assert -1 <= row["correlation"] <= 1
