"""The tables of the stability study: one row a system, number of loops and variant; medians over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loopformers.report.tables import Column, Table, Value
from loopformers.studies.groups import Group, Groups, Spread
from loopformers.studies.measures import (
    below_unigram,
    budget_losses,
    budget_solved,
    last_of,
    loss,
    loss_at,
    measure_of,
    replaced_costs,
    solved,
    solved_by_difficulty,
    verdict_step,
)
from loopformers.studies.results import CellResult

__all__ = [
    "budget_table",
    "cells_table",
    "cost_table",
    "difficulty_table",
    "loop_use_table",
    "outcome_table",
    "solved_table",
    "training_table",
]

NATS = "nats per token"


def outcome_table(groups: Groups) -> Table:
    """Return how each group ended, with T = 1 beside every T."""
    rows: list[dict[str, Value]] = []
    for group in groups:
        spread, once = group.spread(loss), groups.one_pass(group)
        gains = [] if once is None else gains_over(group, once)
        rows.append(
            {
                **_names(group),
                "seeds": len(group.results),
                "verdicts": group.verdicts(),
                "loss": _median(spread),
                "low": None if spread is None else spread.low,
                "high": None if spread is None else spread.high,
                "below": _median(group.spread(below_unigram)),
                "one_pass": None if once is None else _median(once.spread(loss)),
                "gain": None if group is once else _median(Spread.of(gains)),
            }
        )
    columns = (
        *_name_columns(groups),
        Column(key="seeds", title="seeds", align="right"),
        Column(key="verdicts", title="verdicts"),
        _number("loss", "loss", NATS),
        _number("low", "lowest"),
        _number("high", "highest"),
        _number("below", "below the unigram level", NATS),
        _number("one_pass", "loss at T = 1", NATS),
        _number("gain", "gain over T = 1", NATS, format="+.3f"),
    )
    return Table(
        title="How each ended: validation loss at T loops",
        columns=columns,
        rows=tuple(rows),
        note="Medians over seeds, with the least and the largest. The gain is the median over seeds of what T loops save "
        "against one pass with the same seed; below zero, loops cost.",
    )


def training_table(groups: Groups) -> Table:
    """Return how each group got there: oscillation, residual growth, fixed points."""
    measures: Mapping[str, Callable[[CellResult], float | None]] = {
        "spread": measure_of("oscillation", "windowed_log_std"),
        "change": measure_of("oscillation", "mean_relative_change"),
        "spikes": measure_of("oscillation", "num_spikes"),
        "per_loop": measure_of("residual", "per_loop"),
        "over_training": measure_of("residual", "over_training"),
        "last_norm": measure_of("residual", "last_norm"),
        "cosine": lambda result: last_of((result.curves.get("state_cosines") or [[]])[-1]),
        "step": verdict_step,
    }
    columns = (
        *_name_columns(groups),
        _number("spread", "gradient norm spread", "std of log", format=".2f"),
        _number("change", "change a step", format=".0%"),
        _number("spikes", "spikes", format=".3g"),
        _number("per_loop", "residual growth", "per loop", format=".2f"),
        _number("over_training", "residual growth", "over training", format=".1f"),
        _number("last_norm", "residual norm", "last loop", format=".1f"),
        _number("cosine", "state cosine", "last loop", format=".4f"),
        _number("step", "verdict fell", "step", format=".4g"),
    )
    return Table(
        title="How each got there",
        columns=columns,
        rows=tuple({**_names(group), **_medians(group, measures)} for group in groups),
        note="Medians over seeds. Gradient norms are taken before clipping; the verdict's step is the update since which "
        "training's own verdict has been the final one, and is missing where the two differ.",
    )


def loop_use_table(groups: Groups) -> Table:
    """Return whether loops are used: fewer and more of them, how far they move the state, and without the signal."""
    columns = (
        *_name_columns(groups),
        _number("one", "loss at M = 1", NATS),
        _number("trained", "at M = T", NATS),
        _number("most", "at most loops", NATS),
        Column(key="most_loops", title="most loops", unit="M", align="right"),
        _number("first_change", "state change", "loop 2", format=".2g"),
        _number("last_change", "state change", "loop T", format=".2g"),
        _number("swapped", "another row's state", f"{NATS} more", format="+.3f"),
        _number("zeroed", "no state", f"{NATS} more", format="+.3f"),
    )
    rows: list[dict[str, Value]] = []
    for group in groups:
        if group.loops == 1:
            continue
        most = max((m for result in group.results for m in budget_losses(result)), default=group.loops)
        measures: Mapping[str, Callable[[CellResult], float | None]] = {
            "one": loss_at(1),
            "trained": loss,
            "most": loss_at(most),
            "first_change": lambda result: next(iter(result.loop_use.get("state_changes") or ()), None),
            "last_change": lambda result: last_of(result.loop_use.get("state_changes")),
            "swapped": replaced_costs("swapped"),
            "zeroed": replaced_costs("zeroed"),
        }
        rows.append({**_names(group), "most_loops": most, **_medians(group, measures)})
    return Table(
        title="Are the loops used?",
        columns=columns,
        rows=tuple(rows),
        note="Medians over seeds. One trained model run at M loops; the state's relative change |h_i - h_{i-1}| / |h_{i-1}|; and "
        "what the loss gains when the state that enters loops 2 to T is another row's of the batch, or zero. Near zero, loops "
        "make nothing of the state. For lt, whose loops start from the state alone, this replaces all that they see.",
    )


def budget_table(groups: Groups) -> Table:
    """Return the loss of every group at every number of loops that was scored."""
    counts = sorted({m for group in groups for result in group.results for m in budget_losses(result)})
    rows: list[dict[str, Value]] = [
        {**_names(group), **{str(m): _median(group.spread(loss_at(m))) for m in counts}} for group in groups
    ]
    columns = (*_name_columns(groups), *(_number(str(m), f"M = {m}") for m in counts))
    return Table(
        title="Validation loss of one trained model by loops run, M",
        columns=columns,
        rows=tuple(rows),
        note=f"Medians over seeds, {NATS}. Nothing is trained again for another M.",
    )


def solved_table(groups: Groups) -> Table:
    """Return the share of a task's questions that each group answers exactly, by loops run; without rows for text."""
    counts = sorted({m for group in groups for result in group.results for m in budget_solved(result)})
    rows: list[dict[str, Value]] = [
        {
            **_names(group),
            **{str(m): _median(Spread.of(budget_solved(result).get(m) for result in group.results)) for m in counts},
        }
        for group in groups
        if counts
    ]
    columns = (*_name_columns(groups), *(_number(str(m), f"M = {m}", format=".1%") for m in counts))
    return Table(
        title="Questions answered exactly by loops run, M",
        columns=columns,
        rows=tuple(rows),
        note="Medians over seeds.",
    )


