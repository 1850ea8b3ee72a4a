"""Tables that every study has, and what its tables are made of: one row a system, number of loops and variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loopformers.report.tables import Column, Table, Value
from loopformers.studies.groups import Group, Groups, Measure, Spread
from loopformers.studies.measures import budget_losses, budget_solved, solved, solved_by_difficulty
from loopformers.studies.results import CellResult

__all__ = [
    "NATS",
    "cells_table",
    "cost_table",
    "difficulty_table",
    "median_of",
    "medians_of",
    "name_columns",
    "names_of",
    "number",
    "solved_table",
]

NATS = "nats per token"


def solved_table(groups: Groups) -> Table:
    """Return the share of a task's questions that each group answers exactly, by loops run; without rows for text."""
    counts = sorted({m for group in groups for result in group.results for m in budget_solved(result)})
    rows: list[dict[str, Value]] = [
        {
            **names_of(group),
            **{str(m): median_of(Spread.of(budget_solved(result).get(m) for result in group.results)) for m in counts},
        }
        for group in groups
        if counts
    ]
    columns = (*name_columns(groups), *(number(str(m), f"M = {m}", format=".1%") for m in counts))
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
        shares = {d: median_of(Spread.of(solved_by_difficulty(r).get(d) for r in group.results)) for d in levels}
        own: dict[str, Value] = {"solved": spread.median, "low": spread.low, "high": spread.high}
        rows.append({**names_of(group), **own, **{f"difficulty {d}": share for d, share in shares.items()}})
    columns = (
        *name_columns(groups),
        number("solved", "all questions", format=".1%"),
        number("low", "lowest", format=".1%"),
        number("high", "highest", format=".1%"),
        *(number(f"difficulty {d}", f"difficulty {d}", format=".1%") for d in levels),
    )
    note = "Medians over seeds, with the least and the largest."
    return Table(
        title="Questions answered exactly at T loops, by difficulty", columns=columns, rows=tuple(rows), note=note
    )


def cost_table(groups: Groups) -> Table:
    """Return what each group cost."""
    columns = (
        *name_columns(groups),
        Column(key="parameters", title="parameters", align="right", format=",d"),
        Column(key="tokens", title="training tokens", align="right", format=",d"),
        number("flops", "training compute", "TFLOP", format=",.3g"),
        number("seconds", "wall time of updates", "s", format=".1f"),
    )
    measures: Mapping[str, Measure] = {
        "parameters": lambda result: int(result.run["num_parameters"]),
        "tokens": lambda result: int(result.run["tokens_seen"]),
        "flops": lambda result: float(result.run["training_flops"]) / 1e12,
        "seconds": lambda result: result.seconds,
    }
    rows: list[Mapping[str, Value]] = []
    for group in groups:
        medians = medians_of(group, measures)
        whole = {key: None if (v := medians[key]) is None else round(float(v)) for key in ("parameters", "tokens")}
        rows.append({**names_of(group), **medians, **whole})
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


def number(key: str, title: str, unit: str = "", *, format: str = ".3f") -> Column:
    """Return a column of numbers."""
    return Column(key=key, title=title, unit=unit, align="right", format=format)


def name_columns(groups: Groups) -> tuple[Column, ...]:
    """Return the columns that name a group."""
    variant = (Column(key="variant", title="variant"),) if any(groups.variants) else ()
    return (Column(key="system", title="system"), *variant, Column(key="loops", title="T", align="right"))


def names_of(group: Group) -> dict[str, Value]:
    """Return a group's values in `name_columns`."""
    variant = {"variant": group.variant_name} if group.variant else {}
    return {"system": group.system, **variant, "loops": group.loops}


def median_of(spread: Spread | None) -> float | None:
    """Return the median, or None for no spread."""
    return None if spread is None else spread.median


def medians_of(group: Group, measures: Mapping[str, Measure]) -> dict[str, Value]:
    """Return the medians over seeds of some measures."""
    return {key: median_of(group.spread(measure)) for key, measure in measures.items()}
