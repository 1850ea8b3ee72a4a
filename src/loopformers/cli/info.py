"""`loopformers info`: what a model costs, by number of loops, without building it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.cli.budgets import add_budget_arguments, parse_budgets
from loopformers.cli.console import print_json, print_table
from loopformers.cli.parser import count
from loopformers.cli.paths import path
from loopformers.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig
    from loopformers.report.tables import Table

__all__ = ["add_arguments", "describe", "run"]

CACHE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

SHOWN_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_prelude_layers",
    "num_coda_layers",
    "num_loops",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "vocab_size",
    "max_position_embeddings",
    "position_embedding",
    "stream",
    "injection",
    "conditioning",
    "objective",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show parameters by part of the model, and for each run: floating-point operations per token of a forward pass and\n"
        "of a training step, and bytes of the cache per token. Computed from the configuration; no weights are built."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers info flt --num-loops 1,4,12\n"
        "  loopformers info loopformer --set num_hidden_layers=2 --set num_loops=12 --schedule coarse-first:4 --json"
    )
    parser.add_argument(
        "model",
        type=path,
        metavar="MODEL_OR_PRESET",
        help="folder of a checkpoint, or name of a preset such as flt (then ./flt is the folder)",
    )
    add_budget_arguments(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="overrides",
        help="change a field of a preset, such as hidden_size=512; may be given several times",
    )
    parser.add_argument(
        "--seq-len", type=count(), metavar="N", help="context length in tokens (default: max_position_embeddings)"
    )
    parser.add_argument(
        "--cache-dtype", choices=CACHE_BYTES, default="bfloat16", help="precision of the cache (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    config = _config(arguments.model, arguments.overrides)
    seq_len = config.max_position_embeddings if arguments.seq_len is None else arguments.seq_len
    description = describe(
        config,
        arguments.model,
        num_loops=arguments.num_loops,
        schedules=arguments.schedule,
        seq_len=seq_len,
        cache_dtype=arguments.cache_dtype,
    )
    if arguments.json:
        print_json(description)
        return 0
    for table in _tables(description):
        print_table(table)
    return 0


def describe(
    config: LoopConfig,
    name: str,
    *,
    num_loops: str | None,
    schedules: Sequence[str] | None,
    seq_len: int,
    cache_dtype: str,
) -> dict[str, Any]:
    """Return what the command prints: name, fields, parameters by part with their total, and one record a run.

    Raises:
        ConfigError: No tokens, or a run that the model cannot do.
    """
    if seq_len < 1:
        raise ConfigError(f"--seq-len {seq_len} must be at least 1 token")
    runs = [
        {
            "num_loops": schedule.num_loops,
            "schedule": str(schedule),
            "is_uniform": schedule.is_uniform,
            "forward_flops_per_token": config.flops_per_token(schedule=schedule, seq_len=seq_len),
            "training_flops_per_token": config.training_flops_per_token(schedule.num_loops, seq_len=seq_len),
            "kv_bytes_per_token": config.kv_bytes_per_token(
                schedule.num_loops, bytes_per_element=CACHE_BYTES[cache_dtype]
            ),
        }
        for schedule in parse_budgets(num_loops, schedules, config)
    ]
    return {
        "model": name,
        "config": {field: getattr(config, field) for field in SHOWN_FIELDS},
        "parameters": {**config.parameter_groups(), "total": config.num_parameters()},
        "seq_len": seq_len,
        "cache_dtype": cache_dtype,
        "runs": runs,
    }


def _config(model: str, overrides: Sequence[str]) -> LoopConfig:
    from loopformers.cli.checkpoint import load_config
    from loopformers.extensions import load_extensions
    from loopformers.model.config import LoopConfig
    from loopformers.model.presets import PRESETS

    load_extensions()
    if model in PRESETS:
        return LoopConfig.from_preset(model, **dict(map(_override, overrides)))
    if not Path(model).exists():
        raise ConfigError(unknown_name("preset", model, PRESETS) + "; and there is no folder of that name")
    if overrides:
        raise ConfigError(f"--set {overrides[0]}: the sizes of a checkpoint are fixed; --set changes presets alone")
    return load_config(model)


def _override(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    if not separator or not field.strip():
        raise ConfigError(f"--set {text} is no assignment; write FIELD=VALUE, such as hidden_size=512")
    try:
        return field.strip(), json.loads(value)
    except ValueError:
        return field.strip(), value.strip()


def _tables(description: Mapping[str, Any]) -> list[Table]:
    from loopformers.report.tables import Column, Table

    total = description["parameters"]["total"]
    fields = tuple(
        {"field": name, "value": str(value)} for name, value in description["config"].items() if value is not None
    )
    parameters = tuple(
        {"part": part, "count": count, "share": count / total}
        for part, count in description["parameters"].items()
        if count
    )
    runs = tuple(
        {
            "num_loops": run["num_loops"],
            "schedule": "uniform" if run["is_uniform"] else run["schedule"],
            "forward": run["forward_flops_per_token"] / 1e6,
            "training": run["training_flops_per_token"] / 1e6,
            "cache": run["kv_bytes_per_token"] / 1024,
        }
        for run in description["runs"]
    )
    return [
        Table(
            title=description["model"],
            columns=(Column(key="field", title="field"), Column(key="value", title="value")),
            rows=fields,
        ),
        Table(
            title="Parameters",
            columns=(
                Column(key="part", title="part"),
                Column(key="count", title="parameters", align="right", format=",d"),
                Column(key="share", title="share", align="right", format=".1%"),
            ),
            rows=parameters,
        ),
        Table(
            title="Costs per token",
            columns=(
                Column(key="num_loops", title="loops", align="right"),
                Column(key="schedule", title="step sizes"),
                Column(key="forward", title="forward", unit="MFLOP", align="right", format=",.2f"),
                Column(key="training", title="training step", unit="MFLOP", align="right", format=",.2f"),
                Column(key="cache", title="cache", unit="KiB", align="right", format=",.2f"),
            ),
            rows=runs,
            note=(
                f"Attention over {description['seq_len']:,} tokens; cache in {description['cache_dtype']}. A training step is "
                f"forward and backward of the objective {description['config']['objective']}, every trajectory counted."
            ),
        ),
    ]
