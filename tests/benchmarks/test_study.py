from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_smoke_test_measures_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("speed", "training", "study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("study")
    path = tmp_path / "out.json"
    assert module.main(["--fast", "--repeats", "2", "--json", str(path)]) == 0
    comparisons = json.loads(path.read_text())["comparisons"]
    assert [row["unit"] for row in comparisons] == ["s a run"] * 2
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in comparisons)
    assert "same training and validation" in capsys.readouterr().out
    for name in ("speed", "training", "study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
