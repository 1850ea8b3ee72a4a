"""The goals of the elastic study, and which of them the results reach, for each variant of a grid by itself."""

from __future__ import annotations

from collections.abc import Sequence

from loopformers.studies.claims import Claim, say_claims, say_missing
from loopformers.studies.elastic_comparison import (
    FULL,
    LOOPFORMER,
    against_controls,
    budgets_of,
    elastic_groups,
    layers_of,
    loss_change,
    paired,
)
from loopformers.studies.elastic_tables import WITHIN, parts_table
from loopformers.studies.groups import Group, Groups, Spread, Variant
from loopformers.studies.measures import budget_solved, loss_at, solved

__all__ = ["judge_goals", "summarise"]

NO_WORSE = 0.005
"""Nats by which the loss may rise from T to 2T and count as no worse."""

CLEARLY_BETTER = 0.1
"""Share of questions by which T loops must answer more than one."""

NO_FEWER = 0.01
"""Share of questions by which N layers in T loops may fall behind N x T distinct ones."""

FAMILY_LOSSES = {LOOPFORMER: (0.0, 0.2), "base-loop": (0.5, None), "tmlt": (1.0, None)}
"""Nats lost from M = T to M = 1: least and most that is expected of each; None: no limit."""


def judge_goals(groups: Groups) -> list[Claim]:
    """Return every goal, variant by variant."""
    goals = []
    for variant in groups.variants:
        is_task = any(budget_solved(r) for g in groups if g.variant == variant for r in g.results)
        for group in elastic_groups(groups):
            if group.variant != variant:
                continue
            if is_task:  # learning comes in jumps, which the verdict's thresholds, those of text, take for oscillation
                goals += [_uses_loops(group), _matches_distinct(groups, group)]
            else:
                goals.append(_is_stable(group))
            goals += [_is_within(groups, group), _goes_beyond(group)]
        goals.append(_no_change_helps(groups, variant))
        if not is_task:
            goals.append(_family_loses(groups, variant))
    return goals


def summarise(groups: Groups, goals: Sequence[Claim], *, num_missing: int, num_failed: int) -> str:
    """Say in a few sentences what was seen, with the numbers that decide each goal."""
    if not groups.all:
        return "No cell has an outcome yet."
    sentences = []
    for group in elastic_groups(groups):
        known = [(m, s.median) for m in budgets_of(group) if (s := group.spread(loss_at(m))) is not None]
        losses = ", ".join(f"{value:.3f} at M = {m}" for m, value in known if m in (1, group.loops, 2 * group.loops))
        seeds = len(group.results)
        sentences.append(
            f"{group.label}, T = {group.loops}, {seeds} seed{'s' if seeds > 1 else ''}: {losses} (nats per token)."
        )
    sentences += [*say_claims(goals, with_evidence=True), *say_missing(num_missing, num_failed)]
    return " ".join(sentences)


# -- the goals -------------------------------------------------------------------------------------------------


def _is_stable(group: Group) -> Claim:
    statement = f"{group.system} is stable at T = {group.loops} on every seed"
    stable = all(result.run["verdict"] == "stable" for result in group.results)
    return Claim.goal(statement, group.variant, stable, group.verdicts())


def _is_within(groups: Groups, group: Group) -> Claim:
    statement = (
        f"{group.system} is within {WITHIN:.0%} of the better of {LOOPFORMER} and the model trained for M, at every M up "
        "to T"
    )
    known = [(at, ratio) for at in against_controls(groups, group) if (ratio := at.ratio) is not None]
    near = [ratio.median <= 1 + WITHIN for _, ratio in known]
    if not near or (all(near) and not any(at.fixed for at, _ in known)):
        return Claim.goal(statement, group.variant, None)  # without a model trained for M only a failure is certain
    evidence = ", ".join(f"M = {at.num_loops}: {ratio.median:.4f}" for at, ratio in known)
    alone = [str(at.num_loops) for at, _ in known if at.fixed is None]
    if alone:
        evidence += f"; nothing was trained for M = {', '.join(alone)}"
    return Claim.goal(statement, group.variant, all(near), evidence)


def _goes_beyond(group: Group) -> Claim:
    statement = f"{group.system} gets no worse from T to 2T, by more than {NO_WORSE} nats, on any seed"
    change = group.spread(loss_change(group.loops, 2 * group.loops))
    if change is None:
        return Claim.goal(statement, group.variant, None)
    return Claim.goal(
        statement, group.variant, change.high <= NO_WORSE, f"{change.low:+.3f} to {change.high:+.3f} nats"
    )


def _uses_loops(group: Group) -> Claim:
    statement = (
        f"{group.system} answers at least {CLEARLY_BETTER:.0%} more questions at M = T than at M = 1, on every seed"
    )
    scored = [budget_solved(result) for result in group.results]
    gain = Spread.of(by[group.loops] - by[1] for by in scored if group.loops in by and 1 in by)
    if gain is None:
        return Claim.goal(statement, group.variant, None)
    return Claim.goal(statement, group.variant, gain.low >= CLEARLY_BETTER, f"{gain.low:+.1%} to {gain.high:+.1%}")


def _matches_distinct(groups: Groups, group: Group) -> Claim:
    statement = (
        f"{group.system} at M = T answers no fewer questions than N x T distinct layers, by more than {NO_FEWER:.0%}"
    )
    layers = layers_of(group)
    distinct = [
        g
        for g in groups
        if g.variant == group.variant and g.loops == 1 and layers is not None and layers_of(g) == layers * group.loops
    ]
    behind = paired(group, distinct[0], solved) if distinct else None
    if behind is None:
        return Claim.goal(statement, group.variant, None)
    evidence = f"median {behind.median:+.1%}, {behind.low:+.1%} to {behind.high:+.1%}, against {distinct[0].system}"
    return Claim.goal(statement, group.variant, behind.median >= -NO_FEWER, evidence)


def _no_change_helps(groups: Groups, variant: Variant) -> Claim:
    statement = f"no change to {FULL} lowers its loss, mean over M up to T"
    own = Groups([result for group in groups if group.variant == variant for result in group.results])
    costs = {
        str(row["system"]): float(row["mean"])
        for row in parts_table(own).rows
        if row["system"] != FULL and isinstance(row["mean"], float)
    }
    if not costs:
        return Claim.goal(statement, variant, None)
    evidence = "changed: " + ", ".join(f"{system} {cost:+.3f}" for system, cost in costs.items()) + " nats"
    return Claim.goal(statement, variant, all(cost > 0 for cost in costs.values()), evidence)


def _family_loses(groups: Groups, variant: Variant) -> Claim:
    limits = [
        f"{system} {f'at most {most}' if most is not None else f'at least {least}'}"
        for system, (least, most) in FAMILY_LOSSES.items()
    ]
    statement = f"from M = T to M = 1, nats are lost as expected: {', '.join(limits)}"
    found = {g.system: g for g in groups if g.variant == variant and g.system in FAMILY_LOSSES and g.loops > 1}
    lost = {
        system: spread
        for system in FAMILY_LOSSES
        if system in found and (spread := found[system].spread(loss_change(found[system].loops, 1))) is not None
    }
    if len(lost) < len(FAMILY_LOSSES):
        return Claim.goal(statement, variant, None)
    holds = all(
        least <= spread.median and (most is None or spread.median <= most)
        for spread, (least, most) in ((lost[system], limits) for system, limits in FAMILY_LOSSES.items())
    )
    return Claim.goal(
        statement, variant, holds, ", ".join(f"{name} {spread.median:.3f}" for name, spread in lost.items())
    )
