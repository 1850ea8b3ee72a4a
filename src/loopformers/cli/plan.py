"""`loopformers plan`: what a recipe will cost, before it runs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopformers.cli.console import print_json, print_note, print_table
from loopformers.cli.parser import count, number
from loopformers.cli.paths import path
from loopformers.errors import ConfigError

if TYPE_CHECKING:
    from loopformers.report.tables import Table
    from loopformers.training.planner import Plan
    from loopformers.training.recipe import Recipe

__all__ = ["TAKES_OVERRIDES", "add_arguments", "run"]

TAKES_OVERRIDES = True
"""Tells `main` to hand on what the parser does not know: recipes and fields of them."""

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "loopformers plan RECIPE [--SECTION.FIELD VALUE ...] [options]"
    parser.description = (
        "Show what a recipe will cost, before it runs: parameters, operations of a step, memory by number of loops and\n"
        "checkpoint mode, cache bytes, and the time that it will take on this machine, from a step of this very model that is\n"
        "timed here (some seconds), or from a speed that you state. Recipes and fields as for `loopformers train`."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers plan quickstart-flt\n"
        "  loopformers plan my.yaml --model.num_loops 12 --training.activation_checkpointing true\n"
        "  loopformers plan flt-small --processes 8 --training.gradient_accumulation 8 --device cuda --no-time\n"
        "  loopformers plan loopformer-3x8 --peak-tflops 989 --efficiency 0.4 --json"
    )
    parser.add_argument(
        "--config",
        type=path,
        action="append",
        default=[],
        metavar="RECIPE",
        help="a recipe, as for `train`; the same as RECIPE",
    )
    parser.add_argument(
        "--processes", type=count(), metavar="N", help="processes, one device each (default: the launcher's, else 1)"
    )
    parser.add_argument(
        "--efficiency",
        type=number(at_least=1e-6, at_most=1),
        metavar="SHARE",
        help="state the share of the peak that a step reaches; times no step",
    )
    parser.add_argument(
        "--peak-tflops",
        type=number(at_least=1e-6, at_most=1e9),
        metavar="N",
        help="state the peak of another device in 10^12 operations a second; needs --efficiency",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to plan the memory of (default: what this machine would train on)",
    )
    parser.add_argument("--no-time", action="store_true", help="expect no times and measure nothing")
    parser.add_argument("--no-data", action="store_true", help="do not count the tokens of the text")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    _check(arguments)
    from loopformers.training.launcher import check_launcher

    check_launcher()
    recipes, fields = split_arguments(arguments.overrides)
    from loopformers.training import recipe_file

    configs = recipe_file.default_configs([*recipes, *arguments.config])
    if not configs and not fields:
        raise ConfigError(
            "no recipe to plan; give a YAML file or a shipped recipe's name, such as quickstart-flt (`loopformers train --list` "
            "shows them)"
        )
    from loopformers.training.planner import TextCount, count_text, make_plan, plan_config

    recipe = recipe_file.resolve(configs, fields)
    options = {"num_processes": arguments.processes, "config": plan_config(recipe), "device_type": arguments.device}
    make_plan(recipe, **options)  # every rule is checked before anything is read or timed
    text = TextCount(tokens=None, reason="not asked for") if arguments.no_data else count_text(recipe)
    plan = make_plan(recipe, text=text, calibration=_calibration(arguments, recipe), **options)
    if arguments.json:
        print_json({"recipe": configs, "fingerprint": recipe.fingerprint(), **dataclasses.asdict(plan)})
        return 0
    for table in _tables(plan, recipe):
        print_table(table)
    return 0


def split_arguments(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell recipes from `--section.field value` and `--section.field=value`, in any order."""
    recipes, fields, left = [], [], list(rest)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            recipes.append(word)
            continue
        fields.append(word)
        if "=" not in word and left and not left[0].startswith("--"):
            fields.append(left.pop(0))
    return recipes, fields


def _check(arguments: argparse.Namespace) -> None:
    if arguments.peak_tflops is not None and arguments.efficiency is None:
        raise ConfigError(
            f"--peak-tflops {arguments.peak_tflops} alone says nothing about how much of it a step reaches; add --efficiency, "
            "such as 0.4"
        )
    if arguments.no_time and (arguments.efficiency is not None or arguments.peak_tflops is not None):
        raise ConfigError("--no-time expects no times, and --efficiency states a speed; give one of the two")


