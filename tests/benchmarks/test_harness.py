from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "harness.py"


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["harness_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_backends_answer_the_same_requests_and_a_ratio_is_theirs(harness, tmp_path, capsys):
    (tmp_path / "data" / "piqa").mkdir(parents=True)
    lines = ['{"goal": "Carry eggs?", "sol1": "In a basket.", "sol2": "In a bag of stones.", "label": 0}'] * 3
    (tmp_path / "data" / "piqa" / "validation.jsonl").write_text("\n".join(lines), encoding="utf-8")
    command = [
        "--tasks",
        "piqa",
        "--data",
        str(tmp_path / "data"),
        "--limit",
        "2",
        "--pairs",
        "1",
        "--hidden-size",
        "32",
    ]
    assert harness.main([*command, "--json", str(tmp_path / "harness.json")]) == 0
    result = json.loads((tmp_path / "harness.json").read_text(encoding="utf-8"))
    assert [row["task"] for row in result["rows"]] == ["piqa", "all"]
    (piqa, _) = result["rows"]
    assert piqa["requests"] == 4
    ratio = piqa["ours, requests per second"] / piqa["lm_eval, requests per second"]
    assert piqa["ours / lm_eval"] == pytest.approx(ratio)
    assert "lm_eval" in capsys.readouterr().out
