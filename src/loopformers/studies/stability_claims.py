"""What the stability study reproduces of the paper on fully looped transformers (arXiv 2605.18797), and what it does not.

A claim is judged on the results at hand, for each variant of a grid by itself; one that the grid cannot test says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from loopformers.studies.claims import Claim, say_claims, say_missing
from loopformers.studies.groups import Group, Groups, Variant
from loopformers.studies.measures import below_unigram, loss

__all__ = ["judge_claims", "summarise"]

COLLAPSE_MARGIN = 0.3
"""Nats below the unigram level within which lt counts as collapsed."""

LEARNED_MARGIN = 1.2
"""Nats below the unigram level that flt must be."""

LARGEST_SPREAD = 0.05
"""Nats within which flt's losses over T must lie."""

RISING_LOOPS = (3, 6, 12)
"""Numbers of loops over which lt's loss must rise."""

DEEP = 12
"""T of the claims about deep loops."""


def judge_claims(groups: Groups) -> list[Claim]:
    """Return every claim, variant by variant."""
    claims = []
    for variant in groups.variants:
        claims += [
            _lt_collapses(groups, variant),
            _flt_trains(groups, variant),
            _lt_rises(groups, variant),
            _flt_is_flat(groups, variant),
            _others_collapse(groups, variant),
            _flt_improves(groups, variant),
        ]
    return claims


def summarise(groups: Groups, claims: Sequence[Claim], *, num_missing: int, num_failed: int) -> str:
    """Say in a few sentences what was seen."""
    if not groups.all:
        return "No cell has an outcome yet."
    deepest = max(group.loops for group in groups)
    ends = []
    for group in groups:
        if group.loops == deepest and group.loops > 1:
            below = group.spread(below_unigram)
            assert below is not None, "a group has a result"
            side = f"{abs(below.median):.2f} nats {'below' if below.median >= 0 else 'above'} the unigram level"
            ends.append(f"{group.label} {side} ({group.verdicts()})")
    sentences = [f"At T = {deepest}: {'; '.join(ends)}."] if ends else []
    sentences += [*say_claims(claims), *say_missing(num_missing, num_failed)]
    return " ".join(sentences)


# -- the claims ------------------------------------------------------------------------------------------------


def _lt_collapses(groups: Groups, variant: Variant) -> Claim:
    statement = f"lt at T = {DEEP} ends within {COLLAPSE_MARGIN} nats of the unigram level on every seed"
    group = groups.find("lt", DEEP, variant)
    spread = None if group is None else group.spread(below_unigram)
    if spread is None:
        return Claim.of_paper(statement, variant, None)
    return Claim.of_paper(statement, variant, spread.high < COLLAPSE_MARGIN, _below(spread.low, spread.high))


def _flt_trains(groups: Groups, variant: Variant) -> Claim:
    statement = (
        f"flt at T = {DEEP}, with the same settings, ends more than {LEARNED_MARGIN} nats below it on every seed"
    )
    group = groups.find("flt", DEEP, variant)
    spread = None if group is None else group.spread(below_unigram)
    if spread is None:
        return Claim.of_paper(statement, variant, None)
    return Claim.of_paper(statement, variant, spread.low > LEARNED_MARGIN, _below(spread.low, spread.high))


def _lt_rises(groups: Groups, variant: Variant) -> Claim:
    statement = f"lt's loss rises with loops, from T = {' to '.join(map(str, RISING_LOOPS))}"
    found = [groups.find("lt", loops, variant) for loops in RISING_LOOPS]
    losses = _losses([group for group in found if group is not None])
    if len(losses) < len(RISING_LOOPS):
        return Claim.of_paper(statement, variant, None)
    return Claim.of_paper(
        statement, variant, losses == sorted(losses) and losses[0] < losses[-1], _listed(RISING_LOOPS, losses)
    )


def _flt_is_flat(groups: Groups, variant: Variant) -> Claim:
    statement = f"flt's loss stays within {LARGEST_SPREAD} nats over T"
    found = groups.looped_of("flt", variant)
    losses = _losses(found)
    if len(losses) < 2:
        return Claim.of_paper(statement, variant, None)
    return Claim.of_paper(
        statement, variant, max(losses) - min(losses) < LARGEST_SPREAD, _listed([g.loops for g in found], losses)
    )


def _others_collapse(groups: Groups, variant: Variant) -> Claim:
    names = ("lt-input", "lt-query", "flt-residual")
    statement = f"{', '.join(names[:-1])} and {names[-1]} collapse at T = {DEEP} too (the paper's full size)"
    found = [group for name in names if (group := groups.find(name, DEEP, variant)) is not None]
    if len(found) < len(names):
        return Claim.of_paper(statement, variant, None)
    collapsed = all(result.run["verdict"] == "collapsed" for group in found for result in group.results)
    return Claim.of_paper(
        statement, variant, collapsed, "; ".join(f"{group.system} {group.verdicts()}" for group in found)
    )


def _flt_improves(groups: Groups, variant: Variant) -> Claim:
    statement = "flt improves with every added loop, T = 1 included (the paper's full size, from T = 3)"
    found = groups.looped_of("flt", variant)
    once = groups.one_pass(found[0]) if found else None
    if once is None or len(found) < 2:
        return Claim.of_paper(statement, variant, None)
    chain = [once, *found]
    losses = _losses(chain)
    falls = all(later < earlier for earlier, later in itertools.pairwise(losses))
    return Claim.of_paper(statement, variant, falls, _listed([group.loops for group in chain], losses))


def _losses(groups: Sequence[Group]) -> list[float]:
    return [spread.median for group in groups if (spread := group.spread(loss)) is not None]


def _below(low: float, high: float) -> str:
    """Say where losses stand by how far they are below the unigram level, negative above it."""
    if high < 0:
        low, high, side = -high, -low, "above"
    else:
        side = "below"
    return f"{_range(low, high)} nats {side}"


def _range(low: float, high: float) -> str:
    ends = f"{low:.2f}", f"{high:.2f}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _listed(loops: Sequence[int], losses: Sequence[float]) -> str:
    return ", ".join(f"T = {t}: {value:.3f}" for t, value in zip(loops, losses, strict=True))
