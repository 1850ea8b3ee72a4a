"""Runs one cell of a study: trains its recipe, measures how its loops are used, and returns all that was recorded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loopformers.analysis.monitor import cross_entropy_of
from loopformers.analysis.stability import Stability
from loopformers.errors import DataError, NonFiniteError
from loopformers.evaluation.loop_use import measure_loop_use
from loopformers.folders import owned
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.model.quiet import quiet_transformers
from loopformers.studies.grid import Cell
from loopformers.studies.measures import uniform_budgets
from loopformers.studies.results import CellResult, Status
from loopformers.studies.workers import Emit
from loopformers.training.checkpoints import remove_all
from loopformers.training.recipe import Recipe, to_fields
from loopformers.training.run import PreparedRun, prepare
from loopformers.training.run_folder import VALIDATION_FILE, RunResult, versions
from loopformers.training.speed import SPEED_FILE
from loopformers.training.step_log import METRICS_FILE, StepLog

__all__ = ["run_cell"]

MAX_ABLATION_WINDOWS = 64
"""Validation windows that loop use is measured on: it takes three runs of each."""


def run_cell(
    cell: Cell,
    folder: Path,
    *,
    emit: Emit = lambda value: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> CellResult:
    """Train a cell, or continue where it was interrupted, and measure it.

    Args:
        cell: The cell.
        folder: Its own; in the end it holds the trained model, its recipe and logs, and no checkpoints.
        emit: Given a `TrainingProgress` after each update.
        stop_requested: Asked after each update.

    Returns:
        The result; a run whose loss or gradient is not finite has ended too, as `diverged`.

    Raises:
        KeyboardInterrupt: Stopped, after a checkpoint was saved.
        LoopformersError: The recipe cannot be run, as `prepare` says.
    """
    torch.set_num_threads(1)  # one cell a core, and the same sums whatever runs beside it
    run = prepare(_placed(cell.recipe, folder))
    try:
        run.train(on_progress=emit, stop_requested=stop_requested)
    except NonFiniteError as error:
        result = _diverged(cell, run, str(error))
    else:
        result = _finished(cell, run)
    with owned(run.folder):
        remove_all(run.folder)
    return result


def _placed(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe that trains in a cell's folder and reports nowhere else: the study reports for all its cells."""
    training = dataclasses.replace(recipe.training, output_dir=str(folder), report_to=())
    return dataclasses.replace(recipe, training=training)


def _finished(cell: Cell, run: PreparedRun) -> CellResult:
    outcome = run.finished()
    assert outcome is not None, "training came to its end"
    with quiet_transformers():
        model = LoopedForCausalLM.from_pretrained(run.folder)
    windows = run.validation_windows
    step = math.ceil(len(windows) / MAX_ABLATION_WINDOWS)
    try:
        loop_use = dataclasses.asdict(measure_loop_use(model, windows[::step]))
    except DataError:  # a single window has no neighbour to swap states with
        loop_use = {}
    return _result(cell, run, "finished", dataclasses.asdict(outcome), run.assess(outcome.loss), loop_use)


def _diverged(cell: Cell, run: PreparedRun, error: str) -> CellResult:
    """Return what is known of a run that ended at a number that is not finite: it exploded."""
    records = StepLog(run.folder / METRICS_FILE).read()
    last: dict[str, Any] = records[-1] if records else {"step": 0, "tokens_seen": 0, "flops": 0.0, "skipped_steps": 0}
    stability = run.assess(math.nan)
    outcome = RunResult(
        fingerprint=run.recipe.fingerprint(),
        steps=last["step"],
        tokens_seen=last["tokens_seen"],
        training_flops=last["flops"],
        num_parameters=run.config.num_parameters(),
        unigram_loss=run.unigram_loss,
        loss=math.nan,
        verdict=stability.verdict,
        reason=error,
        budgets=(),
        verdict_since=last["step"] + 1,
        skipped_steps=last["skipped_steps"],
    )
    return _result(cell, run, "diverged", dataclasses.asdict(outcome), stability, {}, error)


def _result(
    cell: Cell,
    run: PreparedRun,
    status: Status,
    outcome: Mapping[str, Any],
    stability: Stability,
    loop_use: Mapping[str, Any],
    error: str = "",
) -> CellResult:
    records = StepLog(run.folder / METRICS_FILE).read()
    measures = {"oscillation": stability.oscillation, "residual": stability.residual}
    return CellResult(
        cell=cell.id,
        status=status,
        axes=dict(cell.axes),
        recipe=to_fields(cell.recipe),
        error=error,
        run=_plain(outcome),
        stability={name: None if m is None else _plain(dataclasses.asdict(m)) for name, m in measures.items()},
        verdicts=verdict_changes(records),
        loop_use=_plain(loop_use),
        curves=_plain(curves_of(records)),
        seconds=math.fsum(speed["seconds"] for speed in StepLog(run.folder / SPEED_FILE).read()),
        versions=dict(versions()),
        validation=_plain(validations_of(StepLog(run.folder / VALIDATION_FILE).read(), records)),
    )


# -- parts -----------------------------------------------------------------------------------------------------


def verdict_changes(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each verdict of the run and the step at which it fell; records without one are left out."""
    judged = [(record["step"], record["verdict"]) for record in records if record.get("verdict") is not None]
    return [
        {"step": next(group)[0], "verdict": verdict} for verdict, group in itertools.groupby(judged, lambda j: j[1])
    ]


def curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the step records as one list a quantity.

    The loss is the cross entropy of the deepest trained loop, so that objectives of several terms compare with others.
    """
    curves: dict[str, list[Any]] = {
        "step": [record["step"] for record in records],
        "loss": [cross_entropy_of(record) for record in records],
        "gradient_norm": [record["gradient_norm"] for record in records],
        "log_std": [record.get("oscillation", {}).get("log_std") for record in records],
    }
    for name in ("residual_norms", "loop_gradient_norms", "state_cosines"):
        curves[name] = [record[name] for record in records]
    return curves


def validations_of(
    validations: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the losses of each validation by number of loops run, and what training had cost by then."""
    flops = {record["step"]: record["flops"] for record in records}
    return [
        {
            "step": validation["step"],
            "training_flops": flops[validation["step"]],
            "losses": {score["num_loops"]: score["loss"] for score in uniform_budgets(validation["budgets"])},
        }
        for validation in validations
        if validation["step"] in flops
    ]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: six digits of a number suffice, and one that is not finite is null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return json.loads(json.dumps(value))
