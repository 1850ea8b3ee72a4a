"""Claims: statements that the results of a study bear out, or do not, each with the numbers that decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loopformers.report.tables import Column, Table, Value
from loopformers.studies.groups import Variant, variant_name

__all__ = ["Claim", "Outcome", "claims_table", "say_claims", "say_missing"]

Outcome = Literal["reproduced", "not reproduced", "reached", "not reached", "not tested"]

NOT_TESTED: Outcome = "not tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One statement and what the results say of it."""

    statement: str
    outcome: Outcome
    evidence: str
    """The deciding numbers."""
    variant: str = ""
    """Of the grid; empty: it has none."""

    @classmethod
    def of_paper(cls, statement: str, variant: Variant, holds: bool | None, evidence: str = "") -> Claim:
        """Return a paper's claim; `holds=None`: the grid cannot test it."""
        outcome: Outcome = NOT_TESTED if holds is None else "reproduced" if holds else "not reproduced"
        return cls(statement=statement, outcome=outcome, evidence=evidence, variant=variant_name(variant))

    @classmethod
    def goal(cls, statement: str, variant: Variant, holds: bool | None, evidence: str = "") -> Claim:
        """Return a goal of ours; `holds=None`: the grid cannot test it."""
        outcome: Outcome = NOT_TESTED if holds is None else "reached" if holds else "not reached"
        return cls(statement=statement, outcome=outcome, evidence=evidence, variant=variant_name(variant))


def claims_table(claims: Sequence[Claim], *, title: str) -> Table:
    """Return claims as a table."""
    variant = (Column(key="variant", title="variant"),) if any(claim.variant for claim in claims) else ()
    columns = (
        Column(key="statement", title="claim"),
        *variant,
        Column(key="outcome", title="here"),
        Column(key="evidence", title="numbers"),
    )
    rows: list[dict[str, Value]] = [
        {
            "statement": claim.statement,
            **({"variant": claim.variant} if variant else {}),
            "outcome": claim.outcome,
            "evidence": claim.evidence,
        }
        for claim in claims
    ]
    return Table(title=title, columns=columns, rows=tuple(rows))


def say_claims(claims: Sequence[Claim], *, with_evidence: bool = False) -> list[str]:
    """Return a sentence for each outcome: `Reproduced: this; that.`"""
    sentences = []
    for outcome in dict.fromkeys(claim.outcome for claim in sorted(claims, key=lambda c: c.outcome.startswith("not "))):
        if outcome != NOT_TESTED:
            stated = "; ".join(_stated(claim, with_evidence) for claim in claims if claim.outcome == outcome)
            sentences.append(f"{outcome.capitalize()}: {stated}.")
    untested = sum(claim.outcome == NOT_TESTED for claim in claims)
    if untested:
        sentences.append(f"{untested} of {len(claims)} claims need cells that this grid has not.")
    return sentences


def say_missing(num_missing: int, num_failed: int) -> list[str]:
    """Return what is said of cells without an outcome, or nothing."""
    if not num_missing:
        return []
    failed = f", {num_failed} of them because they failed" if num_failed else ""
    return [f"{num_missing} cells have no outcome{failed}."]


def _stated(claim: Claim, with_evidence: bool) -> str:
    variant = f" [{claim.variant}]" if claim.variant else ""
    evidence = f" ({claim.evidence})" if with_evidence and claim.evidence else ""
    return claim.statement + variant + evidence
