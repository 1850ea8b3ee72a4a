"""What stands beside what in the elastic study: the roles of its systems, and the best control for each budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loopformers.studies.groups import Group, Groups, Measure, Spread, Variant
from loopformers.studies.measures import budget_losses, loss_at

__all__ = [
    "ELASTIC",
    "FIXED_DEEPEST",
    "FULL",
    "LOOPFORMER",
    "ROLES",
    "AtBudget",
    "against_controls",
    "budgets_of",
    "elastic_groups",
    "layers_of",
    "loss_change",
    "paired",
    "recipe_of",
    "role_of",
    "trained_for",
]

FULL = "elastic-balanced"
"""The elastic model whose parts are changed one by one."""

ELASTIC = (FULL, "elastic-flt")

LOOPFORMER = "loopformer"
"""The elastic model of the paper."""

FAMILY = ("base", "base-loop", "base-loop-exit", "tmlt", "tmlt-exit", LOOPFORMER)
"""Presets of the paper."""

FIXED_PREFIX, FIXED_DEEPEST = "fixed-", "lt-balanced"
"""Controls that are trained for one budget: systems named `fixed-M`, and the recurrence of `FULL` at T itself."""

ROLES = ("elastic models", "parts changed", "fixed depth and plain", "LoopFormer's family")


def role_of(group: Group) -> str:
    """Return which of `ROLES` a group has."""
    recipe = recipe_of(group)
    preset = recipe["model"]["preset"]
    if preset in FAMILY:
        return ROLES[3]
    if group.system in ELASTIC:
        return ROLES[0]
    return ROLES[1] if preset in ELASTIC or recipe.get("law") else ROLES[2]


def recipe_of(group: Group) -> dict[str, Any]:
    """Return the recipe of a group, but for the seed."""
    return dict(group.results[0].recipe)


def layers_of(group: Group) -> int | None:
    """Return N, distinct layers of the loop, or None where the recipe leaves it to the preset."""
    layers: int | None = recipe_of(group)["model"].get("num_hidden_layers")
    return layers


def elastic_groups(groups: Groups) -> list[Group]:
    """Return the elastic models of a study, `FULL` first."""
    return [group for name in ELASTIC for group in groups if group.system == name]


def budgets_of(group: Group) -> list[int]:
    """Return the numbers of loops, up to 2T, that a group was scored at."""
    scored = {num_loops for result in group.results for num_loops in budget_losses(result)}
    return sorted(num_loops for num_loops in scored if num_loops <= 2 * group.loops)


def loss_change(start: int, end: int) -> Measure:
    """Return the measure of what the loss gains from M = start to M = end."""

    def measure(result: Any) -> float | None:
        before, after = loss_at(start)(result), loss_at(end)(result)
        return None if before is None or after is None else after - before

    return measure


def paired(
    group: Group,
    other: Group,
    measure: Measure,
    other_measure: Measure | None = None,
    *,
    combine: Callable[[float, float], float] = lambda a, b: a - b,
) -> Spread | None:
    """Return the spread, over the seeds that both groups have, of one's measure less the other's.

    Args:
        group: Left.
        other: Right.
        measure: Of the left, and of the right unless `other_measure` is given.
        other_measure: Of the right.
        combine: In the place of the difference.
    """
    pairs = [
        (measure(result), (other_measure or measure)(other.by_seed[seed]))
        for seed, result in group.by_seed.items()
        if seed in other.by_seed
    ]
    return Spread.of(combine(a, b) for a, b in pairs if a is not None and b is not None)


def trained_for(groups: Groups, num_loops: int, variant: Variant) -> Group | None:
    """Return the control trained for a budget, the best of several, or None."""
    found = [
        group
        for group in groups
        if (group.loops, group.variant) == (num_loops, variant)
        and (group.system.startswith(FIXED_PREFIX) or group.system == FIXED_DEEPEST)
    ]
    return _best(found, num_loops)


@dataclass(frozen=True, kw_only=True, slots=True)
class AtBudget:
    """An elastic model beside its controls at one budget."""

    group: Group
    """The elastic model."""
    num_loops: int
    """M."""
    fixed: Group | None
    """Trained for M loops."""
    loopformer: Group | None
    """`LOOPFORMER`, run at M loops."""

    @property
    def best(self) -> Group | None:
        """The better of the two, by the median."""
        return _best([group for group in (self.fixed, self.loopformer) if group is not None], self.num_loops)

    @property
    def ratio(self) -> Spread | None:
        """The elastic model's loss by the better's, over seeds."""
        return None if self.best is None else self.ratio_to(self.best)

    def ratio_to(self, other: Group) -> Spread | None:
        """The elastic model's loss by another's, over seeds."""
        return paired(self.group, other, loss_at(self.num_loops), combine=lambda a, b: a / b)


def against_controls(groups: Groups, group: Group) -> list[AtBudget]:
    """Return an elastic model beside its controls at every budget up to T."""
    loopformers = [g for g in groups if (g.system, g.variant) == (LOOPFORMER, group.variant)]
    return [
        AtBudget(
            group=group,
            num_loops=num_loops,
            fixed=trained_for(groups, num_loops, group.variant),
            loopformer=_best([g for g in loopformers if g.loops >= num_loops], num_loops),
        )
        for num_loops in budgets_of(group)
        if num_loops <= group.loops
    ]


def _best(found: Sequence[Group], num_loops: int) -> Group | None:
    medians = [(spread.median, i) for i, g in enumerate(found) if (spread := g.spread(loss_at(num_loops))) is not None]
    return found[min(medians)[1]] if medians else None
