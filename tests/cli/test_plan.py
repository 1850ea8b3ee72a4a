"""`loopformers plan`: what it prints, what it takes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopformers import LoopConfig
from loopformers.cli.main import main
from loopformers.cli.plan import split_arguments
from loopformers.training.recipe_file import shipped

SMALL = """\
model:
  preset: flt
  num_loops: 4
  num_hidden_layers: 2
  hidden_size: 48
  num_attention_heads: 4
data:
  seq_len: 24
training:
  steps: 20
  batch_size: 12
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    record: dict[str, Any] = json.loads(output.out)
    return record


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_json_holds_the_costs_of_the_recipe(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = plan(capsys, recipe, "--no-time", "--no-data")
    config = LoopConfig.from_preset(
        "flt", hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_loops=4, vocab_size=2048
    )
    assert record["parameters"]["total"] == config.num_parameters()
    assert record["flops"]["model"] == config.training_flops(batch_size=12, seq_len=24)
    assert record["memory"]["weights"] == 4 * config.num_parameters()
    assert (record["tokens"], record["epochs"], record["time"]) == (20 * 12 * 24, None, None)
    assert [row["num_loops"] for row in record["modes"] if row["is_recipe"]] == [4]


def test_the_tables_say_what_the_numbers_are_and_mark_the_recipe(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe]) == 0
    output = capsys.readouterr()
    for words in (
        "Operations of a step",
        "optimiser state (MuonAdamW)",
        "peak of a step",
        "Cache of one sequence",
        "MFU",
    ):
        assert words in output.out
    (marked,) = [line for line in output.out.splitlines() if line.strip().startswith(">  ")]
    assert marked.split()[1:3] == ["4", "none"]
    assert "epochs of the text" in output.out
    assert "Timing" in output.err


def test_fields_are_overridden_as_for_training(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--no-time", "--no-data"]
    record = plan(capsys, "--model.num_loops", "6", recipe, "--training.activation_checkpointing=true", *quick)
    assert record["num_loops"] == 6
    assert record["flops"]["recomputed_loops"] > 0
    same = plan(
        capsys, "--config", recipe, "--model.num_loops", "6", "--training.activation_checkpointing", "true", *quick
    )
    assert same["flops"] == record["flops"]


def test_a_stated_speed_gives_times_without_measuring(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = plan(capsys, recipe, "--no-data", "--peak-tflops", "2", "--efficiency", "0.5", "--processes", "3")
    assert record["num_processes"] == 3
    assert record["time"]["calibration"]["peak_flops"] == 2e12
    assert record["time"]["step_seconds"] == pytest.approx(record["flops"]["executed"] / 3 / 1e12)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_can_be_planned_without_its_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = plan(capsys, name, "--no-time", "--no-data")
    assert record["memory"]["peak"] > record["memory"]["weights"] + record["memory"]["optimizer_state"]
    assert sum(row["is_recipe"] for row in record["modes"]) == 1


def test_the_papers_are_planned_at_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    record = plan(capsys, "loopformer-3x8", "--no-time", "--device", "cuda")
    assert record["parameters"]["total"] == 278_169_600
    assert "only when the run starts" in record["text"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no recipe to plan"),
        (["flt-smal"], "did you mean 'flt-small'"),
        (["flt-small", "--model.num_loop", "3"], "did you mean 'num_loops'"),
        (["flt-small", "--peak-tflops", "3"], "--efficiency"),
        (["flt-small", "--no-time", "--efficiency", "0.3"], "one of the two"),
        (["flt-small", "--efficiency", "1.5", "--peak-tflops", "3"], "--efficiency: 1.5 must be a finite number"),
        (["flt-small", "--processes", "7", "--no-time"], "does not divide into 7"),
        (["quickstart-flt", "--data.sources", "./nowhere", "--no-time"], "nowhere"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *arguments)


def test_recipes_and_fields_are_told_apart_in_any_order() -> None:
    words = ["a.yaml", "--model.num_loops", "3", "b", "--training.steps=4", "--model.preset", "--x", "c"]
    assert split_arguments(words) == (
        ["a.yaml", "b"],
        ["--model.num_loops", "3", "--training.steps=4", "--model.preset", "--x", "c"],
    )
