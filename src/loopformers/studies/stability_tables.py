"""The tables of the stability study: one row a system, number of loops and variant; medians over seeds."""

from __future__ import annotations

from collections.abc import Mapping

from loopformers.report.tables import Column, Table, Value
from loopformers.studies.group_tables import NATS, median_of, medians_of, name_columns, names_of, number
from loopformers.studies.groups import Group, Groups, Measure, Spread
from loopformers.studies.measures import (
    below_unigram,
    budget_losses,
    last_of,
    loss,
    loss_at,
    measure_of,
    replaced_costs,
    verdict_step,
)

__all__ = ["budget_table", "loop_use_table", "outcome_table", "training_table"]


def outcome_table(groups: Groups) -> Table:
    """Return how each group ended, with T = 1 beside every T."""
    rows: list[dict[str, Value]] = []
    for group in groups:
        spread, once = group.spread(loss), groups.one_pass(group)
        gains = [] if once is None else gains_over(group, once)
        rows.append(
            {
                **names_of(group),
                "seeds": len(group.results),
                "verdicts": group.verdicts(),
                "loss": median_of(spread),
                "low": None if spread is None else spread.low,
                "high": None if spread is None else spread.high,
                "below": median_of(group.spread(below_unigram)),
                "one_pass": None if once is None else median_of(once.spread(loss)),
                "gain": None if group is once else median_of(Spread.of(gains)),
            }
        )
    columns = (
        *name_columns(groups),
        Column(key="seeds", title="seeds", align="right"),
        Column(key="verdicts", title="verdicts"),
        number("loss", "loss", NATS),
        number("low", "lowest"),
        number("high", "highest"),
        number("below", "below the unigram level", NATS),
        number("one_pass", "loss at T = 1", NATS),
        number("gain", "gain over T = 1", NATS, format="+.3f"),
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
    measures: Mapping[str, Measure] = {
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
        *name_columns(groups),
        number("spread", "gradient norm spread", "std of log", format=".2f"),
        number("change", "change a step", format=".0%"),
        number("spikes", "spikes", format=".3g"),
        number("per_loop", "residual growth", "per loop", format=".2f"),
        number("over_training", "residual growth", "over training", format=".1f"),
        number("last_norm", "residual norm", "last loop", format=".1f"),
        number("cosine", "state cosine", "last loop", format=".4f"),
        number("step", "verdict fell", "step", format=".4g"),
    )
    return Table(
        title="How each got there",
        columns=columns,
        rows=tuple({**names_of(group), **medians_of(group, measures)} for group in groups),
        note="Medians over seeds. Gradient norms are taken before clipping; the verdict's step is the update since which "
        "training's own verdict has been the final one, and is missing where the two differ.",
    )


def loop_use_table(groups: Groups) -> Table:
    """Return whether loops are used: fewer and more of them, how far they move the state, and without the signal."""
    columns = (
        *name_columns(groups),
        number("one", "loss at M = 1", NATS),
        number("trained", "at M = T", NATS),
        number("most", "at most loops", NATS),
        Column(key="most_loops", title="most loops", unit="M", align="right"),
        number("first_change", "state change", "loop 2", format=".2g"),
        number("last_change", "state change", "loop T", format=".2g"),
        number("swapped", "another row's state", f"{NATS} more", format="+.3f"),
        number("zeroed", "no state", f"{NATS} more", format="+.3f"),
    )
    rows: list[dict[str, Value]] = []
    for group in groups:
        if group.loops == 1:
            continue
        most = max((m for result in group.results for m in budget_losses(result)), default=group.loops)
        measures: Mapping[str, Measure] = {
            "one": loss_at(1),
            "trained": loss,
            "most": loss_at(most),
            "first_change": lambda result: next(iter(result.loop_use.get("state_changes") or ()), None),
            "last_change": lambda result: last_of(result.loop_use.get("state_changes")),
            "swapped": replaced_costs("swapped"),
            "zeroed": replaced_costs("zeroed"),
        }
        rows.append({**names_of(group), "most_loops": most, **medians_of(group, measures)})
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
        {**names_of(group), **{str(m): median_of(group.spread(loss_at(m))) for m in counts}} for group in groups
    ]
    columns = (*name_columns(groups), *(number(str(m), f"M = {m}") for m in counts))
    return Table(
        title="Validation loss of one trained model by loops run, M",
        columns=columns,
        rows=tuple(rows),
        note=f"Medians over seeds, {NATS}. Nothing is trained again for another M.",
    )


# -- parts -----------------------------------------------------------------------------------------------------


def gains_over(group: Group, once: Group) -> list[float]:
    """Return what a group saves against another, nats per token, for each seed that both have."""
    return [loss(once.by_seed[seed]) - loss(result) for seed, result in group.by_seed.items() if seed in once.by_seed]
