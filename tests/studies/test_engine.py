from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopformers.errors import ConfigError, DataError
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.studies import cell as cell_module
from loopformers.studies import engine
from loopformers.studies.engine import open_study, read_study, run_study
from loopformers.studies.grid import Cell, Grid, expand_grid
from loopformers.studies.results import CellResult
from loopformers.studies.workers import Emit, Reported
from tests.children import REFUSED, start_elsewhere


@pytest.fixture
def grid(content: dict[str, Any]) -> Grid:
    return expand_grid(content, name="tiny")


def test_a_study_runs_every_cell_records_it_and_is_not_run_again(grid: Grid, tmp_path: Path) -> None:
    study = run_study(grid, tmp_path / "study", jobs=1)
    assert [result.cell for result in study.outcomes] == list(study.cells) == [cell.id for cell in grid.cells]
    assert (study.failures, study.missing) == ((), ())
    result = study.results[2]
    assert result.axes == {"system": "flt", "loops": 2, "seed": 0}
    assert result.recipe["model"]["preset"] == "flt"
    assert [budget["num_loops"] for budget in result.run["budgets"]] == [2, 1, 3]
    assert result.run["loss"] == result.run["budgets"][0]["loss"]
    assert result.run["verdict"] == "collapsed"  # four updates teach nothing
    assert result.curves["step"] == [1, 2, 3, 4]
    for name in ("loss", "gradient_norm", "residual_norms", "loop_gradient_norms", "state_cosines", "log_std"):
        assert len(result.curves[name]) == 4, name
    assert [len(row) for row in result.curves["residual_norms"]] == [2] * 4
    assert [record["step"] for record in result.validation] == [2, 4]
    assert result.validation[1]["losses"] == {str(b["num_loops"]): b["loss"] for b in result.run["budgets"]}
    spent = [record["training_flops"] for record in result.validation]
    assert spent == pytest.approx([result.run["training_flops"] / 2, result.run["training_flops"]], rel=1e-5)
    assert {"oscillation", "residual"} == set(result.stability)
    assert result.loop_use["num_loops"] == 2
    assert len(result.loop_use["state_changes"]) == 1
    assert result.seconds is not None
    assert result.seconds > 0
    folder = tmp_path / "study" / "cells" / "flt_T2_seed0"
    assert LoopedForCausalLM.from_pretrained(folder).config.num_loops == 2
    assert not list(folder.glob("checkpoint-*"))

    def listen(event: Any) -> None:
        pytest.fail(f"{event} although all is done")

    again = run_study(grid, tmp_path / "study", jobs=1, on_event=listen)
    assert again.results == study.results == read_study(tmp_path / "study").results


