"""The tables of the elastic study: losses by budget, controls, parts, training compute, questions by difficulty."""

from __future__ import annotations

from loopformers.report.tables import Column, Table, Value
from loopformers.studies.elastic_comparison import (
    FIXED_DEEPEST,
    FULL,
    ROLES,
    against_controls,
    budgets_of,
    elastic_groups,
    layers_of,
    loss_change,
    paired,
    recipe_of,
    role_of,
)
from loopformers.studies.group_tables import NATS, median_of, name_columns, names_of, number
from loopformers.studies.groups import Group, Groups, Spread
from loopformers.studies.measures import budget_difficulties, loss_at, loss_by_compute
from loopformers.training.recipe import flatten

__all__ = [
    "budgets_table",
    "compute_table",
    "controls_table",
    "difficulty_by_budget_table",
    "parts_table",
    "ranges_table",
]

WITHIN = 0.01
"""Relative to the better control, how far an elastic model's loss may be above it."""

TERAFLOP = 1e12

NOT_A_PART = ("training.seed", "training.output_dir", "evaluation.windows", "optimizer.name")
"""Fields of a recipe that are not told of an ablation."""


def budgets_table(groups: Groups) -> Table:
    """Return the median loss of every group at every number of loops up to 2T, and what it loses from T to either end."""
    columns = (
        *name_columns(groups),
        Column(key="seeds", title="seeds", align="right"),
        *_cost_columns(),
        *(number(str(m), f"M = {m}") for m in _all_budgets(groups)),
        number("to_one", "lost from T to 1", NATS, format="+.3f"),
        number("to_twice", "lost from T to 2T", NATS, format="+.3f"),
    )
    rows: list[dict[str, Value]] = [
        {
            **names_of(group),
            "seeds": len(group.results),
            **_costs(group),
            **{str(m): median_of(group.spread(loss_at(m))) for m in budgets_of(group)},
            "to_one": median_of(group.spread(loss_change(group.loops, 1))),
            "to_twice": median_of(group.spread(loss_change(group.loops, 2 * group.loops))),
        }
        for group in groups
    ]
    note = f"Medians over seeds, {NATS}. Nothing is trained again for another M; what a model loses is paired by seed."
    return Table(
        title="Validation loss of one trained model by loops run, M", columns=columns, rows=tuple(rows), note=note
    )


def ranges_table(groups: Groups) -> Table:
    """Return the least and the largest loss over seeds of every group at every number of loops up to 2T."""
    columns = (*name_columns(groups), *(Column(key=str(m), title=f"M = {m}") for m in _all_budgets(groups)))
    rows: list[dict[str, Value]] = [
        {**names_of(group), **{str(m): _range(group.spread(loss_at(m))) for m in budgets_of(group)}} for group in groups
    ]
    return Table(
        title="The same: least and largest over seeds",
        columns=columns,
        rows=tuple(rows),
        note="Single seeds are in cells.csv.",
    )


def controls_table(groups: Groups) -> Table:
    """Return every elastic model beside what was trained for each budget, and beside loopformer."""
    columns = (
        *name_columns(groups),
        Column(key="num_loops", title="M", align="right"),
        number("loss", "loss", NATS),
        Column(key="fixed", title="trained for M"),
        number("fixed_loss", "its loss", NATS),
        number("loopformer_loss", "loopformer", NATS),
        Column(key="best", title="the better"),
        number("ratio", "ratio to it", format=".4f"),
        number("low", "least", format=".4f"),
        number("high", "largest", format=".4f"),
        Column(key="within", title=f"within {WITHIN:.0%}"),
        number("flops", "training compute", "TFLOP", format=",.3g"),
        number("best_flops", "the better's", "TFLOP", format=",.3g"),
    )
    rows: list[dict[str, Value]] = []
    for group in elastic_groups(groups):
        for at in against_controls(groups, group):
            measure, ratio = loss_at(at.num_loops), at.ratio
            rows.append(
                {
                    **names_of(group),
                    "num_loops": at.num_loops,
                    "loss": median_of(group.spread(measure)),
                    "fixed": None if at.fixed is None else at.fixed.system,
                    "fixed_loss": None if at.fixed is None else median_of(at.fixed.spread(measure)),
                    "loopformer_loss": None if at.loopformer is None else median_of(at.loopformer.spread(measure)),
                    "best": None if at.best is None else at.best.system,
                    "ratio": median_of(ratio),
                    "low": None if ratio is None else ratio.low,
                    "high": None if ratio is None else ratio.high,
                    "within": None if ratio is None else ratio.median <= 1 + WITHIN,
                    "flops": _training_flops(group),
                    "best_flops": None if at.best is None else _training_flops(at.best),
                }
            )
    return Table(
        title="One model for every budget, beside the best for each",
        columns=columns,
        rows=tuple(rows),
        note="Medians over seeds; ratios are paired by seed, with the least and the largest. Where nothing was trained for M, "
        "loopformer stands alone.",
    )


