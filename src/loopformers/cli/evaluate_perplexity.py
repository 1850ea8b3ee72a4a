"""`loopformers evaluate perplexity`: one text, read once, by strided windows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loopformers.cli.budgets import add_budget_arguments, check_finite, parse_budgets
from loopformers.cli.console import print_json, print_table
from loopformers.cli.parser import count
from loopformers.cli.paths import path
from loopformers.cli.progress import progress_bar
from loopformers.cli.text import label_models
from loopformers.errors import ConfigError
from loopformers.schedule import is_uniform_text

if TYPE_CHECKING:
    from loopformers.report.tables import Table

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Measure perplexity by the standard protocol: the text is one stream of tokens, cut into overlapping windows, and every\n"
        "token but the first is predicted once. Per token and per byte, for our models at any budget and for other causal\n"
        "language models of transformers."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers evaluate perplexity runs/quickstart/elastic-flt --data bundled --num-loops 1,4,12\n"
        "  loopformers evaluate perplexity runs/mine another/model --data book.txt --context 512 --stride 256 --json"
    )
    parser.add_argument(
        "models",
        nargs="+",
        type=path,
        metavar="MODEL",
        help="folder of a checkpoint, ours or another's, or a .gguf file",
    )
    add_budget_arguments(parser)
    parser.add_argument(
        "--data",
        type=path,
        default="wikitext-2",
        metavar="SOURCE",
        help="raw wikitext-2 (its test split), a text file, a Parquet file, bundled, a folder, or a datasets name "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--split", help="of a source that is no file: train, validation, test, or all (default: test; of a folder all)"
    )
    parser.add_argument(
        "--context", type=count(), metavar="N", help="tokens in a window (default: the model's max_position_embeddings)"
    )
    parser.add_argument("--stride", type=count(), metavar="N", help="tokens scored in each (default: half the context)")
    parser.add_argument(
        "--batch-size", type=count(), default=1, metavar="B", help="windows at a time (default: %(default)s)"
    )
    parser.add_argument("--tokenizer", type=path, metavar="DIR", help="folder of the tokenizer (default: MODEL)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    labels = label_models(arguments.models)
    from loopformers.evaluation.perplexity import read_stream

    stream = read_stream(arguments.data, arguments.split)
    models = [
        {"model": label, "folder": folder, **_score(arguments, folder, label, stream.text)}
        for folder, label in labels.items()
    ]
    result = {
        "data": stream.source,
        "split": arguments.split,
        "text_sha256": stream.digest,
        "text_bytes": len(stream.text.encode()),
        "models": models,
    }
    if arguments.json:
        print_json(result)
    else:
        print_table(_table(result))
    return 0


def _score(arguments: argparse.Namespace, folder: str, label: str, text: str) -> dict[str, Any]:
    from loopformers.evaluation.models import is_looped, load_any_model
    from loopformers.evaluation.perplexity import (
        context_length,
        evaluate_perplexity,
        strided_windows,
        tokenize_stream,
    )

    model, tokenizer = load_any_model(folder, tokenizer=arguments.tokenizer)
    runs = None
    if is_looped(model):
        runs = parse_budgets(arguments.num_loops, arguments.schedule, model.config)
    elif (arguments.num_loops or arguments.schedule) and len(arguments.models) == 1:
        raise ConfigError(f"{folder} has no loops, so one budget; leave --num-loops and --schedule out")
    context = context_length(model, arguments.context)
    stride = max(1, context // 2) if arguments.stride is None else arguments.stride
    ids, num_bytes = tokenize_stream(text, tokenizer)
    windows = strided_windows(ids, context=context, stride=stride, start_token=tokenizer.bos_token_id)
    with progress_bar(label, len(windows)) as advance:
        results = evaluate_perplexity(
            model, windows, num_bytes, runs=runs, batch_size=arguments.batch_size, on_batch=advance
        )
    check_finite(label, {result.schedule or "its only run": result.loss for result in results})
    return {
        "context": context,
        "stride": stride,
        "num_tokens": len(ids),
        "parameters": model.num_parameters(),
        "budgets": [dataclasses.asdict(result) for result in results],
    }


def _table(result: Mapping[str, Any]) -> Table:
    from loopformers.report.tables import Column, Table

    rows = [
        {
            "model": model["model"],
            "num_loops": budget["num_loops"],
            "schedule": None if is_uniform_text(budget["schedule"] or "") else budget["schedule"],
            **{
                key: budget[key]
                for key in ("loss", "token_perplexity", "byte_perplexity", "bits_per_byte", "num_targets")
            },
            "mflop_per_token": None if budget["flops_per_token"] is None else budget["flops_per_token"] / 1e6,
        }
        for model in result["models"]
        for budget in model["budgets"]
    ]
    columns = (
        Column(key="model", title="model"),
        Column(key="num_loops", title="loops", align="right"),
        Column(key="schedule", title="step sizes"),
        Column(key="loss", title="loss", unit="nats per token", align="right", format=".4f"),
        Column(key="token_perplexity", title="perplexity", unit="per token", align="right", format=",.2f"),
        Column(key="byte_perplexity", title="perplexity", unit="per byte", align="right", format=",.4f"),
        Column(key="bits_per_byte", title="bits per byte", align="right", format=".4f"),
        Column(key="num_targets", title="targets", align="right", format=",d"),
        Column(key="mflop_per_token", title="operations", unit="MFLOP/token", align="right", format=",.2f"),
    )
    shown = tuple(column for column in columns if any(row[column.key] is not None for row in rows))
    windows = sorted({(model["context"], model["stride"]) for model in result["models"]})
    return Table(
        title=f"Perplexity of {result['data']}",
        columns=shown,
        rows=tuple({column.key: row[column.key] for column in shown} for row in rows),
        note=(
            f"{result['text_bytes']:,} bytes (SHA-256 {result['text_sha256']}) as one stream; windows of "
            + ", ".join(f"{context:,} tokens every {stride:,}" for context, stride in windows)
            + ". Perplexities per token compare models of one tokenizer alone."
        ),
    )
