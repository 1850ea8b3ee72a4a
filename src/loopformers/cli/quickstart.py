"""`loopformers quickstart`: train three looped systems side by side and see what becomes of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.cli.console import INTERRUPTED, print_heading, print_json, print_note, print_table, stderr
from loopformers.cli.parser import count, seed
from loopformers.cli.paths import path_object
from loopformers.cli.progress import Bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from loopformers.studies.quickstart import QuickstartOutcome
    from loopformers.studies.workers import TaskEvent

__all__ = ["add_arguments", "run"]

DEFAULT_OUTPUT_DIR = Path("runs/quickstart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Train a plain looped transformer (lt), a fully looped one (flt) and an elastic one (elastic-flt) on the bundled\n"
        "corpus. Ends with which of them trained, perplexity by number of loops, text at several budgets, an HTML page\n"
        "with pictures, and a folder a model that from_pretrained opens. At most 8 minutes on two CPU cores.\n\n"
        "Ctrl-C leaves a run that the same command continues; trained systems are kept."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers quickstart\n"
        "  loopformers quickstart --output-dir runs/second --seed 1\n"
        "  loopformers quickstart --output-dir runs/check --fast --json"
    )
    parser.add_argument(
        "--output-dir",
        type=path_object,
        default=DEFAULT_OUTPUT_DIR,
        metavar="DIR",
        help="folder of the run (%(default)s)",
    )
    parser.add_argument(
        "--fast", action="store_true", help="a check: smaller models and fewer steps, in under 90 seconds"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed for weights, data order and trajectories (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=count(), default=2, help="systems trained at the same time, one core each (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, 1 when a system failed, or 130 after Ctrl-C.
    """
    from loopformers.studies.quickstart import QuickstartSettings, run_quickstart

    settings = (QuickstartSettings.fast if arguments.fast else QuickstartSettings)(seed=arguments.seed)
    with ProgressBars(stderr(), settings.num_steps) as bars:
        try:
            outcome = run_quickstart(settings, arguments.output_dir, jobs=arguments.jobs, on_event=bars.on_event)
        except KeyboardInterrupt:
            bars.stop()
            print_note("Interrupted. The same command continues the run where it stopped.")
            return INTERRUPTED
    if arguments.json:
        print_json(outcome.to_json())
    else:
        show(outcome)
    for failure in outcome.failures:
        print_note(f"{failure.details}\n{failure.task} failed: {failure.error}")
    return 1 if outcome.failures else 0


def show(outcome: QuickstartOutcome) -> None:
    """Print the tables, the samples and what was seen."""
    from loopformers.studies.quickstart_report import budget_table, sample_table, systems_table

    if not outcome.results:
        return
    for table in (systems_table(outcome.results), budget_table(outcome.results), sample_table(outcome.results)):
        if table is not None:
            print_table(table)
    print_heading(outcome.summary)
    print_note(f"report: {outcome.report}\nmodels: {outcome.output_dir}/<system>")


class ProgressBars(Bars):
    """One bar a system, on a terminal; elsewhere a line at the start and the end of each.

    Args:
        console: Where to draw.
        num_steps: Length of each bar.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        super().__init__(console, width=12)
        self.num_steps = num_steps
        self.bars: dict[str, TaskID] = {}

    def on_event(self, event: TaskEvent) -> None:
        """Show an event of `run_tasks`."""
        from loopformers.studies.workers import Failed, Finished, Reported, Started, Stopping

        match event:
            case Started(task):
                self.bars[task] = self.progress.add_task(task, total=self.num_steps, status="loading")
                self._say_elsewhere(f"{task}: started")
            case Reported(task, value):
                self._update(task, completed=value.step, status=status_of(value, self.num_steps))
            case Finished(task):
                self._update(task, completed=self.num_steps, status="done")
                self._say_elsewhere(f"{task}: done")
            case Failed(task, error):
                self._update(task, status="failed")
                self._say_elsewhere(f"{task}: failed: {error}")
            case Stopping():
                self.say_stopping(event)

    def _update(self, task: str, **fields: Any) -> None:
        if task in self.bars:
            self.progress.update(self.bars[task], **fields)

    def _say_elsewhere(self, text: str) -> None:
        if not self.console.is_terminal:
            self.say(text)


def status_of(progress: Any, num_steps: int) -> str:
    """Say what stands beside a bar."""
    if progress.step >= num_steps:
        return "evaluating"
    return f"loss {progress.loss:6.3f}   gradient norm {progress.gradient_norm:7.3f}"