def parts_table(groups: Groups) -> Table:
    """Return what each change to the elastic model costs: every loss less its own, by budget."""
    rows: list[dict[str, Value]] = []
    for whole in [group for group in groups if group.system == FULL]:
        budgets = budgets_of(whole)
        for group in [whole, *changed_groups(groups, whole)]:
            more = {m: median_of(paired(group, whole, loss_at(m))) for m in budgets}
            known = [value for m, value in more.items() if value is not None and m <= whole.loops]
            rows.append(
                {
                    **names_of(group),
                    "changed": "" if group is whole else changes(whole, group),
                    "verdicts": group.verdicts(),
                    **_costs(group),
                    **{str(m): value for m, value in more.items()},
                    "mean": sum(known) / len(known) if known else None,
                }
            )
    columns = (
        *name_columns(groups),
        Column(key="changed", title="in its place"),
        Column(key="verdicts", title="verdicts"),
        *_cost_columns(),
        *(number(str(m), f"M = {m}", format="+.3f") for m in _all_budgets(groups)),
        number("mean", "mean up to T", format="+.3f"),
    )
    return Table(
        title=f"What changes to {FULL} cost: loss with the change, less its own",
        columns=columns,
        rows=tuple(rows),
        note=f"{NATS}, medians over seeds of differences paired by seed; above zero, the change costs. Equal updates: training "
        "compute, which differs, stands beside it.",
    )


def changed_groups(groups: Groups, whole: Group) -> list[Group]:
    """Return the groups that have a part off, added or exchanged, or all of them off."""
    beside = [g for g in groups if (g.variant, g.loops) == (whole.variant, whole.loops) and g is not whole]
    return [g for g in beside if role_of(g) in ROLES[:2] or g.system == FIXED_DEEPEST]


def changes(whole: Group, group: Group) -> str:
    """Say in which fields of its recipe a group differs: `model.conditioning none`."""
    one, other = flatten(recipe_of(whole)), flatten(recipe_of(group))
    differing = [key for key in {**one, **other} if one.get(key) != other.get(key) and key not in NOT_A_PART]
    return ", ".join(f"{key} {other[key]}" for key in differing if other.get(key) is not None)