def _calibration(arguments: argparse.Namespace, recipe: Recipe) -> Any:
    from loopformers.training.calibration import calibrate, device_of, stated

    if arguments.no_time:
        return None
    if arguments.efficiency is None:
        if arguments.device not in (None, device_of().type):
            raise ConfigError(
                f"--device {arguments.device} is not what this machine would train on ({device_of().type}), so no step can be "
                "timed; state its speed with --efficiency and --peak-tflops, or give --no-time"
            )
        if not arguments.json:
            print_note("Timing a step of this model ..")
        return calibrate
    peak = None if arguments.peak_tflops is None else arguments.peak_tflops * 1e12
    return stated(peak, arguments.efficiency, precision=recipe.training.precision)


# -- tables ----------------------------------------------------------------------------------------------------


def _tables(plan: Plan, recipe: Recipe) -> list[Table]:
    tables = [
        _parameter_table(plan),
        _flops_table(plan),
        _memory_table(plan, recipe),
        _mode_table(plan),
        _cache_table(plan),
    ]
    return [*tables, _run_table(plan)]


def _parameter_table(plan: Plan) -> Table:
    from loopformers.report.tables import Column, Table

    total = plan.parameters["total"]
    return Table(
        title=f"Parameters of {plan.preset}, {plan.num_loops} loops",
        columns=(
            Column(key="part", title="part"),
            Column(key="count", title="parameters", align="right", format=",d"),
            Column(key="share", title="share", align="right", format=".1%"),
        ),
        rows=tuple(
            {"part": part, "count": count, "share": count / total} for part, count in plan.parameters.items() if count
        ),
    )


def _flops_table(plan: Plan) -> Table:
    from loopformers.report.tables import Column, Table

    flops = plan.flops
    rows = {
        "model: forward and backward, every loop and trajectory": flops.model,
        "loops run again": flops.recomputed_loops,
        "logits made again": flops.recomputed_logits,
        "attention scores made again": flops.attention,
        "loops without gradient": flops.truncated,
        "update": flops.update,
        "executed": flops.executed,
    }
    return Table(
        title="Operations of a step",
        columns=(
            Column(key="what", title="what"),
            Column(key="flops", title="operations", unit="GFLOP", align="right", format=",.3f"),
            Column(key="share", title="share", align="right", format=".1%"),
        ),
        rows=tuple(
            {"what": what, "flops": value / 1e9, "share": value / flops.executed}
            for what, value in rows.items()
            if value
        ),
        note=(
            f"{plan.num_processes} process(es) x {plan.microbatches} microbatch(es) x {plan.microbatch.windows} windows of "
            f"{plan.microbatch.seq_len:,} tokens; {flops.model_per_token / 1e6:,.2f} MFLOP a token. The run: {flops.run:.3e}."
        ),
    )


def _memory_table(plan: Plan, recipe: Recipe) -> Table:
    from loopformers.report.tables import Column, Table

    memory, mode = plan.memory, plan.microbatch.mode
    optimizer = type(recipe.optimizer).__name__
    chunk = plan.microbatch.loss_chunk_tokens
    rows = {
        "weights": memory.weights,
        "weights in bfloat16, cast by autocast": memory.autocast_weights,
        "gradients": memory.gradients,
        "gradient buckets of several processes": memory.gradient_buckets,
        f"optimiser state ({optimizer})": memory.optimizer_state,
        f"saved activations (checkpointing: {mode})": memory.saved_activations,
        "one loop, run again": memory.recomputed_loop,
        f"saved by the loss ({'whole logits' if chunk is None else f'chunks of {chunk:,} tokens'})": memory.saved_logits,
        f"peak of a step, at its {memory.peak_at}": memory.peak,
    }
    trajectories = " and ".join(str(loops) for loops in plan.deepest if loops)
    return Table(
        title="Memory of one process",
        columns=(
            Column(key="what", title="what"),
            Column(key="bytes", title="memory", unit="MiB", align="right", format=",.2f"),
        ),
        rows=tuple({"what": what, "bytes": value / MIB} for what, value in rows.items() if value),
        note=(
            f"For {plan.microbatch.windows} windows at the deepest draw, {trajectories} loops. The peak is no sum: not all of it "
            "stands at the same moment. Python, libraries and the allocator's own reserve are not in it."
        ),
    )


