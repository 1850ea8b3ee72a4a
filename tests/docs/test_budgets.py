"""What the page on budgets shows runs, in order, on smaller recipes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from loopformers.cli.main import main
from loopformers.model.saved_schedule import read_schedule

TEXT = (Path(__file__).parents[2] / "docs" / "budgets.md").read_text(encoding="utf-8")

SMALL = {"HIDDEN_SIZE": ("MODEL", 24), "NUM_HIDDEN_LAYERS": ("MODEL", 1), "NUM_LOOPS": ("MODEL", 4), "SEQ_LEN": ("DATA", 32),
         "STEPS": ("TRAINING", 3), "BATCH_SIZE": ("TRAINING", 4), "WINDOWS": ("EVALUATION", 3), "CACHE_DIR": ("DATA", "cache"),
         "BUDGETS": ("EVALUATION", "[1, 4]")}  # fmt: skip
"""Fields of the recipes, by environment variable."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (section, value) in SMALL.items():
        monkeypatch.setenv(f"LOOPFORMERS_{section}__{name}", str(value))
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("loopformers ")]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[:2] in (["evaluate", "budget"], ["evaluate", "schedules"]):
            words += ["--windows", "3", "--seq-len", "32"]
        words = [{"1,3,12": "1,3,4", "12": "4"}.get(word, word) for word in words]
        assert main(words) == 0, f"{line}\n{capsys.readouterr().err}"
    for folder, names in {"budgets": ("budgets",), "schedules": ("schedules",)}.items():
        for name in names:
            for kind in ("json", "csv", "svg"):
                assert (tmp_path / "runs" / folder / f"{name}.{kind}").exists()
    record = json.loads((tmp_path / "runs" / "budgets" / "budgets.json").read_text(encoding="utf-8"))
    assert all(model["training_flops"] > 0 for model in record["models"])
    from loopformers.cli.checkpoint import load_config

    saved = read_schedule(tmp_path / "runs" / "elastic", load_config(str(tmp_path / "runs" / "elastic")))
    best = json.loads((tmp_path / "runs" / "schedules" / "schedules.json").read_text(encoding="utf-8"))["best"]
    assert str(saved) == best


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    exec(compile(block, "budgets.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 5
