"""`loopformers train`: train the model of a recipe, or continue where it was interrupted."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from loopformers.cli.console import (
    INTERRUPTED,
    print_heading,
    print_json,
    print_note,
    print_table,
    stderr,
    warnings_as_notes,
    write,
)
from loopformers.cli.paths import path
from loopformers.cli.progress import Bars
from loopformers.errors import ConfigError, LoopformersError, shorten
from loopformers.schedule import is_uniform_text

if TYPE_CHECKING:
    from rich.console import Console

    from loopformers.analysis.stability import Stability
    from loopformers.evaluation.budget import BudgetResult
    from loopformers.report.tables import Table
    from loopformers.training.progress import TrainingProgress
    from loopformers.training.recipe import Recipe
    from loopformers.training.run import PreparedRun
    from loopformers.training.run_folder import RunResult

__all__ = ["TAKES_OVERRIDES", "TrainingBar", "add_arguments", "run"]

TAKES_OVERRIDES = True
"""Tells `main` to hand on what the parser does not know, as `arguments.overrides`: fields of the recipe."""

FAILED_ELSEWHERE = 2
"""Exit code of processes other than the first when input is bad: the first says why."""


INTERRUPTED_AT_ONCE = (
    "Interrupted immediately, without a new checkpoint. The same command continues the run from its last checkpoint, or "
    "starts it again if there is none."
)
"""What is said after a second Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "loopformers train --config RECIPE [--SECTION.FIELD VALUE ...] [options]"
    parser.description = (
        "Train the model of a recipe: a YAML file that holds the whole experiment, in the sections model, data, law,\n"
        "optimizer, lr_schedule, training and evaluation. Every field can be overridden by an argument or by an environment\n"
        "variable (LOOPFORMERS_MODEL__NUM_LOOPS=12). --fields lists them all, --print_config shows what a run would use.\n\n"
        "The same command continues an interrupted run. Start it with torchrun or accelerate launch for several processes."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers train --config quickstart-flt\n"
        "  loopformers train --config my.yaml --model.num_loops 12 --training.output_dir runs/deep\n"
        "  loopformers train --config flt-small --model.preset lt --print_config\n"
        "  loopformers train --list --json"
    )
    parser.add_argument(
        "--config",
        type=path,
        action="append",
        default=[],
        metavar="RECIPE",
        help="a recipe's YAML file or the name of a shipped one; may be given several times, later fields win",
    )
    parser.add_argument(
        "--print_config", "--print-config", action="store_true", help="print the recipe with every field, and stop"
    )
    parser.add_argument("--fields", action="store_true", help="list every field, its type and what it means, and stop")
    parser.add_argument("--list", action="store_true", help="list the shipped recipes, and stop")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, or 130 after Ctrl-C.
    """
    from loopformers.training import recipe_file
    from loopformers.training.launcher import check_launcher

    _check_alone(arguments)
    if arguments.list:
        return _list_recipes(as_json=arguments.json)
    if arguments.fields:
        return _list_fields(as_json=arguments.json)
    is_main = check_launcher() == 0
    try:
        configs = recipe_file.default_configs(arguments.config)
        if not configs and not arguments.print_config:
            raise ConfigError(
                "no recipe is given; name one with --config: a YAML file, or a shipped one such as quickstart-flt (--list "
                "shows them)"
            )
        recipe = recipe_file.resolve(configs, arguments.overrides)
        if arguments.print_config:
            _print_recipe(recipe, as_json=arguments.json)
            return 0
        return _train(recipe, as_json=arguments.json)
    except LoopformersError:
        if is_main:
            raise
        return FAILED_ELSEWHERE


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse what a listing would not look at."""
    listings = [flag for flag in ("list", "fields", "print_config") if getattr(arguments, flag)]
    if len(listings) > 1:
        raise ConfigError(f"--{listings[0]} and --{listings[1]} each print something and exit; give only one of them")
    if listings and listings[0] != "print_config" and (given := [*arguments.config, *arguments.overrides]):
        raise ConfigError(f"--{listings[0]} reads no recipe, so {shorten(given[0])} has no effect; leave it out")


