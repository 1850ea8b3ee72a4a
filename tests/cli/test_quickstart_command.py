from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from loopformers.cli.main import main
from loopformers.cli.quickstart import ProgressBars, add_arguments
from loopformers.studies.workers import Failed, Finished, Reported, Started, Stopping
from loopformers.training.progress import TrainingProgress


def progress(step: int) -> TrainingProgress:
    return TrainingProgress(step=step, num_steps=4, loss=6.25, gradient_norm=0.5)


def test_defaults_are_two_workers_and_a_folder_of_runs() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([])
    assert (arguments.output_dir, arguments.jobs, arguments.seed) == (Path("runs/quickstart"), 2, 0)
    assert (arguments.fast, arguments.json) == (False, False)


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--help"]) == 0
    assert "loopformers quickstart --output-dir runs/second --seed 1" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("--jobs", "0"), ("--seed", "-1")])
def test_bad_numbers_are_refused_before_anything_is_written(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["quickstart", "--output-dir", str(folder), f"{option}={value}"]) == 2
    assert f"{option}: {value} must be a whole number" in capsys.readouterr().err
    assert not folder.exists()


def test_without_a_terminal_each_system_has_a_line_at_its_start_and_end() -> None:
    out = io.StringIO()
    with ProgressBars(Console(file=out, width=60), num_steps=4) as bars:
        for event in (
            Started("lt"), Reported("lt", progress(1)), Finished("lt"), Started("flt"), Failed("flt", "E: no", ""),
            Stopping(("elastic-flt",)),
        ):  # fmt: skip
            bars.on_event(event)
    assert out.getvalue().splitlines() == [
        "lt: started",
        "lt: done",
        "flt: started",
        "flt: failed: E: no",
        "Stopping elastic-flt after the running step and saving; Ctrl-C again ends at once.",
    ]


def test_on_a_terminal_each_system_has_a_bar() -> None:
    out = io.StringIO()
    with ProgressBars(Console(file=out, force_terminal=True, width=120), num_steps=4) as bars:
        for event in (Started("lt"), Reported("lt", progress(3))):
            bars.on_event(event)
        assert bars.progress.tasks[0].fields["status"] == "loss  6.250   gradient norm   0.500"
        assert bars.progress.tasks[0].completed == 3
        bars.on_event(Reported("lt", progress(4)))
        assert bars.progress.tasks[0].fields["status"] == "evaluating"
        bars.on_event(Finished("lt"))
    assert "done" in out.getvalue()