def test_an_interrupted_cell_goes_on_and_finished_ones_are_kept(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content["blocks"] = [{"training.seed": [0, 1]}]
    grid = expand_grid(content, name="tiny")
    whole = run_study(grid, tmp_path / "whole", jobs=1)
    steps: list[tuple[str, int]] = []

    def interrupt(event: Any) -> None:
        if isinstance(event, Reported) and not isinstance(event.value, CellResult):
            steps.append((event.task, event.value.step))
            if steps[-1] == ("flt_T2_seed1", 3):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_study(grid, tmp_path / "cut", jobs=1, on_event=interrupt)
    assert read_study(tmp_path / "cut").missing == ("flt_T2_seed1",)
    steps.clear()
    study = run_study(grid, tmp_path / "cut", jobs=1, on_event=interrupt)
    assert steps == [("flt_T2_seed1", 4)]
    for one, other in zip(whole.results, study.results, strict=True):
        assert (one.run, one.curves) == (other.run, other.curves)


def test_a_cell_that_fails_is_recorded_the_grid_goes_on_and_the_next_run_tries_again(
    content: dict[str, Any], tmp_path: Path
) -> None:
    content["blocks"] = [{"data": {"gone": {"data.sources": ["no/such/text.txt"]}, "here": {}}}]
    grid = expand_grid(content, name="tiny")
    study = run_study(grid, tmp_path / "study", jobs=1)
    (failure,) = study.failures
    assert failure.cell == "flt_T2_gone_seed0"
    assert "no/such/text.txt" in failure.error
    assert [result.cell for result in study.outcomes] == ["flt_T2_here_seed0"]
    assert study.missing == (failure.cell,)
    events: list[Any] = []
    run_study(grid, tmp_path / "study", jobs=1, on_event=events.append)
    assert {event.task for event in events} == {failure.cell}


RUN_ONE = engine._run_one


def killed_at_seed_1(
    cells: dict[str, Cell], folder: Path, task: str, emit: Emit, stop_requested: Callable[[], bool]
) -> None:
    if task.endswith("seed1"):
        os.kill(os.getpid(), signal.SIGKILL)
    RUN_ONE(cells, folder, task, emit, stop_requested)


def test_a_killed_worker_costs_its_cell_alone_and_jobs_change_no_number(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content["blocks"] = [{"training.seed": [0, 1]}]
    grid = expand_grid(content, name="tiny")
    here = run_study(grid, tmp_path / "here", jobs=1)
    monkeypatch.setattr(engine, "_run_one", killed_at_seed_1)
    study = run_study(grid, tmp_path / "study", jobs=2)
    (failure,), (result,) = study.failures, study.outcomes
    assert (failure.cell, failure.status) == ("flt_T2_seed1", "failed")
    assert failure.error == "its process ended with signal 9; was it out of memory?"
    assert (result.run, result.curves, result.loop_use) == (
        here.results[0].run, here.results[0].curves, here.results[0].loop_use,
    )  # fmt: skip
    monkeypatch.setattr(engine, "_run_one", RUN_ONE)
    again = run_study(grid, tmp_path / "study", jobs=1)
    assert [result.run for result in again.results] == [result.run for result in here.results]


def test_a_run_that_diverges_has_exploded_and_is_not_run_again(content: dict[str, Any], tmp_path: Path) -> None:
    content["blocks"] = [{"optimizer.matrix_lr": 1e30, "optimizer.embedding_lr": 1e30, "training.seed": [0]}]
    grid = expand_grid(content, name="tiny")
    (result,) = run_study(grid, tmp_path / "study", jobs=1).results
    assert (result.status, result.run["verdict"], result.run["loss"]) == ("diverged", "exploding", None)
    assert "not finite" in result.error or "norm=" in result.error
    assert result.run["steps"] == len(result.curves["step"]) < 4
    assert result.has_outcome


def test_changes_of_the_verdict_are_dated() -> None:
    judged = [(1, None), (10, "stable"), (20, "stable"), (30, "oscillating"), (40, "stable")]
    records = [{"step": step, "verdict": verdict} for step, verdict in judged]
    assert [(c["step"], c["verdict"]) for c in cell_module.verdict_changes(records)] == [
        (10, "stable"), (30, "oscillating"), (40, "stable"),
    ]  # fmt: skip


def test_a_folder_that_is_no_studys_is_refused_and_left_alone(grid: Grid, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are not a study's"):
        open_study(grid, tmp_path)
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        open_study(grid, tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="jobs=0 must be a whole number"):
        run_study(grid, tmp_path / "new", jobs=0)
    with pytest.raises(DataError, match="run the study there first"):
        read_study(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_study_that_is_running_cannot_be_started_again(grid: Grid, tmp_path: Path) -> None:
    refused: list[int] = []

    def start_again(event: Any) -> None:
        if refused or not isinstance(event, Reported):
            return
        refused.append(start_elsewhere(lambda: run_study(grid, tmp_path / "study", jobs=1)))

    study = run_study(grid, tmp_path / "study", jobs=1, on_event=start_again)
    assert refused == [REFUSED]
    assert study.missing == ()
    assert not list((tmp_path / "study").glob(".*"))


def test_what_a_killed_start_left_does_not_block_a_study(grid: Grid, tmp_path: Path) -> None:
    (tmp_path / f".results.jsonl.{os.getpid()}.partial").touch()
    (tmp_path / ".loopformers.lock").touch()
    assert open_study(grid, tmp_path).missing == tuple(cell.id for cell in grid.cells)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
