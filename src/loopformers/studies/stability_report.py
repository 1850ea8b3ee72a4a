"""The report of the stability study: see `loopformers.studies.report` for its files."""

from __future__ import annotations

from loopformers.studies.claims import claims_table
from loopformers.studies.engine import Study
from loopformers.studies.group_tables import cells_table, cost_table, difficulty_table, solved_table
from loopformers.studies.groups import Groups
from loopformers.studies.report import Plan, StudyReport, write_report
from loopformers.studies.stability_claims import judge_claims, summarise
from loopformers.studies.stability_figures import stability_figures
from loopformers.studies.stability_tables import budget_table, loop_use_table, outcome_table, training_table

__all__ = ["write_stability_report"]

PLAN: Plan = (
    ("What was reproduced", ["claims"], []),
    ("How each system ended", ["outcomes"], ["final-loss"]),
    ("Training", ["training"], ["training-loss", "gradient-norm"]),
    ("Inside the loop", [], ["residual-norm", "residual-map"]),
    ("Are the loops used?", ["loop-use"], ["budgets", "state-change"]),
    ("Every budget", ["budgets", "solved"], []),
    ("By difficulty", ["difficulty"], []),
    ("Costs", ["costs"], []),
)


def write_stability_report(study: Study) -> StudyReport:
    """Write page, figures and tables into the study's folder; what an earlier report left there is replaced.

    Args:
        study: With any number of outcomes; without one, nothing is written.
    """
    groups = Groups(study.outcomes)
    claims = tuple(judge_claims(groups))
    summary = summarise(groups, claims, num_missing=len(study.missing), num_failed=len(study.failures))
    if not groups.all:
        return StudyReport(study=study, summary=summary, claims=claims, tables={}, page=None)
    tables = {
        "outcomes": outcome_table(groups),
        "claims": claims_table(
            [claim for claim in claims if not claim.variant or claim.outcome != "not tested"],
            title="What was reproduced, and what was not",
        ),
        "loop-use": loop_use_table(groups),
        "training": training_table(groups),
        "budgets": budget_table(groups),
        "solved": solved_table(groups),
        "difficulty": difficulty_table(groups),
        "costs": cost_table(groups),
        "cells": cells_table(study.results),
    }
    return write_report(
        study,
        command="loopformers study stability",
        summary=summary,
        claims=claims,
        tables=tables,
        figures=stability_figures(groups),
        plan=PLAN,
    )
