"""The report of the stability study: one HTML page, its figures as PNG and its tables as CSV, and what is printed.

report.html            the page, with everything inside
figures/<name>.png     its figures
tables/<name>.csv      its tables, and `cells.csv`, one row a cell
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformers.files import write_whole
from loopformers.report.page import Block, Page, Picture, Section, save_page
from loopformers.report.plots import figure_bytes, save_figure
from loopformers.report.tables import Column, Table
from loopformers.studies.engine import Study
from loopformers.studies.groups import Groups
from loopformers.studies.stability_claims import Claim, claims_table, judge_claims, summarise
from loopformers.studies.stability_figures import StudyFigure, stability_figures
from loopformers.studies.stability_tables import (
    budget_table,
    cells_table,
    cost_table,
    difficulty_table,
    loop_use_table,
    outcome_table,
    solved_table,
    training_table,
)

__all__ = ["StabilityReport", "write_stability_report"]

REPORT_FILE = "report.html"
FIGURES_DIR, TABLES_DIR = "figures", "tables"


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityReport:
    """What the results of a study say."""

    study: Study
    summary: str
    """A few sentences."""
    claims: tuple[Claim, ...]
    """What was and was not reproduced."""
    tables: Mapping[str, Table]
    """By the name of their file."""
    page: Path | None
    """The HTML page; None where no cell has an outcome."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values; curves are in the results file."""
        return {
            "title": self.study.title,
            "summary": self.summary,
            "claims": claims_table(self.claims).to_dict()["rows"],
            "tables": {name: table.to_dict() for name, table in self.tables.items()},
            "failures": [{"cell": failure.cell, "error": failure.error} for failure in self.study.failures],
            "missing": list(self.study.missing),
            "report": None if self.page is None else str(self.page),
        }


def write_stability_report(study: Study) -> StabilityReport:
    """Write page, figures and tables into the study's folder; what an earlier report left there is replaced.

    Args:
        study: With any number of outcomes; without one, nothing is written.
    """
    groups = Groups(study.outcomes)
    claims = tuple(judge_claims(groups))
    summary = summarise(groups, claims, num_missing=len(study.missing), num_failed=len(study.failures))
    if not groups.all:
        return StabilityReport(study=study, summary=summary, claims=claims, tables={}, page=None)
    tables = {
        "outcomes": outcome_table(groups),
        "claims": claims_table([claim for claim in claims if not claim.variant or claim.outcome != "not tested"]),
        "loop-use": loop_use_table(groups),
        "training": training_table(groups),
        "budgets": budget_table(groups),
        "solved": solved_table(groups),
        "difficulty": difficulty_table(groups),
        "costs": cost_table(groups),
        "cells": cells_table(study.results),
    }
    tables = {name: table for name, table in tables.items() if table.rows}
    for name, table in tables.items():
        write_whole(study.folder / TABLES_DIR / f"{name}.csv", table.to_csv())
    figures = {figure.name: figure for figure in stability_figures(groups)}
    for name, figure in figures.items():
        save_figure(figure.figure, study.folder / FIGURES_DIR / f"{name}.png")
    page = save_page(_page(study, summary, tables, figures), study.folder / REPORT_FILE)
    return StabilityReport(study=study, summary=summary, claims=claims, tables=tables, page=page)


def _page(study: Study, summary: str, tables: Mapping[str, Table], figures: Mapping[str, StudyFigure]) -> Page:
    plan: list[tuple[str, list[str], list[str]]] = [
        ("What was reproduced", ["claims"], []),
        ("How each system ended", ["outcomes"], ["final-loss"]),
        ("Training", ["training"], ["training-loss", "gradient-norm"]),
        ("Inside the loop", [], ["residual-norm", "residual-map"]),
        ("Are the loops used?", ["loop-use"], ["budgets", "state-change"]),
        ("Every budget", ["budgets", "solved"], []),
        ("By difficulty", ["difficulty"], []),
        ("Costs", ["costs"], []),
    ]
    sections = []
    for heading, shown, drawn in plan:
        blocks: list[Block] = [tables[name] for name in shown if name in tables]
        blocks += [_picture(figures[name]) for name in drawn if name in figures]
        if blocks:
            sections.append(Section(heading, blocks))
    if study.failures or study.missing:
        sections.append(Section("Cells without an outcome", [_missing_table(study)]))
    return Page(title=study.title, lead=summary, sections=sections, footer=_footer(study))


def _picture(figure: StudyFigure) -> Picture:
    return Picture(
        content=figure_bytes(figure.figure),
        alt=figure.alt,
        caption=figure.caption,
        formula=figure.formula,
        wide=figure.wide,
    )


def _missing_table(study: Study) -> Table:
    errors = {failure.cell: failure.error for failure in study.failures}
    return Table(
        title="Cells without an outcome",
        columns=(Column(key="cell", title="cell"), Column(key="error", title="why")),
        rows=tuple({"cell": cell, "error": errors.get(cell, "not run yet")} for cell in study.missing),
        note="The same command runs them again.",
    )


def _footer(study: Study) -> str:
    first = study.outcomes[0]
    recipe, versions = first.recipe, first.versions
    model, training = recipe["model"], recipe["training"]
    seeds = sorted({str(result.axes["seed"]) for result in study.outcomes}, key=int)
    if recipe.get("task"):
        windows = f"{training['batch_size']} rows of the task {recipe['task']['name']}"
    else:
        data = recipe["data"]
        windows = f"{training['batch_size']} x {data['seq_len']} tokens of {', '.join(data['sources'])}"
    return (
        f"The first cell ({first.cell}): {model.get('num_hidden_layers')} layers of width {model.get('hidden_size')}, "
        f"{training['steps']} updates of {windows}. "
        f"Seeds {', '.join(seeds)}. loopformers {versions.get('loopformers')}, torch {versions.get('torch')}. "
        f"Made by loopformers study stability; every number is in {TABLES_DIR}/cells.csv and the curves in results.jsonl."
    )
