"""`loopformers evaluate`: what a model is worth, at every budget."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from loopformers.cli.group import add_subcommands, run_subcommand

__all__ = ["add_arguments", "run"]

SUBCOMMANDS: Mapping[str, tuple[str, str]] = {
    "budget": ("loopformers.cli.evaluate_budget", "loss, accuracy and cost at every budget, models side by side"),
    "schedules": ("loopformers.cli.evaluate_schedules", "which step sizes serve a budget best, and saving them"),
    "perplexity": ("loopformers.cli.evaluate_perplexity", "perplexity of one stream of text by strided windows"),
    "tasks": (
        "loopformers.cli.evaluate_tasks",
        "tasks of lm-evaluation-harness at every budget, any models side by side",
    ),
    "table": ("loopformers.cli.evaluate_table", "results of tasks again: merged, compared, as a table"),
}
"""By name: module, and one line for the list."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their arguments."""
    parser.description = "Evaluate models: loss over budgets and schedules, perplexity, tasks of the harness."
    parser.epilog = (
        "examples:\n"
        "  loopformers evaluate budget runs/quickstart/flt runs/quickstart/elastic-flt --output-dir runs/budgets\n"
        "  loopformers evaluate schedules runs/quickstart/elastic-flt --budget 4 --save\n"
        "  loopformers evaluate perplexity runs/quickstart/elastic-flt --data bundled --json"
    )
    add_subcommands(parser, "evaluate", SUBCOMMANDS)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand and return its exit code."""
    return run_subcommand(arguments, "evaluate", SUBCOMMANDS)
