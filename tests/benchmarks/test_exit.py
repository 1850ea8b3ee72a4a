from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "exit.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exit_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["exit_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_smoke_test_times_rules_and_scores_rows(benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "ROWS_RULES", ("state:0.7",))  # tokens of a random model leave by it
    tokenizer, folder = bundled_tokenizer(), tmp_path / "model"
    tiny_model("lt-input", num_loops=4, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = tmp_path / "exit.json"
    asked = ["--fast", "--repeats", "1", "--presets", "flt", "--sections", "time", "rows", "--models", str(folder)]
    benchmark.main([*asked, "--windows", "3", "--json", str(path)])
    result = json.loads(path.read_text())
    assert [row["rule"].split(":")[0].split()[0] for row in result["time"]] == ["spread", "state", "kl"]
    for row in result["time"]:
        assert row["ratio"] > 0
        assert 1 <= row["average_loops"] <= 6
    by_choice = {(row["rule"], row["deeper_rows"]): row for row in result["rows"]}
    assert {choice for _, choice in by_choice} == {"enter", "copy", "project", "exact"}
    for (_, choice), row in by_choice.items():
        assert (row["over_exact"] == 0) == (choice == "exact")
    assert "adaptive / fixed" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--sections", "rows"], ["--sections", "nothing"]])
def test_bad_arguments_end_with_usage(benchmark, argv):
    with pytest.raises(SystemExit) as error:
        benchmark.main(argv)
    assert error.value.code == 2
