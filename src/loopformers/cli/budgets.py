"""The arguments that say how many loops to run, shared by the commands that take budgets."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loopformers.cli.console import print_note
from loopformers.errors import ConfigError, NonFiniteError, check_count, shorten
from loopformers.limits import MAX_BUDGETS
from loopformers.schedule import Schedule
from loopformers.yaml_events import read_int

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig

__all__ = ["add_budget_arguments", "check_finite", "parse_budgets"]


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--num-loops` and `--schedule`, of which one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--num-loops", metavar="M[,M...]", help="numbers of loops, such as 1,4,12 (default: the trained one)"
    )
    group.add_argument(
        "--schedule",
        action="append",
        metavar="S",
        help="a schedule: uniform:4, coarse-first:4, fine-first:4, or step sizes such as 1/2,1/4,1/4; give it several times "
        "for several; unequal steps need a model that is conditioned on time",
    )


def check_finite(label: str, losses: Mapping[str, float]) -> None:
    """Say which runs of a model gave no loss; a table would only show dashes.

    Args:
        label: The model, for the reader.
        losses: By schedule, in nats.

    Raises:
        NonFiniteError: No run gave one.
    """
    broken = [schedule for schedule, loss in losses.items() if not math.isfinite(loss)]
    if not broken:
        return
    if len(broken) == len(losses):
        raise NonFiniteError(
            f"{label} has a loss that is not finite at every requested number of loops ({', '.join(broken)}): its weights are "
            "damaged, or its states overflow; use fewer loops, or an earlier checkpoint"
        )
    print_note(
        f"warning: {label} has a loss that is not finite at {', '.join(broken)}: its states overflow there; use other numbers"
    )


def parse_budgets(
    num_loops: str | None, schedules: Sequence[str] | None, config: LoopConfig, *, default: Schedule | None = None
) -> list[Schedule]:
    """Return the runs that the two arguments ask of a model; where they ask for none, the default or the trained one.

    Raises:
        ConfigError: A part that is no number of loops, or a schedule that the model cannot run.
    """
    if schedules:
        return [config.resolve_schedule(schedule=schedule) for schedule in schedules]
    if num_loops is None:
        return [config.resolve_schedule() if default is None else default]
    runs = []
    parts = num_loops.split(",")
    check_count("number of budgets in --num-loops", len(parts), at_most=MAX_BUDGETS)
    for part in parts:
        if (count := read_int(part.strip())) is None:
            raise ConfigError(
                f"--num-loops {shorten(num_loops)}: {shorten(part.strip())} is not a number of loops; write whole numbers from "
                "1, such as 1,4,12"
            )
        runs.append(config.resolve_schedule(num_loops=count))
    return runs
