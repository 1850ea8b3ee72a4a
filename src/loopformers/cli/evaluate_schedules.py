"""`loopformers evaluate schedules`: which step sizes serve a budget best."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.cli.budgets import check_finite
from loopformers.cli.console import json_text, print_heading, print_json, print_note, print_table
from loopformers.cli.parser import count, seed
from loopformers.cli.paths import path, path_object
from loopformers.cli.progress import progress_bar
from loopformers.cli.results_folder import results_folder, save_result
from loopformers.cli.text import add_text_arguments, read_scored_text
from loopformers.folders import owned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from loopformers.evaluation.schedules import ScheduleScore, ScheduleSearch
    from loopformers.laws import Law
    from loopformers.model.config import LoopConfig
    from loopformers.report.tables import Table

__all__ = ["add_arguments", "run"]

RESULTS = ("schedules.json", "schedules.csv", "schedules.svg")

NUM_SHOWN = 10
"""Schedules that the table shows beside those of a name, and the last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Score every schedule of a budget: all ways of cutting time into M steps on the grid of the trained T, or a sample of\n"
        "them, ranked by loss and by accuracy. Where training drew schedules, each stands beside the probability that it was\n"
        "drawn: one that was never drawn is not bad for its shape alone. --save makes the best one what `generate` runs."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers evaluate schedules runs/quickstart/elastic-flt --budget 4\n"
        "  loopformers evaluate schedules runs/mine --budget 3 --data texts --split-by tail --rank-by accuracy --save"
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="folder of a checkpoint")
    parser.add_argument("--budget", type=count(), required=True, metavar="M", help="loops of each schedule")
    add_text_arguments(parser)
    parser.add_argument(
        "--limit",
        type=count(),
        default=256,
        metavar="N",
        help="maximum number of schedules to score; more are sampled (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the sample (default: %(default)s)")
    parser.add_argument(
        "--rank-by",
        choices=("loss", "accuracy"),
        default="loss",
        help="what the best is best in (default: %(default)s)",
    )
    parser.add_argument(
        "--save", action="store_true", help="make the best one the default run of the checkpoint's `generate`"
    )
    parser.add_argument(
        "--output-dir",
        type=path_object,
        metavar="DIR",
        help=f"write {', '.join(RESULTS)} there (default: the table alone)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with results_folder(arguments.output_dir, RESULTS):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from loopformers.cli.checkpoint import load_config, load_model
    from loopformers.evaluation.schedules import check_searchable, search_schedules

    config = load_config(arguments.model)
    check_searchable(config, arguments.budget)
    law = trained_law(arguments.model, config)
    text = read_scored_text(arguments, {arguments.model: config})[arguments.model]
    model = load_model(arguments.model)
    with progress_bar("scoring schedules", len(text.windows)) as advance:
        search = search_schedules(
            model,
            text.windows,
            arguments.budget,
            law=law,
            limit=arguments.limit,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            on_batch=advance,
        )
    check_finite(arguments.model, {score.schedule: score.loss for score in search.scores})
    best = search.best if arguments.rank_by == "loss" else search.most_accurate
    result = {
        "model": arguments.model,
        "data": arguments.data,
        "split": arguments.split,
        "seq_len": len(text.windows[0]["input_ids"]),
        "num_windows": len(text.windows),
        "rank_by": arguments.rank_by,
        "best": best.schedule,
        "loss_spread": search.loss_spread,
        "accuracy_spread": search.accuracy_spread,
        **dataclasses.asdict(search),
    }
    table = _table(search, list(search.scores))
    if arguments.output_dir is not None:
        _write(arguments.output_dir, result, table, _figure(search))
    if arguments.json:
        print_json(result)
    else:
        print_table(_table(search, _shown(search, best)))
        print_heading(_summary(search, best, arguments.rank_by))
    if arguments.save:
        _save(arguments.model, best, config)
    return 0


def trained_law(folder: str, config: LoopConfig) -> Law:
    """Return what training drew schedules from: the recipe's in the folder, where there is one, else the model's own."""
    from loopformers.training.recipe import build_law
    from loopformers.training.recipe_file import load
    from loopformers.training.run_folder import RECIPE_FILE

    file = Path(folder) / RECIPE_FILE
    return build_law(load(file), config) if file.exists() else config.law


def _shown(search: ScheduleSearch, best: ScheduleScore) -> list[ScheduleScore]:
    """The first of the ranking, those of a name, the chosen one and the last."""
    top = search.scores[:NUM_SHOWN]
    return [s for s in search.scores if s in top or s.names or s in (best, search.most_accurate, search.scores[-1])]


def _table(search: ScheduleSearch, scores: list[ScheduleScore]) -> Table:
    from loopformers.report.tables import Column, Table

    by_accuracy = sorted((score.accuracy for score in search.scores), reverse=True)
    has_law = any(score.law_probability is not None for score in search.scores)
    columns = (
        Column(key="rank", title="rank", align="right"),
        Column(key="schedule", title="step sizes"),
        Column(key="names", title="name"),
        Column(key="loss", title="loss", unit="nats", align="right", format=".4f"),
        Column(key="behind", title="behind the best", unit="nats", align="right", format=".4f"),
        Column(key="accuracy", title="accuracy", align="right", format=".2%"),
        Column(key="accuracy_rank", title="rank by accuracy", align="right"),
        *([Column(key="drawn", title="drawn in training", align="right", format=".2%")] if has_law else []),
    )
    keys = {column.key for column in columns}
    rows = [
        {
            "rank": search.scores.index(score) + 1,
            "schedule": score.schedule,
            "names": ", ".join(score.names),
            "loss": score.loss,
            "behind": score.loss - search.best.loss,
            "accuracy": score.accuracy,
            "accuracy_rank": by_accuracy.index(score.accuracy) + 1,
            "drawn": score.law_probability,
        }
        for score in scores
    ]
    sampled = "all" if search.seed is None else f"a sample (seed {search.seed}) of"
    return Table(
        title=f"Schedules of {search.num_loops} loops on a grid of 1/{search.grid}",
        columns=columns,
        rows=tuple({key: value for key, value in row.items() if key in keys} for row in rows),
        note=(
            f"{len(search.scores)} scored: {sampled} {search.num_possible}, each on {search.num_targets:,} targets. Training "
            f"drew: {search.law}. The shares are of schedules of {search.num_loops} loops."
        ),
    )


def _summary(search: ScheduleSearch, best: ScheduleScore, rank_by: str) -> str:
    named = "; ".join(f"{name} {search.named(name).loss:.4f}" for name in ("uniform", "coarse-first", "fine-first"))
    drawn = "" if search.law_loss is None else f"; as training drew them {search.law_loss:.4f}"
    return (
        f"best by {rank_by}: {best.schedule} (loss {best.loss:.4f}, accuracy {best.accuracy:.2%}); {named}{drawn}; spread "
        f"{search.loss_spread:.4f} nats, {search.accuracy_spread:.2%} accuracy"
    )


def _figure(search: ScheduleSearch) -> Figure:
    from loopformers.report.plots import Curve, plot_points

    scores = search.scores
    named = [(name, search.named(name)) for name in ("uniform", "coarse-first", "fine-first")]
    marks = [*named, ("lowest loss", search.best)]
    return plot_points(
        [
            Curve("a schedule", [s.mean_time for s in scores], [s.loss for s in scores]),
            *(Curve(name, [score.mean_time], [score.loss]) for name, score in marks),
        ],
        x_label="mean time at which loops start\n(fine first on the left, coarse first on the right)",
        y_label="loss (nats per token)",
    )


def _save(folder: str, best: ScheduleScore, config: LoopConfig) -> None:
    from loopformers.model.saved_schedule import read_schedule, save_schedule

    before = read_schedule(folder, config)
    with owned(folder):
        file = save_schedule(folder, config.resolve_schedule(schedule=best.schedule), config)
    print_note(f"saved {best.schedule} in {file}" + ("" if before is None else f", in place of {before}"))


def _write(folder: Path, result: dict[str, Any], table: Table, figure: Figure) -> None:
    from loopformers.report.plots import figure_bytes

    files = (json_text(result), table.to_csv(), figure_bytes(figure))
    save_result(folder, RESULTS, dict(zip(RESULTS, files, strict=True)))
    print_note(f"results: {folder}")
