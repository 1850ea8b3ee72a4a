"""`loopformers analyze`: what loops do to states, of one model or of two side by side."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from loopformers.cli.budgets import add_budget_arguments, parse_budgets
from loopformers.cli.console import json_text, print_heading, print_json, print_note, print_table
from loopformers.cli.paths import path, path_object
from loopformers.cli.progress import progress_bar
from loopformers.cli.results_folder import check_absent, results_folder, save_result
from loopformers.cli.text import add_text_arguments, label_models, read_scored_text
from loopformers.errors import ConfigError

__all__ = ["add_arguments", "run"]

MOST_MODELS = 2
"""More would not be legible side by side."""

REPORT, RESULT = "report.html", "analysis.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Measure every loop of a model over text: state norm, relative change, cosine of successive updates, linear CKA\n"
        "between loops, anisotropy, curvature, prompt entropy, loss read from each loop, depth that tokens need, and their\n"
        "way through the plane of most movement. Two models are drawn on the same axes."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers analyze runs/quickstart/elastic-flt --output-dir runs/analysis\n"
        "  loopformers analyze runs/loopformer runs/base-loop-exit --num-loops 8,4 --json"
    )
    parser.add_argument("models", nargs="+", type=path, metavar="MODEL", help="folder of a checkpoint; at most two")
    add_budget_arguments(parser)
    add_text_arguments(parser)
    parser.add_argument(
        "--output-dir",
        type=path_object,
        metavar="DIR",
        help=f"write {REPORT}, its pictures as PNG, and {RESULT} there (default: tables alone)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if len(arguments.models) > MOST_MODELS:
        raise ConfigError(
            f"{len(arguments.models)} models are more than the {MOST_MODELS} that stand side by side; give fewer"
        )
    labels = label_models(arguments.models)
    with results_folder(arguments.output_dir, (RESULT,)):
        return _run(arguments, labels)


def _run(arguments: argparse.Namespace, labels: Mapping[str, str]) -> int:
    from loopformers.cli.checkpoint import load_config, load_model

    configs = {folder: load_config(folder) for folder in labels}
    runs = {f: parse_budgets(arguments.num_loops, arguments.schedule, config) for f, config in configs.items()}
    texts = read_scored_text(arguments, configs)
    tokenizer = _tokenizer(arguments)
    if arguments.output_dir is not None:
        from loopformers.studies.analysis_report import picture_names

        check_absent(arguments.output_dir, (REPORT, *picture_names(labels.values())))

    from loopformers.analysis.profile import profile_model

    profiles = {}
    for folder, label in labels.items():
        windows = texts[folder].windows
        with progress_bar(f"{label}: windows", len(windows) * len(runs[folder])) as advance:
            profiles[label] = profile_model(
                load_model(folder),
                windows,
                runs[folder],
                batch_size=arguments.batch_size,
                lens_window=len(windows) // 2,
                on_batch=advance,
            )
    result: dict[str, Any] = {
        "data": arguments.data,
        "split": arguments.split,
        "seq_len": len(windows[0]["input_ids"]),
        "models": {label: dataclasses.asdict(profile) for label, profile in profiles.items()},
    }

    from loopformers import __version__
    from loopformers.studies.analysis_report import analysis_files, loops_table, runs_table, summarise

    if arguments.output_dir is not None:
        files = analysis_files(
            REPORT,
            profiles,
            decode=lambda token_id: str(tokenizer.decode([token_id])),
            source=f"{len(windows)} windows of {result['seq_len']} tokens, spread over {arguments.data} ({arguments.split}).",
            footer=f"loopformers {__version__}: loopformers analyze {' '.join(arguments.models)}",
        )
        save_result(arguments.output_dir, (RESULT,), {**files, RESULT: json_text(result)})
        print_note(f"report: {arguments.output_dir / REPORT}")
    if arguments.json:
        print_json(result)
        return 0
    print_table(runs_table(profiles))
    print_table(loops_table(profiles))
    print_heading(summarise(profiles))
    return 0


def _tokenizer(arguments: argparse.Namespace) -> Any:
    """Return the one tokenizer of all models.

    Raises:
        ConfigError: They have different ones.
    """
    from loopformers.cli.checkpoint import load_tokenizer
    from loopformers.data.packing import DocumentEncoder

    folders = [arguments.tokenizer] if arguments.tokenizer else arguments.models
    tokenizers = [load_tokenizer(folder) for folder in folders]
    if len({DocumentEncoder(tokenizer).fingerprint for tokenizer in tokenizers}) > 1:
        raise ConfigError(
            f"{folders[0]} and {folders[1]} have different tokenizers, and measures over other tokens do not compare; analyse "
            "them one by one"
        )
    return tokenizers[0]
