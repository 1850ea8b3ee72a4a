from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopformers.cli.main import main
from loopformers.data.synthetic.registry import TASKS, make_task
from loopformers.training.recipe import choice_classes
from loopformers.training.recipe_file import load, recipe_fields

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")

SMALL = {"HIDDEN_SIZE": ("MODEL", 24), "NUM_LOOPS": ("MODEL", 2), "STEPS": ("TRAINING", 2), "BATCH_SIZE": ("TRAINING", 4),
         "WINDOWS": ("EVALUATION", 3), "REPORT_TO": ("TRAINING", "none"), "BUDGETS": ("EVALUATION", "1")}  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def layout(name: str, rng: int, **fields: Any) -> str:
    task = make_task(name, **fields)
    row = task.generate(np.random.default_rng(rng), 1).row(0)
    words = [task.words[i] for i in row["input_ids"]]
    answers = [task.words[i] if i >= 0 else "-" for i in row["labels"]]
    return f"{' '.join(words)}\n{' '.join(answers)}\n"


def test_the_rows_on_the_page_are_those_that_the_tasks_make(capsys: pytest.CaptureFixture[str]) -> None:
    pointers, chain, addition = blocks("text")
    exec(compile(blocks("python")[0], "tasks.md", "exec"), {})
    assert capsys.readouterr().out == pointers
    assert chain == layout("modular_arithmetic", 1, modulus=5, operations=3, questions=1)
    assert addition == layout("addition", 1, digits=3, questions=1)


def test_the_page_lists_every_task_with_every_field() -> None:
    classes = choice_classes("task")
    for name in TASKS:
        section = PAGE.partition(f"### {name}: ")[2].partition("\n## ")[0].partition("\n### ")[0]
        listed = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
        assert listed == set(classes[name].__dataclass_fields__)
        assert all(f"task.{field}" in recipe_fields() for field in listed)


def test_the_pages_recipe_loads(tmp_path: Path) -> None:
    (recipe,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(recipe, encoding="utf-8")
    assert load(tmp_path / "mine.yaml").task == load("task-pointer-chasing").task


def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (section, value) in SMALL.items():
        monkeypatch.setenv(f"LOOPFORMERS_{section}__{name}", str(value))
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "loopformers"
        arguments = [*words[1:], "--no-time"] if words[1] == "plan" else words[1:]
        assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
        said = capsys.readouterr().out
        if words[1] == "train":
            assert "solved" in said
            assert "bits per byte" not in said
    assert "s" in said, "an answer"
