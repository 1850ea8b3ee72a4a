from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_smoke_test_measures_every_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("speed", "training", "budgets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module: Any = importlib.import_module("budgets")
    path = tmp_path / "out.json"
    assert module.main(["--fast", "--repeats", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["comparisons"]
    assert {row["section"] for row in rows} == {"shared", "sum"}
    assert len(rows) == 2 * (len(module.UNCONDITIONED) + 1 + len(module.CONDITIONED) + 1)
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
    assert "elastic-flt" in capsys.readouterr().out
    for name in ("speed", "training", "budgets"):
        sys.modules.pop(name, None)
