"""Which schedules win, and is it the sampler that decides? Ranks those of a study's models, seed by seed.

    loopformers study elastic --output-dir runs/study/elastic
    python examples/schedules_by_sampler.py runs/study/elastic --budgets 3 4 6 --json schedules.json

For every system that knows its time: its loss with uniform steps, what coarse-first and fine-first cost over that, the
best schedule and the spread of all of them, and how the loss goes with where in time the steps lie. Medians over seeds,
with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from loopformers import LoopedForCausalLM
from loopformers.evaluation.schedules import ScheduleSearch, search_schedules
from loopformers.evaluation.text import read_documents, read_windows
from loopformers.studies.results import ResultsFile

MEASURES = ("uniform", "coarse-first", "fine-first", "best", "spread", "correlation")


def main(argv: list[str] | None = None) -> None:
    """Search the schedules of each model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="STUDY", help="folder of a study of text")
    parser.add_argument("--systems", nargs="+", help="default: all that know their time")
    parser.add_argument("--budgets", nargs="+", type=int, default=[3, 4, 6], help="default: 3 4 6")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=128, help="schedules of a budget at most (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every schedule's score there")
    arguments = parser.parse_args(argv)

    found: dict[tuple[str, int], dict[int, ScheduleSearch]] = {}
    results = ResultsFile(arguments.study).read().results.values()
    for result in track([r for r in results if r.status == "finished"], "models", transient=True):
        system, seed = str(result.axes["system"]), int(str(result.axes["seed"]))
        if arguments.systems and system not in arguments.systems:
            continue
        folder = arguments.study / "cells" / result.cell
        model = LoopedForCausalLM.from_pretrained(folder).eval()
        if not model.config.understands_time:
            continue
        windows = read_windows(
            read_documents("bundled", "validation"),
            AutoTokenizer.from_pretrained(folder),
            seq_len=model.config.max_position_embeddings,
            num_windows=arguments.windows,
        ).windows
        for budget in (m for m in arguments.budgets if m <= model.config.num_loops):
            search = search_schedules(model, windows, budget, limit=arguments.limit, batch_size=16)
            found.setdefault((system, budget), {})[seed] = search

    table = Table("system", "M", "seeds", *MEASURES, "drawn in training", title="Nats per token")
    for (system, budget), searches in found.items():
        measured = [measures(search) for search in searches.values()]
        cells = [spread([m[name] for m in measured], signed=name in MEASURES[1:4]) for name in MEASURES]
        table.add_row(system, str(budget), str(len(searches)), *cells, next(iter(searches.values())).law)
    Console(width=200).print(table)
    if arguments.json:
        rows = [
            {"system": system, "budget": budget, "seed": seed, **measures(search), "scores": scores(search)}
            for (system, budget), searches in found.items()
            for seed, search in searches.items()
        ]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measures(search: ScheduleSearch) -> dict[str, float]:
    """Return the loss of uniform steps, differences to it, the spread, and the correlation of loss and mean time."""
    uniform = search.named("uniform").loss
    times, losses = [score.mean_time for score in search.scores], [score.loss for score in search.scores]
    return {
        "uniform": uniform,
        "coarse-first": search.named("coarse-first").loss - uniform,
        "fine-first": search.named("fine-first").loss - uniform,
        "best": search.best.loss - uniform,
        "spread": search.loss_spread,
        "correlation": statistics.correlation(times, losses) if min(len(set(times)), len(set(losses))) > 1 else 0.0,
    }


def scores(search: ScheduleSearch) -> list[dict[str, Any]]:
    """Return every schedule's loss and how often training drew it."""
    return [
        {"schedule": s.schedule, "loss": s.loss, "accuracy": s.accuracy, "drawn": s.law_probability}
        for s in search.scores
    ]


def spread(values: list[float], *, signed: bool) -> str:
    """Return median and range."""
    form = "+.3f" if signed else ".3f"
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