def _mode_table(plan: Plan) -> Table:
    from loopformers.report.tables import Column, Table

    return Table(
        title="Memory and time by loops and checkpoint mode",
        columns=(
            Column(key="mark", title=""),
            Column(key="num_loops", title="loops", align="right"),
            Column(key="mode", title="checkpointing"),
            Column(key="activations", title="saved activations", unit="MiB", align="right", format=",.2f"),
            Column(key="whole", title="logits, whole", unit="MiB", align="right", format=",.2f"),
            Column(key="chunked", title="logits, chunked", unit="MiB", align="right", format=",.2f"),
            Column(key="peak", title="peak", unit="MiB", align="right", format=",.2f"),
            Column(key="time", title="time", unit="relative", align="right", format=".2f"),
        ),
        rows=tuple(
            {
                "mark": ">" if row.is_recipe else "",
                "num_loops": row.num_loops,
                "mode": row.mode,
                "activations": row.saved_activations / MIB,
                "whole": row.whole_logits / MIB,
                "chunked": row.chunked_logits / MIB,
                "peak": row.peak / MIB,
                "time": row.relative_time,
            }
            for row in plan.modes
        ),
        note=(
            f"> marks the recipe. Chunks of {plan.chunk_tokens:,} tokens; the peak is with the recipe's own loss. Time is "
            "operations of forward and backward pass; short trajectories are taken at their longest."
        ),
    )


def _cache_table(plan: Plan) -> Table:
    from loopformers.report.tables import Column, Table

    return Table(
        title="Cache of one sequence",
        columns=(
            Column(key="num_loops", title="loops", align="right"),
            Column(key="token", title="a token", unit="KiB", align="right", format=",.2f"),
            Column(
                key="sequence", title=f"{plan.microbatch.seq_len:,} tokens", unit="MiB", align="right", format=",.2f"
            ),
        ),
        rows=tuple(
            {"num_loops": row.num_loops, "token": row.bytes_per_token / 1024, "sequence": row.bytes_per_sequence / MIB}
            for row in plan.cache
        ),
        note="bfloat16.",
    )


def _run_table(plan: Plan) -> Table:
    from loopformers.report.tables import Column, Table

    epochs = (
        f"unknown: {plan.text.reason}" if plan.epochs is None else f"{plan.epochs:.3g} of {plan.text.tokens:,} tokens"
    )
    rows = {
        "steps": f"{plan.steps:,}",
        "tokens of a step": f"{plan.tokens_per_step:,}",
        "tokens of the run": f"{plan.tokens:,}",
        "epochs of the text": epochs,
    }
    note = ""
    if plan.time is not None:
        time, speed = plan.time, plan.time.calibration
        rows |= {
            "time of a step": _duration(time.step_seconds),
            "time of the run": _duration(time.run_seconds),
            "tokens a second": f"{time.tokens_per_second:,.0f}",
            "MFU": f"{time.mfu:.1%}",
        }
        timed = (
            f"a step of {speed.windows} windows of {speed.seq_len:,} tokens was timed" if speed.windows else "as stated"
        )
        note = (
            f"{speed.device}: peak {speed.peak_flops / 1e12:,.3f} TFLOP/s, of which a step reaches {speed.efficiency:.1%} "
            f"({timed}). Without evaluation, checkpoints, loading and the exchange between processes."
        )
    return Table(
        title="The run",
        columns=(Column(key="what", title="what"), Column(key="value", title="value")),
        rows=tuple({"what": what, "value": value} for what, value in rows.items()),
        note=note,
    )


def _duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for limit, unit, size in ((1, "ms", 1e-3), (120, "s", 1), (7200, "minutes", 60), (172_800, "hours", 3600)):
        if seconds < limit:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds / 86_400:,.3g} days"
