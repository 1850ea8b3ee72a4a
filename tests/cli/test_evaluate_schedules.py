from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from loopformers.cli.main import main
from loopformers.training.recipe import ModelRecipe, Recipe
from loopformers.training.recipe_file import dump


@pytest.fixture
def model(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / "elastic-flt", tmp_path / "model"))


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "days.txt"
    file.write_text("".join(f"On day {n} the sea was calm.\n" for n in range(300)), encoding="utf-8")
    return ["--budget", "2", "--data", str(file), "--split", "all", "--windows", "4", "--seq-len", "16"]


def search(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", "schedules", *arguments, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_all_schedules_are_ranked_with_spread_names_and_law(
    model: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = search(capsys, str(model), *options, "--output-dir", str(tmp_path / "out"))
    assert {score["schedule"] for score in record["scores"]} == {"2/3,1/3", "1/3,2/3", "1/2,1/2"}
    losses = [score["loss"] for score in record["scores"]]
    assert losses == sorted(losses)
    assert record["loss_spread"] == pytest.approx(losses[-1] - losses[0])
    assert record["best"] == record["scores"][0]["schedule"]
    assert {name for score in record["scores"] for name in score["names"]} == {"uniform", "coarse-first", "fine-first"}
    assert record["law"] == "sequential sampler on a grid of 1/3"
    assert json.loads((tmp_path / "out" / "schedules.json").read_text()) == record
    assert len((tmp_path / "out" / "schedules.csv").read_text().splitlines()) == 4
    assert (tmp_path / "out" / "schedules.svg").exists()
    assert main(["evaluate", "schedules", str(model), *options, "--output-dir", str(tmp_path / "out")]) == 2


def test_the_law_is_the_one_of_the_recipe_that_trained_the_model(
    model: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from loopformers.laws import ShortTrajectory

    recipe = Recipe(
        model=ModelRecipe(preset="elastic-flt", overrides={"num_loops": 3}), law=ShortTrajectory(3, "uniform")
    )
    (model / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    record = search(capsys, str(model), *options)
    assert record["law"] == "uniform sampler on a grid of 1/3"
    on_grid = [score for score in record["scores"] if score["schedule"] != "1/2,1/2"]
    assert [score["law_probability"] for score in on_grid] == [0.5, 0.5]


def test_the_best_is_saved_on_request_and_generate_runs_it(
    model: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def default_run() -> str:
        assert main(["generate", str(model), "--prompt", "On day", "--max-new-tokens", "2", "--json"]) == 0
        (sample,) = json.loads(capsys.readouterr().out)["samples"]
        return str(sample["schedule"])

    assert default_run() == "1/3,1/3,1/3"
    search(capsys, str(model), *options)
    assert default_run() == "1/3,1/3,1/3"
    record = search(capsys, str(model), *options, "--save")
    assert default_run() == record["best"]
    by_accuracy = search(capsys, str(model), *options, "--rank-by", "accuracy", "--save")
    best = max(by_accuracy["scores"], key=lambda score: score["accuracy"])
    assert by_accuracy["best"] == best["schedule"] == default_run()
    assert main(["generate", str(model), "--prompt", "On", "--num-loops", "1", "--max-new-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["num_loops"] == 1


def test_the_table_shows_the_best_the_named_and_the_last(
    model: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "schedules", str(model), *options, "--save"]) == 0
    output = capsys.readouterr()
    for text in ("coarse-first", "fine-first", "uniform", "drawn in training", "best by loss", "spread"):
        assert text in output.out
    assert "saved" in output.err
    assert main(["evaluate", "schedules", str(model), *options, "--save"]) == 0
    assert "in place of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "arguments", "message"),
    [
        ("lt", ["--budget", "2"], "does not know step sizes"),
        ("elastic-flt", ["--budget", "4"], "use at most 3 loops"),
        ("elastic-flt", ["--budget", "0"], "--budget: 0 must be a whole number from 1"),
        ("elastic-flt", ["--budget", "2", "--limit", "0"], "--limit: 0 must be"),
        ("elastic-flt", ["--budget", "2", "--seed", "-1"], "--seed: -1 must be"),
        ("elastic-flt", ["--budget", "2", "--data", "task"], "was not trained on a synthetic task"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    preset: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("loopformers.cli.checkpoint.load_model", None)
    assert main(["evaluate", "schedules", str(checkpoints / preset), *arguments]) == 2
    assert message in capsys.readouterr().err
