"""`loopformers evaluate budget`: what models score at each budget, and what that costs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.cli.budgets import add_budget_arguments, check_finite, parse_budgets
from loopformers.cli.console import json_text, print_json, print_note, print_table
from loopformers.cli.paths import path, path_object
from loopformers.cli.progress import progress_bar
from loopformers.cli.results_folder import results_folder, save_result
from loopformers.cli.text import TASK, add_text_arguments, label_models, read_scored_text
from loopformers.schedule import is_uniform_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from loopformers.evaluation.text import ScoredText
    from loopformers.evaluation.timing import RunTime
    from loopformers.model.config import LoopConfig
    from loopformers.report.tables import Column, Table
    from loopformers.schedule import Schedule

__all__ = ["add_arguments", "run"]

RESULTS = ("budgets.json", "budgets.csv", "budgets.svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Score models at every budget, from one loop to the trained T and beyond it: loss, perplexity, bits per byte and\n"
        "accuracy, beside what a token costs: operations, time, cache. Several models stand side by side, with the operations\n"
        "that trained them where their folders record it. Budgets that share loops are computed in one pass."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers evaluate budget runs/quickstart/elastic-flt\n"
        "  loopformers evaluate budget runs/quickstart/flt runs/quickstart/elastic-flt --output-dir runs/budgets\n"
        "  loopformers evaluate budget runs/mine --data texts --split-by tail --num-loops 1,2,6,12 --no-time --json"
    )
    parser.add_argument("models", nargs="+", type=path, metavar="MODEL", help="folder of a checkpoint")
    add_budget_arguments(parser)
    add_text_arguments(parser)
    parser.add_argument("--no-time", action="store_true", help="measure no times")
    parser.add_argument(
        "--output-dir",
        type=path_object,
        metavar="DIR",
        help=f"write {', '.join(RESULTS)} there (default: the table alone)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    labels = label_models(arguments.models)
    with results_folder(arguments.output_dir, RESULTS):
        return _run(arguments, labels)


def _run(arguments: argparse.Namespace, labels: Mapping[str, str]) -> int:
    from loopformers.cli.checkpoint import load_config

    configs = {folder: load_config(folder) for folder in labels}
    runs = {folder: _runs(arguments, config) for folder, config in configs.items()}
    texts = read_scored_text(arguments, configs)
    models = []
    for folder, label in labels.items():
        record = {"model": label, "folder": folder, **_describe(folder, configs[folder])}
        models.append(record | {"budgets": _score(arguments, folder, label, runs[folder], texts[folder])})
    first = next(iter(texts.values()))
    result = {
        "data": arguments.data,
        "split": arguments.split,
        "seq_len": len(first.windows[0]["input_ids"]),
        "num_windows": len(first.windows),
        "num_threads": _num_threads(),
        "models": models,
    }
    table = _table(result)
    if arguments.output_dir is not None:
        _write(arguments.output_dir, result, table)
    if arguments.json:
        print_json(result)
    else:
        print_table(table)
    return 0


def _num_threads() -> int:
    """Threads that times were measured with."""
    import torch

    return torch.get_num_threads()


def _runs(arguments: argparse.Namespace, config: LoopConfig) -> list[Schedule]:
    """The budgets asked for; by default every one from 1 to T, and two beyond it."""
    if arguments.num_loops is None and not arguments.schedule:
        loops = config.num_loops
        beyond = {loops + (loops + 1) // 2, 2 * loops}
        return [config.resolve_schedule(num_loops=m) for m in (*range(1, loops + 1), *sorted(beyond))]
    return parse_budgets(arguments.num_loops, arguments.schedule, config)


def _describe(folder: str, config: LoopConfig) -> dict[str, Any]:
    """What a model is, and the operations that trained it where its folder records them."""
    from loopformers.evaluation.models import training_flops

    return {
        "parameters": config.num_parameters(),
        "trained_loops": config.num_loops,
        "training_flops": training_flops(folder),
    }


def _score(
    arguments: argparse.Namespace, folder: str, label: str, runs: list[Schedule], text: ScoredText
) -> list[dict[str, Any]]:
    from loopformers.cli.checkpoint import load_model
    from loopformers.evaluation.budget import sweep_budgets
    from loopformers.evaluation.timing import time_runs

    model = load_model(folder)
    with progress_bar(f"{label}: scoring", len(text.windows)) as advance:
        scores = sweep_budgets(
            model,
            text.windows,
            runs,
            batch_size=arguments.batch_size,
            bytes_per_token=text.bytes_per_token,
            on_batch=advance,
        )
    check_finite(label, {score.schedule: score.loss for score in scores})
    times: list[RunTime | None] = [None for _ in runs]
    if not arguments.no_time:
        repeats = 3
        with progress_bar(f"{label}: timing", len(runs) * (repeats + 1)) as advance:
            batch = text.windows[: arguments.batch_size]
            times = [*time_runs(model, runs, batch, repeats=repeats, on_run=lambda: advance(1))]
    return [
        {
            **dataclasses.asdict(score),
            "kv_bytes_per_token": model.config.kv_bytes_per_token(
                score.num_loops, bytes_per_element=model.dtype.itemsize
            ),
            "decode_seconds": None if time is None else time.decode_seconds,
            "tokens_per_second": None if time is None else time.tokens_per_second,
        }
        for score, time in zip(scores, times, strict=True)
    ]


def _table(result: Mapping[str, Any]) -> Table:
    from loopformers.report.tables import Column, Table

    rows = [_row(model, budget) for model in result["models"] for budget in model["budgets"]]
    columns = (
        Column(key="model", title="model"),
        Column(key="num_loops", title="loops", align="right"),
        Column(key="schedule", title="step sizes"),
        Column(key="loss", title="loss", unit="nats", align="right", format=".4f"),
        Column(key="perplexity", title="perplexity", align="right", format=",.2f"),
        Column(key="bits_per_byte", title="bits per byte", align="right", format=".4f"),
        Column(key="accuracy", title="accuracy", align="right", format=".2%"),
        Column(key="solved", title="solved", align="right", format=".2%"),
        *(
            Column(key=f"solved_{level}", title=f"solved at {level}", align="right", format=".2%")
            for level in sorted(
                {key.removeprefix("solved_") for row in rows for key in row if "solved_" in key}, key=int
            )
        ),
        Column(key="mflop_per_token", title="operations", unit="MFLOP/token", align="right", format=",.2f"),
        Column(key="decode_ms", title="decoding", unit="ms/token", align="right", format=",.2f"),
        Column(key="tokens_per_second", title="scoring", unit="tokens/s", align="right", format=",.0f"),
        Column(key="kv_kib_per_token", title="cache", unit="KiB/token", align="right", format=",.2f"),
        Column(key="training_tflop", title="training", unit="TFLOP", align="right", format=",.2f"),
    )
    shown = tuple(column for column in columns if any(row.get(column.key) is not None for row in rows))
    rows = [{column.key: row.get(column.key) for column in shown} for row in rows]
    return Table(
        title="Budgets",
        columns=shown,
        rows=tuple(rows),
        note=" ".join(_notes(result, shown)),
    )


def _notes(result: Mapping[str, Any], shown: Sequence[Column]) -> list[str]:
    keys = {column.key for column in shown}
    trained_at = ", ".join(f"{model['model']} {model['trained_loops']}" for model in result["models"])
    source = result["data"] if result["data"] == TASK else f"{result['data']} ({result['split']})"
    notes = [
        f"{result['num_windows']} windows of {result['seq_len']} tokens of {source}.",
        f"Trained loops: {trained_at}.",
        "Accuracy is of the most likely token.",
    ]
    if "solved" in keys:
        notes.append("A question is solved where all its tokens are right; beside it, by difficulty.")
    if "decode_ms" in keys:
        notes.append(
            f"Times are medians of wall time on this machine with {result['num_threads']} thread(s): decoding with the cache "
            "at batch 1, scoring of whole windows."
        )
    return notes


def _row(model: Mapping[str, Any], budget: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table, in units that are easy to read; None where there is nothing to say."""
    trained, decode = model["training_flops"], budget["decode_seconds"]
    solved = budget["exact_match_by_difficulty"] or {}
    return {
        **budget,
        **{f"solved_{level}": share for level, share in solved.items()},
        "solved": budget["exact_match"] if solved else None,
        "model": model["model"],
        "schedule": None if is_uniform_text(budget["schedule"]) else budget["schedule"],
        "mflop_per_token": budget["flops_per_token"] / 1e6,
        "decode_ms": None if decode is None else decode * 1e3,
        "kv_kib_per_token": budget["kv_bytes_per_token"] / 1024,
        "training_tflop": None if trained is None else trained / 1e12,
    }