def _train(recipe: Recipe, *, as_json: bool) -> int:
    from loopformers.training.run import prepare

    prepared = prepare(recipe)
    if not prepared.is_main_process:
        prepared.train()
        return 0
    finished = prepared.finished()
    if not as_json:
        print_table(summary_table(prepared))
    if finished is not None:
        print_note("This run is complete; these are its results.")
        result = finished
    else:
        steps = prepared.recipe.training.steps
        with TrainingBar(stderr(), steps) as bar, warnings_as_notes(bar.say):
            try:
                result = prepared.train(on_progress=bar.on_progress, on_validation=bar.on_validation)
            except KeyboardInterrupt as stop:
                bar.stop()
                print_note(
                    f"Interrupted: {stop}. The same command continues the run." if str(stop) else INTERRUPTED_AT_ONCE
                )
                return INTERRUPTED
    if as_json:
        print_json({"output_dir": str(prepared.folder), **_as_dict(result)})
        return 0
    print_table(result_table(result))
    print_heading(f"{result.verdict}: {result.reason}")
    print_note(f"model: {prepared.folder}")
    return 0


def _as_dict(result: RunResult) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(result)


# -- tables ----------------------------------------------------------------------------------------------------


def summary_table(run: PreparedRun) -> Table:
    """Return what is about to be trained."""
    from loopformers.data.packing import PackedTokens
    from loopformers.report.tables import Column, Table

    recipe, config, windows = run.recipe, run.config, run.train_windows
    tokens = recipe.training.steps * run.tokens_per_step
    flops = config.training_flops_per_token(seq_len=recipe.seq_len) * tokens
    source = ", ".join(recipe.data.sources) if recipe.task is None else str(recipe.task)
    if isinstance(windows, PackedTokens):
        text = f"{windows.num_tokens:,} tokens, {windows.num_documents:,} documents"
        number, epochs = f"{len(windows):,} windows", f", {tokens / windows.num_tokens:.2f} times the text"
    else:
        text, number, epochs = "streamed" if recipe.task is None else "made as training goes on", "windows", ""
    sizes = f"{config.num_hidden_layers} layers x {config.num_loops} loops, width {config.hidden_size}"
    rows = {
        "model": f"{recipe.model.preset}, {sizes}",
        "parameters": f"{config.num_parameters():,}",
        "objective": config.objective,
        "law": str(run.law),
        "text" if recipe.task is None else "task": f"{source}: {text}",
        "windows": f"{number} of {recipe.seq_len} tokens for training, {len(run.validation_windows):,} to score",
        "update": f"{recipe.training.batch_size} windows, {run.tokens_per_step:,} tokens",
        "training": f"{recipe.training.steps:,} updates, {tokens:,} tokens{epochs}",
        "operations": f"about {flops:.2e} at {config.num_loops} loops",
        "optimizer": str(recipe.optimizer),
        "rates": str(recipe.lr_schedule),
        "precision": recipe.training.precision,
        "processes": str(run.arguments.world_size),
        "fingerprint": recipe.fingerprint(),
        "folder": str(run.folder),
    }
    return Table(
        title="Recipe",
        columns=(Column(key="what", title="what"), Column(key="value", title="value")),
        rows=tuple({"what": what, "value": value} for what, value in rows.items()),
    )


def result_table(result: RunResult) -> Table:
    """Return the scores by budget."""
    from loopformers.report.tables import Column, Table

    levels = tuple(result.budgets[0].get("solved_by_difficulty", ()))
    return Table(
        title="Validation",
        columns=(
            Column(key="num_loops", title="loops", align="right"),
            Column(key="schedule", title="step sizes"),
            Column(key="loss", title="loss", unit="nats per token", align="right", format=".4f"),
            Column(key="perplexity", title="perplexity", align="right", format=",.2f"),
            *(
                (
                    Column(key="solved", title="solved", align="right", format=".3f"),
                    *(Column(key=f"at {k}", title=f"at {k}", align="right", format=".3f") for k in levels),
                )
                if levels
                else (Column(key="bits_per_byte", title="bits per byte", align="right", format=".4f"),)
            ),
            Column(key="mflops", title="forward", unit="MFLOP per token", align="right", format=",.2f"),
        ),
        rows=tuple(
            {
                "num_loops": score["num_loops"],
                "schedule": "uniform" if is_uniform_text(score["schedule"]) else score["schedule"],
                "loss": score["loss"],
                "perplexity": score["perplexity"],
                "mflops": score["flops_per_token"] / 1e6,
                **(
                    {"solved": score["solved"], **{f"at {k}": score["solved_by_difficulty"][k] for k in levels}}
                    if levels
                    else {"bits_per_byte": score["bits_per_byte"]}
                ),
            }
            for score in result.budgets
        ),
        note=(
            f"After {result.steps:,} updates of {result.tokens_seen:,} tokens and {result.training_flops:.2e} operations. "
            f"Token frequencies alone: {result.unigram_loss:.4f} nats."
            + (" Solved: share of questions answered exactly, of all and at each difficulty." if levels else "")
        ),
    )


