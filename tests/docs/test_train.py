from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from loopformers.cli.main import main
from loopformers.training.published import published_runs
from loopformers.training.recipe import SECTIONS
from loopformers.training.recipe_file import load, resolve, shipped

TEXT = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")

SMALL = {"HIDDEN_SIZE": ("MODEL", 24), "NUM_LOOPS": ("MODEL", 3), "SEQ_LEN": ("DATA", 32), "STEPS": ("TRAINING", 3),
         "BATCH_SIZE": ("TRAINING", 4), "WINDOWS": ("EVALUATION", 3), "CACHE_DIR": ("DATA", "cache")}  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_runs_on_a_folder_of_text_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        text = "".join(f"On day {n} the sea was {name}, and {n * 7} gulls came.\n" for n in range(300))
        (tmp_path / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    (recipe,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(recipe, encoding="utf-8")
    for name, (section, value) in SMALL.items():
        monkeypatch.setenv(f"LOOPFORMERS_{section}__{name}", str(value))
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) >= 10
    for line in lines:
        with monkeypatch.context() as patch:
            words = shlex.split(line)
            while "=" in words[0]:
                variable, _, value = words.pop(0).partition("=")
                patch.setenv(variable, value)
            if words[0] == "torchrun":  # tests/cli/test_train.py starts two processes; here the rest must be sound
                assert resolve(["mine.yaml"], words[words.index("mine.yaml") + 1 :]).training.output_dir == "runs/two"
                continue
            assert words[0] == "loopformers"
            assert main(words[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
    for run in ("mine", "random-depth"):
        for file in ("config.json", "metrics.jsonl", "validation.jsonl", "result.json", "recipe.yaml", "versions.json"):
            assert (tmp_path / "runs" / run / file).exists()
    assert list((tmp_path / "runs" / "mine").rglob("events.out.tfevents.*"))


def test_the_pages_recipe_says_what_the_page_says(tmp_path: Path) -> None:
    (recipe,) = blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(recipe, encoding="utf-8")
    assert load(path).data.sources == ("texts",)
    assert set(yaml.safe_load(recipe)) <= {*SECTIONS, "optimizer", "lr_schedule", "law"}
    assert f"lists all {len(published_runs())}" in TEXT
    for name in re.findall(r"`((?:flt|loopformer)-[\w]+)`", TEXT):
        assert name in shipped() or name == "elastic-flt"
    for key in re.findall(r"^\| `([a-z_]+\.[a-z_]+)", TEXT, flags=re.MULTILINE):
        section, _, field = key.partition(".")
        assert field in SECTIONS[section].__dataclass_fields__  # type: ignore[attr-defined]
