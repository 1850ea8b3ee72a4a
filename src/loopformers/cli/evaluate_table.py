"""`loopformers evaluate table`: results of tasks, merged and rendered again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loopformers.cli.console import json_text, print_json, print_note, print_table
from loopformers.cli.parser import count
from loopformers.cli.paths import path
from loopformers.cli.results_folder import results_folder
from loopformers.errors import ConfigError

if TYPE_CHECKING:
    from loopformers.evaluation.results import Results

__all__ = ["add_arguments", "print_results", "run", "save_tables"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show results of evaluate tasks again, several files as one. Files whose protocols differ (other questions, prompts,\n"
        "shots or versions) do not merge: their numbers do not compare."
    )
    parser.epilog = "example:\n  loopformers evaluate table runs/tasks runs/others --output-dir runs/both --baseline 2"
    parser.add_argument("results", nargs="+", type=path, metavar="RESULTS", help="results file, or its folder")
    parser.add_argument(
        "--baseline",
        type=count(0),
        default=0,
        metavar="N",
        help="row to compare the others with, counted from 0 (default: 0)",
    )
    parser.add_argument(
        "--output-dir", type=path, metavar="DIR", help="save the merged results, tables and figure there"
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from loopformers.evaluation.results import RESULTS_FILE, merge, read_results

    results = merge(read_results(path) for path in arguments.results)
    if arguments.output_dir is not None:
        folder = Path(arguments.output_dir)
        with results_folder(folder, (RESULTS_FILE,)):
            save_tables(results, folder, baseline=arguments.baseline)
            results.save(folder / RESULTS_FILE)  # last: it says that the folder is complete
    print_results(results, as_json=arguments.json, baseline=arguments.baseline)
    if arguments.output_dir is not None and not arguments.json:
        print_note(f"saved {RESULTS_FILE}, tables and figure to {arguments.output_dir}")
    return 0


def print_results(results: Results, *, as_json: bool, baseline: int = 0) -> None:
    """Print the table of scores and, of the differences between rows, those of means and those that are not noise."""
    from loopformers.evaluation.task_tables import difference_table, differences, score_table

    found = differences(results, baseline=baseline)
    if as_json:
        shown = difference_table(found).to_dict()
        print_json({"scores": score_table(results, as_text=False).to_dict(), "differences": shown})
        return
    print_table(score_table(results))
    if found:
        print_table(difference_table([d for d in found if d.task == "mean" or not d.is_noise]))


def save_tables(results: Results, folder: Path, *, baseline: int = 0) -> None:
    """Write table.md, table.tex, table.csv, table.json, and, with several budgets or models, accuracy.svg."""
    from loopformers.evaluation.task_tables import difference_table, differences, plot_accuracy, score_table
    from loopformers.files import write_whole
    from loopformers.report.plots import save_figure

    shown, numbers = score_table(results), score_table(results, as_text=False)
    found = difference_table(differences(results, baseline=baseline))
    parts = [shown.to_markdown()] + ([found.to_markdown()] if found.rows else [])
    write_whole(folder / "table.md", "\n\n".join(parts) + "\n")
    write_whole(folder / "table.tex", shown.to_latex() + "\n")
    write_whole(folder / "table.csv", numbers.to_csv())
    content = {"scores": numbers.to_dict(), "differences": found.to_dict()}
    write_whole(folder / "table.json", json_text(content))
    try:
        figure = plot_accuracy(results)
    except ConfigError:  # no model has every task yet
        return
    save_figure(figure, folder / "accuracy.svg")