def _list_recipes(*, as_json: bool) -> int:
    from loopformers.report.tables import Column, Table
    from loopformers.training.recipe_file import RECIPES_DIR, shipped

    about = {}
    for name in shipped():
        first = (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        about[name] = first.removeprefix("#").strip()
    if as_json:
        print_json(about)
        return 0
    columns = (Column(key="name", title="recipe"), Column(key="about", title="what it trains"))
    rows = tuple({"name": name, "about": text} for name, text in about.items())
    print_table(Table(title="Shipped recipes", columns=columns, rows=rows))
    return 0


def _list_fields(*, as_json: bool) -> int:
    from loopformers.report.tables import Column, Table
    from loopformers.training.recipe_file import recipe_fields, type_name

    fields = {key: {"type": type_name(field.type), "help": field.help} for key, field in recipe_fields().items()}
    if as_json:
        print_json(fields)
        return 0
    columns = (
        Column(key="field", title="field"),
        Column(key="type", title="type"),
        Column(key="help", title="what it means"),
    )
    rows = tuple({"field": key, **words} for key, words in fields.items())
    print_table(Table(title="Fields of a recipe", columns=columns, rows=rows))
    return 0


def _print_recipe(recipe: Recipe, *, as_json: bool) -> None:
    from loopformers.training.recipe import to_fields
    from loopformers.training.recipe_file import dump

    if as_json:
        print_json(to_fields(recipe))
    else:
        write(dump(recipe))


# -- progress --------------------------------------------------------------------------------------------------


class TrainingBar(Bars):
    """A bar on a terminal: loss, gradient norm, tokens per second, share of the peak, time left and the verdict so
    far; elsewhere a line for each tenth of the run.

    Args:
        console: Where to draw.
        num_steps: Updates of the run.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        super().__init__(console, time_left=True)
        self.num_steps = num_steps
        self.verdict = ""
        self.started = False
        self.task = self.progress.add_task("training", total=num_steps, status="loading")

    def on_progress(self, progress: TrainingProgress) -> None:
        """Show an update."""
        first, self.started = not self.started, True
        if progress.verdict != self.verdict and progress.verdict is not None:
            self.verdict = progress.verdict
            self.say(f"step {progress.step}/{self.num_steps}   {self.verdict}: {progress.verdict_reason}")
        speed = f"{progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second else ""
        share = f"{progress.mfu:.1%} of peak" if progress.mfu else ""
        parts = [f"loss {progress.loss:.3f}", f"gradient norm {progress.gradient_norm:.3f}", speed, share, self.verdict]
        status = "   ".join(part for part in parts if part)
        self.progress.update(self.task, completed=progress.step, status=status)
        if not self.console.is_terminal and (
            progress.step % max(1, self.num_steps // 10) == 0 or first or progress.step == self.num_steps
        ):
            self.say(f"step {progress.step}/{self.num_steps}   {status}")

    def on_validation(self, step: int, score: BudgetResult, stability: Stability) -> None:
        """Show an evaluation."""
        # Every run starts at the unigram level: before the end that is no collapse yet.
        early = stability.verdict == "collapsed" and step < self.num_steps
        found = "not below unigram level" if early else stability.verdict
        self.say(f"step {step}/{self.num_steps}   validation loss {score.loss:.4f}   {found}")
