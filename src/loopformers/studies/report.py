"""The report of a study: one HTML page, its figures as PNG and its tables as CSV.

report.html            the page, with everything inside
figures/<name>.png     its figures
tables/<name>.csv      its tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformers.files import write_whole
from loopformers.folders import sweep
from loopformers.report.page import Block, Page, Picture, Section, save_page
from loopformers.report.plots import figure_bytes, save_figure
from loopformers.report.tables import Column, Table
from loopformers.studies.claims import Claim, claims_table
from loopformers.studies.engine import Study
from loopformers.studies.group_figures import StudyFigure

__all__ = ["Plan", "StudyReport", "write_report"]

REPORT_FILE = "report.html"
FIGURES_DIR, TABLES_DIR = "figures", "tables"

Plan = Sequence[tuple[str, Sequence[str], Sequence[str]]]
"""Of a page: the heading of each section, its tables and its figures, by name; a name that is not there is passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport:
    """What the results of a study say."""

    study: Study
    summary: str
    """A few sentences."""
    claims: tuple[Claim, ...]
    """What holds and what does not."""
    tables: Mapping[str, Table]
    """By the name of their file."""
    page: Path | None
    """The HTML page; None where no cell has an outcome."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values; curves are in the results file."""
        return {
            "title": self.study.title,
            "summary": self.summary,
            "claims": claims_table(self.claims, title="").to_dict()["rows"],
            "tables": {name: table.to_dict() for name, table in self.tables.items()},
            "failures": [{"cell": failure.cell, "error": failure.error} for failure in self.study.failures],
            "missing": list(self.study.missing),
            "report": None if self.page is None else str(self.page),
        }


def write_report(
    study: Study,
    *,
    command: str,
    summary: str,
    claims: Sequence[Claim],
    tables: Mapping[str, Table],
    figures: Sequence[StudyFigure],
    plan: Plan,
) -> StudyReport:
    """Write page, figures and tables into the study's folder; what an earlier report left there is replaced.

    Args:
        study: With at least one outcome.
        command: That made it.
        summary: Above everything.
        claims: For the report's JSON.
        tables: By name; those without rows are left out.
        figures: Of the page, each with a name.
        plan: Of the page.
    """
    tables = {name: table for name, table in tables.items() if table.rows}
    for folder in (TABLES_DIR, FIGURES_DIR):
        sweep(study.folder / folder)
    for name, table in tables.items():
        write_whole(study.folder / TABLES_DIR / f"{name}.csv", table.to_csv())
    for figure in figures:
        save_figure(figure.figure, study.folder / FIGURES_DIR / f"{figure.name}.png")
    sections = _sections(study, tables, {figure.name: figure for figure in figures}, plan)
    page = Page(title=study.title, lead=summary, sections=sections, footer=_footer(study, command))
    saved = save_page(page, study.folder / REPORT_FILE)
    return StudyReport(study=study, summary=summary, claims=tuple(claims), tables=tables, page=saved)


def _sections(
    study: Study, tables: Mapping[str, Table], figures: Mapping[str, StudyFigure], plan: Plan
) -> list[Section]:
    sections = []
    for heading, shown, drawn in plan:
        blocks: list[Block] = [tables[name] for name in shown if name in tables]
        blocks += [_picture(figures[name]) for name in drawn if name in figures]
        if blocks:
            sections.append(Section(heading, blocks))
    if study.failures or study.missing:
        sections.append(Section("Cells without an outcome", [_missing_table(study)]))
    return sections


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


def _footer(study: Study, command: str) -> str:
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
        f"Made by {command}; every number is in {TABLES_DIR}/cells.csv and the curves in results.jsonl."
    )