def _figure(result: Mapping[str, Any]) -> Figure:
    """Quality against operations. Models may differ in their tokens, so several are compared in bits per byte."""
    from loopformers.report.plots import Curve, plot_budgets

    models = result["models"]
    if models[0]["budgets"][0]["exact_match_by_difficulty"] is not None:
        key, y_label = "exact_match", "questions solved"
    elif len(models) == 1:
        key, y_label = "perplexity", "perplexity"
    else:
        key, y_label = "bits_per_byte", "bits per byte"
    curves, trained = [], {}
    for model in models:
        budgets = sorted(model["budgets"], key=lambda budget: budget["flops_per_token"])
        curves.append(Curve(model["model"], [b["flops_per_token"] / 1e6 for b in budgets], [b[key] for b in budgets]))
        uniform = [b for b in budgets if b["num_loops"] == model["trained_loops"]]
        if uniform:
            trained[model["model"]] = uniform[0]["flops_per_token"] / 1e6
    return plot_budgets(
        curves,
        y_label=y_label,
        x_label="operations (MFLOP per token)",
        log_y=key != "exact_match",
        trained_loops=trained,
    )


def _write(folder: Path, result: Mapping[str, Any], table: Table) -> None:
    from loopformers.report.plots import figure_bytes

    files = (json_text(result), table.to_csv(), figure_bytes(_figure(result)))
    save_result(folder, RESULTS, dict(zip(RESULTS, files, strict=True)))
    print_note(f"results: {folder}")
