"""`loopformers study`: grids of training runs, and what they show."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from loopformers.cli.group import add_subcommands, run_subcommand

__all__ = ["add_arguments", "run"]

SUBCOMMANDS: Mapping[str, tuple[str, str]] = {
    "stability": (
        "loopformers.cli.study_stability",
        "which looped systems train, at how many loops, and whether their loops are used",
    ),
    "elastic": (
        "loopformers.cli.study_elastic",
        "how near one model for every budget comes to the best for each, and what its parts buy",
    ),
}
"""By name: module, and one line for the list."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their arguments."""
    parser.description = "Train a grid of systems, loops and seeds, and report what became of them."
    parser.epilog = (
        "examples:\n"
        "  loopformers study stability --fast\n"
        "  loopformers study stability --config tasks --jobs 2 --seeds 3,4,5\n"
        "  loopformers study stability --output-dir runs/study/stability --report-only --json"
    )
    add_subcommands(parser, "study", SUBCOMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand and return its exit code."""
    return run_subcommand(arguments, "study", SUBCOMMANDS)
