"""Runs the cells of a grid, some at a time, and keeps what each came to.

A study's folder:

    results.jsonl      a header, and a line for each cell that has ended, see `loopformers.studies.results`
    cells/<id>/        the run of a cell: its model, recipe and logs; checkpoints while it is being trained

The same call continues a study: cells that have an outcome are kept, cells that failed are run again, and cells that were
interrupted go on from their checkpoints. This module imports no torch, but reading a grid does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopformers.errors import ConfigError, check_count
from loopformers.folders import foreign_names, owned
from loopformers.studies.grid import Cell, Grid
from loopformers.studies.results import RESULTS_FILE, CellResult, Held, ResultsFile, failed
from loopformers.studies.workers import Emit, Failed, Reported, TaskEvent, run_tasks

__all__ = ["Study", "open_study", "read_study", "run_study"]

CELLS_DIR = "cells"


@dataclass(frozen=True, slots=True)
class Study:
    """A grid's cells, and what has become of them so far."""

    folder: Path
    """Where it is kept."""
    title: str
    """For reports."""
    cells: tuple[str, ...]
    """Ids of all cells."""
    results: tuple[CellResult, ...]
    """Of cells that have ended, in the order of the grid."""

    @property
    def outcomes(self) -> tuple[CellResult, ...]:
        """The results of cells that did not fail."""
        return tuple(result for result in self.results if result.has_outcome)

    @property
    def failures(self) -> tuple[CellResult, ...]:
        """The results of cells that failed."""
        return tuple(result for result in self.results if not result.has_outcome)

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of cells without an outcome."""
        done = {result.cell for result in self.outcomes}
        return tuple(cell for cell in self.cells if cell not in done)


def read_study(folder: str | os.PathLike[str]) -> Study:
    """Return the study that a folder holds.

    Raises:
        DataError: It holds none, its results file is damaged, or of another schema version.
    """
    return _study(Path(folder), ResultsFile(Path(folder)).read())


def open_study(grid: Grid, output_dir: str | os.PathLike[str]) -> Study:
    """Return a grid's study as far as its folder holds it, and make the folder if there is none.

    Raises:
        ConfigError: The folder holds results of another grid, or other files, or another process owns it.
        DataError: As in `read_study`.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r} is a file; give a folder")
    if folder.exists() and not (folder / RESULTS_FILE).exists() and foreign_names(folder):
        raise ConfigError(
            f"output_dir={str(folder)!r} holds files that are not a study's; choose a new or an empty folder"
        )
    with owned(folder):
        return _study(folder, ResultsFile(folder).begin(grid))


def _study(folder: Path, held: Held) -> Study:
    results = tuple(held.results[cell] for cell in held.cells if cell in held.results)
    return Study(folder, held.title, held.cells, results)


def run_study(
    grid: Grid,
    output_dir: str | os.PathLike[str],
    *,
    jobs: int = 2,
    on_event: Callable[[TaskEvent], None] = lambda event: None,
) -> Study:
    """Run the cells that have no outcome yet.

    Args:
        grid: The cells.
        output_dir: The study's folder.
        jobs: Cells trained at the same time, each by a process with one thread; 1: in this process.
        on_event: Told of progress: `Reported` events hold a `TrainingProgress`, and a `CellResult` at a cell's end.

    Returns:
        The study; a cell that failed, or whose process died, is in `failures`, and the others are complete.

    Raises:
        ConfigError: As in `open_study`, or fewer jobs than 1.
        KeyboardInterrupt: Ctrl-C, after each running cell saved a checkpoint.
    """
    check_count("jobs", jobs)
    with owned(output_dir):
        return _run_study(grid, output_dir, jobs, on_event)


def _run_study(
    grid: Grid, output_dir: str | os.PathLike[str], jobs: int, on_event: Callable[[TaskEvent], None]
) -> Study:
    study = open_study(grid, output_dir)
    file = ResultsFile(study.folder)
    cells = {cell.id: cell for cell in grid.cells if cell.id in study.missing}

    def listen(event: TaskEvent) -> None:
        match event:
            case Reported(_, CellResult() as result):
                file.append(result)
            case Failed(task, error):
                file.append(failed(cells[task], error))
        on_event(event)

    run_tasks(functools.partial(_run_one, cells, study.folder), list(cells), jobs=jobs, on_event=listen)
    return open_study(grid, output_dir)


def _run_one(cells: dict[str, Cell], folder: Path, task: str, emit: Emit, stop_requested: Callable[[], bool]) -> None:
    """Run one cell: a task of `run_tasks`."""
    from loopformers.studies.cell import run_cell  # torch, in the worker alone

    emit(run_cell(cells[task], folder / CELLS_DIR / task, emit=emit, stop_requested=stop_requested))