def compute_table(groups: Groups) -> Table:
    """Return every system against the elastic model at the end of training, and at equal training compute if recorded."""
    recorded = any(_was_watched(group) for group in groups)
    rows: list[dict[str, Value]] = []
    for whole in [group for group in groups if group.system == FULL]:
        for group in groups:
            if group.variant != whole.variant or group is whole:
                continue
            for own, beside in _budget_pairs(group, whole):
                row: dict[str, Value] = {
                    **names_of(group),
                    "num_loops": own,
                    "whole_loops": beside,
                    "steps": int(group.results[0].run["steps"]),
                    "flops": _training_flops(group),
                    "whole_flops": _training_flops(whole),
                    "end": median_of(paired(whole, group, loss_at(beside), loss_at(own))),
                }
                if recorded:
                    common = min(_flops(group), _flops(whole))
                    measures = loss_by_compute(beside, common), loss_by_compute(own, common)
                    row |= {"common": common / TERAFLOP, "equal": median_of(paired(whole, group, *measures))}
                rows.append(row)
    columns = [
        *name_columns(groups),
        Column(key="num_loops", title="M", align="right"),
        Column(key="whole_loops", title=f"M of {FULL}", align="right"),
        Column(key="steps", title="updates", align="right", format=",d"),
        number("flops", "training compute", "TFLOP", format=",.3g"),
        number("whole_flops", f"of {FULL}", "TFLOP", format=",.3g"),
        number("end", f"{FULL} less this, at the end", NATS, format="+.3f"),
    ]
    note = f"Medians over seeds of differences paired by seed; below zero, {FULL} is better. "
    if recorded:
        columns += [
            number("common", "common compute", "TFLOP", format=",.3g"),
            number("equal", "at equal training compute", NATS, format="+.3f"),
        ]
        note += (
            "At the end: equal updates. At equal training compute: the last validation that each made by the compute of the "
            "cheaper run. The dearer one is cut short there, before its learning rate has come down, which counts against it."
        )
    else:
        note += (
            "This compares at equal updates, not at equal training compute, which stands beside it: validation was not recorded "
            "during training. A grid with evaluation.interval has both."
        )
    return Table(title="Equal updates and equal training compute", columns=tuple(columns), rows=tuple(rows), note=note)


def difficulty_by_budget_table(groups: Groups) -> Table:
    """Return the share of a task's questions that each group answers exactly, by loops run and difficulty; none for text."""
    levels = list(dict.fromkeys(
        level for group in groups for result in group.results for shares in budget_difficulties(result).values()
        for level in shares
    ))  # fmt: skip
    rows: list[dict[str, Value]] = []
    for group in groups:
        scored = [budget_difficulties(result) for result in group.results]
        for m in budgets_of(group):
            shares = {level: Spread.of(by_budget.get(m, {}).get(level) for by_budget in scored) for level in levels}
            if any(shares.values()):
                rows.append(
                    {**names_of(group), "num_loops": m, **{level: median_of(share) for level, share in shares.items()}}
                )
    columns = (
        *name_columns(groups),
        Column(key="num_loops", title="M", align="right"),
        *(number(level, f"difficulty {level}", format=".1%") for level in levels),
    )
    return Table(
        title="Questions answered exactly, by loops run and difficulty",
        columns=columns,
        rows=tuple(rows),
        note="Medians over seeds.",
    )


# -- parts -----------------------------------------------------------------------------------------------------


def _all_budgets(groups: Groups) -> list[int]:
    return sorted({m for group in groups for m in budgets_of(group)})


def _range(spread: Spread | None) -> str | None:
    return None if spread is None else f"{spread.low:.3f} to {spread.high:.3f}"


def _cost_columns() -> tuple[Column, ...]:
    return (
        Column(key="parameters", title="parameters", align="right", format=",d"),
        number("flops", "training compute", "TFLOP", format=",.3g"),
    )


def _costs(group: Group) -> dict[str, Value]:
    return {"parameters": group.num_parameters, "flops": _training_flops(group)}


def _flops(group: Group) -> float:
    """Operations of training, median over seeds."""
    spread = group.spread(lambda result: float(result.run["training_flops"]))
    assert spread is not None, "a group has a result"
    return spread.median


def _training_flops(group: Group) -> float:
    return _flops(group) / TERAFLOP


def _was_watched(group: Group) -> bool:
    """Whether validation was recorded before the end."""
    return any(len(result.validation) > 1 for result in group.results)


def _budget_pairs(group: Group, whole: Group) -> list[tuple[int, int]]:
    """Return the budgets at which a group and the elastic model are compared: equal ones, or both at their own T where the
    layers differ."""
    if layers_of(group) != layers_of(whole):
        return [(group.loops, whole.loops)]
    deepest = min(group.loops, whole.loops)
    return [(m, m) for m in sorted({1, deepest})] if group.loops == whole.loops else [(deepest, deepest)]
