"""The report of the elastic study: see `loopformers.studies.report` for its files."""

from __future__ import annotations

from loopformers.studies.claims import claims_table
from loopformers.studies.elastic_claims import judge_goals, summarise
from loopformers.studies.elastic_figures import elastic_figures
from loopformers.studies.elastic_tables import (
    budgets_table,
    compute_table,
    controls_table,
    difficulty_by_budget_table,
    parts_table,
    ranges_table,
)
from loopformers.studies.engine import Study
from loopformers.studies.group_tables import cells_table, cost_table, difficulty_table, solved_table
from loopformers.studies.groups import Groups
from loopformers.studies.report import Plan, StudyReport, write_report

__all__ = ["write_elastic_report"]

PLAN: Plan = (
    ("Which goals are reached", ["claims"], []),
    ("Every budget", ["budgets", "ranges"], ["budgets", "flops"]),
    ("One model, or one for each budget", ["controls"], ["ratios"]),
    ("What changes cost", ["parts"], []),
    ("Equal updates, equal training compute", ["compute"], []),
    ("Questions answered exactly", ["solved", "difficulty", "difficulty-by-budget"], ["solved"]),
    ("Costs", ["costs"], []),
)


def write_elastic_report(study: Study) -> StudyReport:
    """Write page, figures and tables into the study's folder; what an earlier report left there is replaced.

    Args:
        study: With any number of outcomes; without one, nothing is written.
    """
    groups = Groups(study.outcomes)
    goals = judge_goals(groups)
    summary = summarise(groups, goals, num_missing=len(study.missing), num_failed=len(study.failures))
    if not groups.all:
        return StudyReport(study=study, summary=summary, claims=tuple(goals), tables={}, page=None)
    tables = {
        "claims": claims_table(
            [goal for goal in goals if not goal.variant or goal.outcome != "not tested"],
            title="Which goals are reached, and which are not",
        ),
        "budgets": budgets_table(groups),
        "ranges": ranges_table(groups),
        "controls": controls_table(groups),
        "parts": parts_table(groups),
        "compute": compute_table(groups),
        "solved": solved_table(groups),
        "difficulty": difficulty_table(groups),
        "difficulty-by-budget": difficulty_by_budget_table(groups),
        "costs": cost_table(groups),
        "cells": cells_table(study.results),
    }
    return write_report(
        study,
        command="loopformers study elastic",
        summary=summary,
        claims=goals,
        tables=tables,
        figures=elastic_figures(groups),
        plan=PLAN,
    )
