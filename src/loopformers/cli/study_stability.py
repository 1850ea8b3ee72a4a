"""`loopformers study stability`: which looped systems train, at how many loops, and whether their loops are used."""

from __future__ import annotations

import argparse

from loopformers.cli.study_command import CONTINUES, add_study_arguments, run_grid
from loopformers.errors import ConfigError

__all__ = ["add_arguments", "run"]

DEFAULT_GRID, FAST_GRID = "stability", "stability-fast"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Train a grid of systems, loops and seeds with the same settings for all, and report which of them train, how the\n"
        f"residual stream and the gradient behave on the way, and whether the loops are used.\n\n{CONTINUES}"
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers study stability --fast\n"
        "  loopformers study stability --output-dir runs/study/mine --seeds 3,4,5\n"
        "  loopformers study stability --config optimizer --jobs 2\n"
        "  loopformers study stability --output-dir runs/study/mine --report-only"
    )
    add_study_arguments(parser, default_grid=DEFAULT_GRID)
    parser.add_argument(
        "--fast", action="store_true", help="one seed of lt and flt at T = 12 alone, in under three minutes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, 1 when a cell failed, or 130 after Ctrl-C.
    """
    from loopformers.studies.stability_report import write_stability_report

    if arguments.fast and arguments.config is not None:
        raise ConfigError(
            f"--fast runs a grid of its own, and --config {arguments.config} is another; give one of them"
        )
    name = arguments.config or (FAST_GRID if arguments.fast else DEFAULT_GRID)
    return run_grid(
        arguments, name, write=write_stability_report, shown=("outcomes", "loop-use", "difficulty", "claims")
    )
