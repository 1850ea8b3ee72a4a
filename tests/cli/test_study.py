from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from loopformers.cli.main import main
from loopformers.cli.study_bars import StudyBars
from loopformers.cli.study_command import parse_seeds
from loopformers.errors import ConfigError
from loopformers.studies.results import CellResult
from loopformers.studies.workers import Failed, Finished, Reported, Started, Stopping
from loopformers.training.progress import TrainingProgress


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A grid of three cells that train in a second."""
    text = tmp_path / "sea.txt"
    text.write_text("".join(f"On day {n} the sea was calm, and {n * 7} gulls came.\n" for n in range(300)))
    content = {
        "title": "Three cells",
        "base": {
            "model": {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1},
            "data": {"sources": [str(text)], "seq_len": 17, "split_by": "tail", "cache_dir": str(tmp_path / "cache")},
            "training": {"steps": 3, "batch_size": 2},
            "evaluation": {"budgets": [1, 2], "windows": 4},
        },
        "blocks": [
            {"model.num_loops": [12], "model.preset": ["lt", "flt"]},
            {"system": {"one-pass": {"model.num_loops": 1}}},
        ],
    }
    path = tmp_path / "three.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def study(*arguments: str) -> int:
    return main(["study", "stability", *arguments])


def test_a_study_is_run_reported_continued_and_reported_anew(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    asked = ("--config", str(grid), "--output-dir", str(folder), "--jobs", "1")
    assert study(*asked) == 0
    out, err = capsys.readouterr()
    assert "How each ended: validation loss at T loops" in out
    assert "Are the loops used?" in out
    assert "lt at T = 12 ends within 0.3 nats of the unigram level on every seed" in out
    assert "[3/3] one-pass_T1_seed0: collapsed, loss " in err
    assert "report.html" in err
    page = (folder / "report.html").read_text()
    assert study(*asked, "--json") == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert shown["title"] == "Three cells"
    assert [row["system"] for row in shown["tables"]["outcomes"]["rows"]] == ["lt", "flt", "one-pass"]
    assert "[" not in err  # nothing was run
    (folder / "report.html").unlink()
    grid.unlink()
    assert study("--output-dir", str(folder), "--report-only") == 0
    assert (folder / "report.html").read_text() == page


def test_a_failed_cell_is_said_and_gives_another_exit_code(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(grid.read_text())
    content["blocks"] = [{"data": {"gone": {"data.sources": [str(tmp_path / "gone.txt")]}}}]
    grid.write_text(yaml.safe_dump(content))
    assert study("--config", str(grid), "--output-dir", str(tmp_path / "out"), "--jobs", "1") == 1
    out, err = capsys.readouterr()
    assert "[1/1] flt_T12_gone_seed0: failed: DataError" in err
    assert "No cell has an outcome yet." in out


def test_a_list_shows_the_cells_and_runs_nothing(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert study("--config", str(grid), "--output-dir", str(folder), "--seeds", "4,5", "--list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cell"] for row in rows][:3] == ["lt_T12_seed4", "flt_T12_seed4", "lt_T12_seed5"] or len(rows) == 6
    assert {row["seed"] for row in rows} == {4, 5}
    assert {row["tokens"] for row in rows} == {3 * 2 * 17}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--fast", "--config", "stability"], "--fast runs a grid of its own, and --config stability is another"),
        (["--config", "stabilty"], "grid='stabilty' is not known; did you mean 'stability'"),
        (["--seeds", "0,one"], "--seeds '0,one' must be whole numbers"),
        (["--seeds", "1,1"], r"seeds=[1, 1] must name at least one seed, each once"),
        (["--jobs", "0"], "--jobs: 0 must be a whole number from 1"),
        (["--report-only"], "holds no results.jsonl; run the study there first"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert study("--output-dir", str(folder), *arguments) == 2
    assert text in capsys.readouterr().err
    assert not folder.exists()


def test_the_elastic_study_has_the_same_arguments_and_another_report(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(grid.read_text())
    content["blocks"] = [{"system": {"elastic-balanced": {"model.preset": "elastic-balanced", "model.num_loops": 2}}}]
    grid.write_text(yaml.safe_dump(content))
    folder = tmp_path / "out"
    command = ["study", "elastic", "--output-dir", str(folder)]
    assert main([*command, "--config", str(grid), "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert "Validation loss of one trained model by loops run, M" in out
    assert "elastic-balanced is stable at T = 2 on every seed" in out
    assert "report.html" in err
    assert main([*command, "--report-only", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in shown["tables"]["controls"]["rows"]] == ["elastic-balanced"] * 2
    assert shown["missing"] == []


def test_study_without_a_subcommand_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study"]) == 2
    assert "choose one of: stability" in capsys.readouterr().err


def test_seeds_are_read_with_spaces_and_none_stays_none() -> None:
    assert (parse_seeds("3, 4"), parse_seeds(None)) == ([3, 4], None)
    with pytest.raises(ConfigError):
        parse_seeds("-1")


def events(result: CellResult) -> list[Any]:
    progress = TrainingProgress(step=3, num_steps=4, loss=6.25, gradient_norm=0.5)
    return [
        Started("a"),
        Reported("a", progress),
        Reported("a", result),
        Finished("a"),
        Started("b"),
        Failed("b", "E: no", ""),
    ]


@pytest.fixture
def result() -> CellResult:
    return CellResult(cell="a", status="finished", axes={}, recipe={}, run={"verdict": "stable", "loss": 4.9})


def test_without_a_terminal_each_cell_has_a_line_at_its_end(result: CellResult) -> None:
    out = io.StringIO()
    with StudyBars(Console(file=out, width=80), num_cells=9, num_done=4) as bars:
        for event in (*events(result), Stopping(("c",))):
            bars.on_event(event)
    assert out.getvalue().splitlines() == [
        "[5/9] a: stable, loss 4.900",
        "[6/9] b: failed: E: no",
        "Stopping c after the running step and saving; Ctrl-C again ends at once.",
    ]


def test_on_a_terminal_the_grid_has_a_bar_and_so_has_each_running_cell(result: CellResult) -> None:
    out = io.StringIO()
    with StudyBars(Console(file=out, force_terminal=True, width=120), num_cells=9, num_done=4) as bars:
        for event in events(result)[:2]:
            bars.on_event(event)
        whole, cell = bars.progress.tasks
        assert (whole.completed, whole.total) == (4, 9)
        assert (cell.description, cell.completed, cell.total, cell.fields["status"]) == ("a", 3, 4, "loss  6.250")
        for event in events(result)[2:]:
            bars.on_event(event)
        assert [task.description for task in bars.progress.tasks] == ["cells"]
        assert bars.progress.tasks[0].completed == 6