def difficulty_table(groups: Groups) -> Table:
    """Return the share of a task's questions that each group answers exactly at T loops, by difficulty; none for text."""
    levels = list(
        dict.fromkeys(d for group in groups for result in group.results for d in solved_by_difficulty(result))
    )
    rows: list[dict[str, Value]] = []
    for group in groups:
        spread = group.spread(solved)
        if spread is None:
            continue
        shares = {d: _median(Spread.of(solved_by_difficulty(r).get(d) for r in group.results)) for d in levels}
        own: dict[str, Value] = {"solved": spread.median, "low": spread.low, "high": spread.high}
        rows.append({**_names(group), **own, **{f"difficulty {d}": share for d, share in shares.items()}})
    columns = (
        *_name_columns(groups),
        _number("solved", "all questions", format=".1%"),
        _number("low", "lowest", format=".1%"),
        _number("high", "highest", format=".1%"),
        *(_number(f"difficulty {d}", f"difficulty {d}", format=".1%") for d in levels),
    )
    note = "Medians over seeds, with the least and the largest."
    return Table(
        title="Questions answered exactly at T loops, by difficulty", columns=columns, rows=tuple(rows), note=note
    )


def cost_table(groups: Groups) -> Table:
    """Return what each group cost."""
    columns = (
        *_name_columns(groups),
        Column(key="parameters", title="parameters", align="right", format=",d"),
        Column(key="tokens", title="training tokens", align="right", format=",d"),
        _number("flops", "training compute", "TFLOP", format=",.3g"),
        _number("seconds", "wall time of updates", "s", format=".1f"),
    )
    measures: Mapping[str, Callable[[CellResult], float | None]] = {
        "parameters": lambda result: int(result.run["num_parameters"]),
        "tokens": lambda result: int(result.run["tokens_seen"]),
        "flops": lambda result: float(result.run["training_flops"]) / 1e12,
        "seconds": lambda result: result.seconds,
    }
    rows: list[Mapping[str, Value]] = []
    for group in groups:
        medians = _medians(group, measures)
        whole = {key: None if (v := medians[key]) is None else round(float(v)) for key in ("parameters", "tokens")}
        rows.append({**_names(group), **medians, **whole})
    return Table(title="What each cost", columns=columns, rows=tuple(rows), note="Medians over seeds.")


