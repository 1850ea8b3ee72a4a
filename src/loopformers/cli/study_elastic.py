"""`loopformers study elastic`: what one model for every budget costs, and what changes to it cost."""

from __future__ import annotations

import argparse

from loopformers.cli.study_command import CONTINUES, add_study_arguments, run_grid

__all__ = ["add_arguments", "run"]

DEFAULT_GRID = "elastic"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Train elastic models beside models of fixed depth, score each at every budget, and report how near one model for\n"
        f"all budgets comes to the best for each, and what changes to it cost.\n\n{CONTINUES}"
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers study elastic --list\n"
        "  loopformers study elastic --seeds 0\n"
        "  loopformers study elastic --output-dir runs/study/mine --seeds 3,4,5\n"
        "  loopformers study elastic --output-dir runs/study/mine --report-only"
    )
    add_study_arguments(parser, default_grid=DEFAULT_GRID)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, 1 when a cell failed, or 130 after Ctrl-C.
    """
    from loopformers.studies.elastic_report import write_elastic_report

    return run_grid(
        arguments,
        arguments.config or DEFAULT_GRID,
        write=write_elastic_report,
        shown=("budgets", "controls", "parts", "solved", "difficulty", "claims"),
    )
