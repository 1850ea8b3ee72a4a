from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loopformers.cli.main import main
from loopformers.data.synthetic.registry import make_task
from loopformers.data.synthetic.rows import held_out_rows
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.evaluation.exact_match import evaluate_task
from loopformers.testing import tiny_model
from loopformers.training.recipe import ModelRecipe, Recipe
from loopformers.training.recipe_file import dump


def budget(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", "budget", *arguments, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "days.txt"
    file.write_text("".join(f"On day {n} the sea was calm.\n" for n in range(300)), encoding="utf-8")
    return str(file)


def test_models_stand_side_by_side_at_every_budget_to_beyond_the_trained_one(
    checkpoints: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic, lt = tmp_path / "elastic", tmp_path / "lt"
    shutil.copytree(checkpoints / "elastic-flt", elastic)
    shutil.copytree(checkpoints / "lt", lt)
    (elastic / "result.json").write_text('{"training_flops": 4.5e12}')
    out = tmp_path / "out"
    arguments = [str(elastic), str(lt), "--data", text, "--split-by", "tail", "--windows", "3", "--seq-len", "24"]
    record = budget(capsys, *arguments, "--output-dir", str(out), "--batch-size", "2")
    assert (record["seq_len"], record["num_windows"], record["split"]) == (24, 3, "validation")
    assert [model["model"] for model in record["models"]] == ["elastic", "lt"]
    assert [model["training_flops"] for model in record["models"]] == [4.5e12, None]
    for model in record["models"]:
        assert [row["num_loops"] for row in model["budgets"]] == [1, 2, 3, 5, 6]
        assert model["trained_loops"] == 3
        for row in model["budgets"]:
            assert row["kv_bytes_per_token"] == 2 * 24 * 4 * 2 * row["num_loops"]
            assert row["decode_seconds"] > 0
            assert row["tokens_per_second"] > 0
            assert row["bits_per_byte"] > 0
            assert row["exact_match_by_difficulty"] is None
    assert json.loads((out / "budgets.json").read_text()) == record
    assert (out / "budgets.svg").read_text().startswith("<?xml")
    with (out / "budgets.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert float(rows[0]["loss"]) == record["models"][0]["budgets"][0]["loss"]
    assert (rows[0]["training_tflop"], rows[-1]["training_tflop"]) == ("4.5", "")
    assert main(["evaluate", "budget", *arguments, "--output-dir", str(out)]) == 2
    assert "already contains budgets.json" in capsys.readouterr().err


def test_the_scores_are_those_of_the_reference(
    checkpoints: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from loopformers.cli.checkpoint import load_model, load_tokenizer
    from loopformers.evaluation.text import read_documents, read_windows

    folder = str(checkpoints / "elastic-flt")
    schedules = ["--schedule", "coarse-first:2", "--schedule", "uniform:4"]
    options = ["--data", text, "--split", "all", "--windows", "5", "--seq-len", "16", "--no-time"]
    record = budget(capsys, folder, *schedules, *options)
    windows = read_windows(read_documents(text, "all"), load_tokenizer(folder), seq_len=16, num_windows=5)
    expected = evaluate_budgets(load_model(folder), windows.windows, ["coarse-first:2", 4])
    for row, reference in zip(record["models"][0]["budgets"], expected, strict=True):
        assert row["loss"] == pytest.approx(reference.loss, rel=1e-6)
        assert row["schedule"] == reference.schedule
        assert row["decode_seconds"] is None


def test_the_table_names_what_was_scored_and_leaves_out_what_was_not_measured(
    checkpoints: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", text, "--split", "all", "--windows", "2", "--seq-len", "16", "--no-time"]
    assert main(["evaluate", "budget", str(checkpoints / "lt"), *options]) == 0
    out = capsys.readouterr().out
    assert "2 windows of 16 tokens" in out
    assert "perplexity" in out
    assert "decoding" not in out
    assert "solved" not in out
    assert "step sizes" not in out


def task_checkpoint(folder: Path, **fields: Any) -> Path:
    task = make_task("pointer_chasing", **{"symbols": 3, "questions": 5, "hops": 2, **fields})
    model = tiny_model("lt", vocab_size=len(task.words), max_position_embeddings=task.seq_len)
    model.save_pretrained(folder)
    recipe = Recipe(model=ModelRecipe(preset="lt", overrides={"num_loops": 3}), task=task)
    (folder / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    return folder


def test_models_of_a_synthetic_task_are_scored_on_its_held_out_rows_by_difficulty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = task_checkpoint(tmp_path / "chaser"), tmp_path / "out"
    options = ["--data", "task", "--windows", "40", "--num-loops", "1,3", "--output-dir", str(out)]
    record = budget(capsys, str(folder), *options)
    task = make_task("pointer_chasing", symbols=3, questions=5, hops=2)
    rows = held_out_rows(task, 40)
    from loopformers.cli.checkpoint import load_model

    expected = evaluate_task(load_model(str(folder)), [rows.row(i) for i in range(40)], [1, 3])
    for row, reference in zip(record["models"][0]["budgets"], expected, strict=True):
        assert row["exact_match"] == reference.solved
        assert row["exact_match_by_difficulty"] == reference.solved_by_difficulty
        assert row["bits_per_byte"] is None
    with (out / "budgets.csv").open() as file:
        assert {"solved", "solved_1", "solved_2"} <= set(next(csv.reader(file)))
    other = task_checkpoint(tmp_path / "other", questions=4)
    assert main(["evaluate", "budget", str(folder), str(other), "--data", "task"]) == 2
    assert "different tasks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{lt}", "{lt}"], "is given twice"),
        (["{lt}", "--data", "task"], "was not trained on a synthetic task"),
        (["{lt}", "--schedule", "1/2,1/4,1/4"], "unequal steps"),
        (["{elastic-flt}", "--schedule", "coarse-first:4"], "does not fit a grid of 1/3"),
        (["{lt}", "--num-loops", "0"], "num_loops=0"),
        (["{lt}", "--windows", "0"], "--windows: 0 must be"),
        (["{lt}", "--batch-size", "0"], "--batch-size: 0 must be"),
        (["{lt}", "--seq-len", "1"], "seq_len=1"),
        (["{loopformer}", "--seq-len", "41"], "more than the 40 positions"),
        (["{lt}", "--data", "nowhere.txt"], "no file or folder"),
        (["{lt}", "--split", "dev"], "split='dev'"),
        (["nowhere"], "nowhere is no folder"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_any_model_is_loaded(
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("loopformers.cli.checkpoint.load_model", None)
    folders = {name: str(checkpoints / name) for name in ("lt", "elastic-flt", "loopformer")}
    given = [folders.get(word.strip("{}"), word) for word in arguments]
    assert main(["evaluate", "budget", *given, "--no-time"]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_its_trained_loops_is_refused(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoints / "lt", tmp_path / "lt")
    file = tmp_path / "lt" / "config.json"
    fields = json.loads(file.read_text())
    del fields["num_loops"]
    file.write_text(json.dumps(fields))
    assert main(["evaluate", "budget", str(tmp_path / "lt")]) == 2
    assert "does not say num_loops" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    tiny_model("lt").save_pretrained(tmp_path / "small")
    options = ["--tokenizer", str(checkpoints / "lt"), "--no-time"]
    assert main(["evaluate", "budget", str(tmp_path / "small"), *options]) == 2
    assert "2048 entries" in capsys.readouterr().err
    assert main(["evaluate", "budget", str(tmp_path / "small"), "--no-time"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err


def test_a_result_that_was_cut_off_is_no_result(
    checkpoints: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("budgets.csv", "budgets.svg", ".budgets.json.1.partial"):
        (out / name).write_text("half")
    arguments = [str(checkpoints / "lt"), "--data", text, "--split-by", "tail", "--windows", "2", "--seq-len", "24"]
    budget(capsys, *arguments, "--no-time", "--output-dir", str(out))
    assert sorted(path.name for path in out.iterdir()) == ["budgets.csv", "budgets.json", "budgets.svg"]
    assert "half" not in (out / "budgets.csv").read_text()
    assert main(["evaluate", "budget", "nowhere", "--output-dir", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