def cells_table(results: Sequence[CellResult]) -> Table:
    """Return one row a cell with all its numbers, for a file that other programs read."""
    axes = list(dict.fromkeys(axis for result in results for axis in result.axes))
    measures = list(dict.fromkeys(
        (group, name) for result in results for group, fields in result.stability.items() for name in fields or {}
    ))  # fmt: skip
    counts = sorted({m for result in results if result.has_outcome for m in budget_losses(result)})
    own = (
        "loss",
        "unigram_loss",
        "verdict",
        "verdict_since",
        "steps",
        "tokens_seen",
        "training_flops",
        "num_parameters",
    )
    use = ("swapped_loss", "zeroed_loss")
    tasks = any(result.has_outcome and budget_solved(result) for result in results)
    keys = [
        "cell", *axes, "status", *own, "seconds", *(f"{group}_{name}" for group, name in measures),
        *(f"loss_at_{m}" for m in counts), "ablation_loss", *use, *(["solved"] if tasks else []), "error",
    ]  # fmt: skip
    rows: list[dict[str, Value]] = []
    for result in results:
        scored = budget_losses(result) if result.has_outcome else {}
        rows.append(
            {
                "cell": result.cell,
                **result.axes,
                "status": result.status,
                **{key: result.run.get(key) for key in own},
                "seconds": result.seconds,
                **{f"{group}_{name}": (result.stability.get(group) or {}).get(name) for group, name in measures},
                **{f"loss_at_{m}": scored.get(m) for m in counts},
                "ablation_loss": result.loop_use.get("loss"),
                **{key: result.loop_use.get(key) for key in use},
                **({"solved": solved(result)} if tasks and result.has_outcome else {}),
                "error": result.error,
            }
        )
    return Table(title="Cells", columns=tuple(Column(key=key, title=key) for key in keys), rows=tuple(rows))


# -- parts -----------------------------------------------------------------------------------------------------


def gains_over(group: Group, once: Group) -> list[float]:
    """Return what a group saves against another, nats per token, for each seed that both have."""
    return [loss(once.by_seed[seed]) - loss(result) for seed, result in group.by_seed.items() if seed in once.by_seed]


def _number(key: str, title: str, unit: str = "", *, format: str = ".3f") -> Column:
    return Column(key=key, title=title, unit=unit, align="right", format=format)


def _name_columns(groups: Groups) -> tuple[Column, ...]:
    variant = (Column(key="variant", title="variant"),) if any(groups.variants) else ()
    return (Column(key="system", title="system"), *variant, Column(key="loops", title="T", align="right"))


def _names(group: Group) -> dict[str, Value]:
    variant = {"variant": group.variant_name} if group.variant else {}
    return {"system": group.system, **variant, "loops": group.loops}


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _medians(group: Group, measures: Mapping[str, Callable[[CellResult], float | None]]) -> dict[str, Value]:
    return {key: _median(group.spread(measure)) for key, measure in measures.items()}
