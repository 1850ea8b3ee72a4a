"""`loopformers study stability`: which looped systems train, at how many loops, and whether their loops are used."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loopformers.cli.console import print_heading, print_json, print_note, print_table, stderr
from loopformers.cli.study_bars import StudyBars
from loopformers.cli.study_cells import cells_table
from loopformers.errors import ConfigError, check_count

if TYPE_CHECKING:
    from loopformers.studies.engine import Study

__all__ = ["add_arguments", "run"]

DEFAULT_GRID, FAST_GRID = "stability", "stability-fast"

OUTPUT_ROOT = Path("runs/study")

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Train a grid of systems, loops and seeds with the same settings for all, and report which of them train, how the\n"
        "residual stream and the gradient behave on the way, and whether the loops are used.\n\n"
        "The same command continues a study: finished cells are kept, failed ones are run again."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers study stability --fast\n"
        "  loopformers study stability --output-dir runs/study/mine --seeds 3,4,5\n"
        "  loopformers study stability --config optimizer --jobs 2\n"
        "  loopformers study stability --output-dir runs/study/mine --report-only"
    )
    parser.add_argument(
        "--config", metavar="GRID", help=f"a grid's YAML file or the name of a bundled one ({DEFAULT_GRID})"
    )
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", help=f"folder of the study ({OUTPUT_ROOT}/ and the grid's name)"
    )
    parser.add_argument(
        "--fast", action="store_true", help="one seed of lt and flt at T = 12 alone, in under three minutes"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="cells trained at the same time, one core each (%(default)s)"
    )
    parser.add_argument("--seeds", metavar="S[,S...]", help="seeds to run in the place of the grid's, such as 3,4,5")
    parser.add_argument("--list", action="store_true", help="list the grid's cells and what they cost, and stop")
    parser.add_argument(
        "--report-only", action="store_true", help="write the report anew from the results of --output-dir"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, 1 when a cell failed, or 130 after Ctrl-C.
    """
    from loopformers.studies.engine import open_study, read_study, run_study
    from loopformers.studies.grid import load_grid

    if arguments.fast and arguments.config is not None:
        raise ConfigError(
            f"--fast runs a grid of its own, and --config {arguments.config} is another; give one of them"
        )
    check_count("jobs", arguments.jobs)
    name = arguments.config or (FAST_GRID if arguments.fast else DEFAULT_GRID)
    folder = arguments.output_dir or OUTPUT_ROOT / Path(name).stem
    if arguments.report_only:
        return show(read_study(folder), as_json=arguments.json)
    grid = load_grid(name, seeds=parse_seeds(arguments.seeds))
    if arguments.list:
        table = cells_table(grid)
        print_json(table.to_dict()) if arguments.json else print_table(table)
        return 0
    begun = open_study(grid, folder)
    with StudyBars(stderr(), num_cells=len(grid.cells), num_done=len(begun.outcomes)) as bars:
        try:
            study = run_study(grid, folder, jobs=arguments.jobs, on_event=bars.on_event)
        except KeyboardInterrupt:
            bars.stop()
            print_note("Interrupted. The same command continues the study where it stopped.")
            return INTERRUPTED
    return show(study, as_json=arguments.json)


def show(study: Study, *, as_json: bool) -> int:
    """Write the report, print what it says, and return the exit code."""
    from loopformers.studies.stability_report import write_stability_report

    report = write_stability_report(study)
    if as_json:
        print_json(report.to_json())
    else:
        for name in ("outcomes", "loop-use", "difficulty", "claims"):
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
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--seeds {text} must be whole numbers, such as 0,1,2")
    return [int(part) for part in parts]
