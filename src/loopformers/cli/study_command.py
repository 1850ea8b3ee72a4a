"""What the commands under `loopformers study` have in common: run a grid, continue it, list it, report on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loopformers.cli.console import INTERRUPTED, print_heading, print_json, print_note, print_table, stderr
from loopformers.cli.parser import count
from loopformers.cli.paths import path, path_object
from loopformers.cli.study_bars import StudyBars
from loopformers.cli.study_cells import cells_table
from loopformers.errors import ConfigError, shorten
from loopformers.folders import owned
from loopformers.yaml_events import read_int

if TYPE_CHECKING:
    from loopformers.studies.engine import Study
    from loopformers.studies.grid import Grid
    from loopformers.studies.report import StudyReport

__all__ = ["CONTINUES", "add_study_arguments", "parse_seeds", "run_grid"]

OUTPUT_ROOT = Path("runs/study")

CONTINUES = "The same command continues a study: finished cells are kept, failed ones are run again."


def add_study_arguments(parser: argparse.ArgumentParser, *, default_grid: str) -> None:
    """Declare the arguments that every study takes."""
    parser.add_argument(
        "--config", type=path, metavar="GRID", help=f"a grid's YAML file or the name of a bundled one ({default_grid})"
    )
    parser.add_argument(
        "--output-dir",
        type=path_object,
        metavar="DIR",
        help=f"folder of the study ({OUTPUT_ROOT}/ and the grid's name)",
    )
    parser.add_argument(
        "--jobs", type=count(), default=2, help="cells trained at the same time, one core each (%(default)s)"
    )
    parser.add_argument("--seeds", metavar="S[,S...]", help="seeds to run in the place of the grid's, such as 3,4,5")
    parser.add_argument("--list", action="store_true", help="list the grid's cells and what they cost, and stop")
    parser.add_argument(
        "--report-only", action="store_true", help="write the report anew from the results of --output-dir"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_grid(
    arguments: argparse.Namespace, name: str, *, write: Callable[[Study], StudyReport], shown: Sequence[str]
) -> int:
    """Do with a grid what the arguments of `add_study_arguments` ask for.

    Args:
        arguments: As parsed.
        name: The grid's.
        write: Writes the report.
        shown: Tables of it that are printed, by name.

    Returns:
        0, 1 when a cell failed, or 130 after Ctrl-C.
    """
    from loopformers.studies.engine import read_study
    from loopformers.studies.grid import load_grid

    folder = arguments.output_dir or OUTPUT_ROOT / Path(name).stem
    if arguments.report_only:
        if arguments.seeds is not None or arguments.list:
            other = "--list" if arguments.list else f"--seeds {arguments.seeds}"
            raise ConfigError(
                f"--report-only reads the results of --output-dir, so {other} has no effect; leave one of them out"
            )
        held = read_study(folder)
        with owned(folder):
            return _show(write(held), shown, as_json=arguments.json)
    grid = load_grid(name, seeds=parse_seeds(arguments.seeds))
    if arguments.list:
        table = cells_table(grid)
        print_json(table.to_dict()) if arguments.json else print_table(table)
        return 0
    with owned(folder):
        return _run(arguments, grid, folder, write=write, shown=shown)


def _run(
    arguments: argparse.Namespace,
    grid: Grid,
    folder: Path,
    *,
    write: Callable[[Study], StudyReport],
    shown: Sequence[str],
) -> int:
    from loopformers.studies.engine import open_study, run_study

    begun = open_study(grid, folder)
    with StudyBars(stderr(), num_cells=len(grid.cells), num_done=len(begun.outcomes)) as bars:
        try:
            study = run_study(grid, folder, jobs=arguments.jobs, on_event=bars.on_event)
        except KeyboardInterrupt:
            bars.stop()
            print_note("Interrupted. The same command continues the study where it stopped.")
            return INTERRUPTED
    return _show(write(study), shown, as_json=arguments.json)


def _show(report: StudyReport, shown: Sequence[str], *, as_json: bool) -> int:
    """Print what a report says, and return the exit code."""
    study = report.study
    if as_json:
        print_json(report.to_json())
    else:
        for name in shown:
            if name in report.tables:
                print_table(report.tables[name])
        print_heading(report.summary)
        print_note(f"report: {report.page}\nmodels: {study.folder}/cells/<cell>")
    for failure in study.failures:
        print_note(f"{failure.cell} failed: {failure.error}")
    return 1 if study.failures else 0


def parse_seeds(text: str | None) -> list[int] | None:
    """Read `0,1,2`.

    Raises:
        ConfigError: A part that is no whole number.
    """
    if text is None:
        return None
    seeds = [read_int(part.strip()) for part in text.split(",")]
    if any(seed is None or seed < 0 for seed in seeds):
        raise ConfigError(f"--seeds {shorten(text)} must be whole numbers of at least 0, such as 0,1,2")
    return [seed for seed in seeds if seed is not None]
