from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopformers.studies.engine import Study
from loopformers.studies.groups import Groups
from loopformers.studies.results import CellResult
from loopformers.studies.stability_claims import judge_claims, summarise
from loopformers.studies.stability_figures import stability_figures
from loopformers.studies.stability_report import write_stability_report
from loopformers.studies.stability_tables import loop_use_table, outcome_table

Make = Callable[..., CellResult]

PAPER = {
    "lt": {3: 5.4, 6: 5.9, 12: 6.4},
    "lt-input": {12: 6.3},
    "lt-query": {12: 6.35},
    "flt-residual": {12: 6.4},
    "flt": {3: 4.93, 6: 4.92, 12: 4.91},
}
"""Losses with which every claim of the paper would hold, one pass at 4.95."""


@pytest.fixture
def results(make: Make) -> list[CellResult]:
    looped = [
        make(system, loops, seed, loss + 0.01 * seed)
        for system, losses in PAPER.items()
        for loops, loss in losses.items()
        for seed in (0, 1, 2)
    ]
    return [*looped, *(make("one-pass", 1, seed, 4.95 + 0.02 * seed) for seed in (0, 1, 2))]


def outcomes(results: list[CellResult]) -> list[str]:
    return [claim.outcome for claim in judge_claims(Groups(results))]


def change(results: list[CellResult], make: Make, system: str, loops: int, loss: float | None) -> list[CellResult]:
    """Give seed 2 of a group another loss."""
    return [
        make(system, loops, 2, loss) if (r.axes["system"], r.axes["loops"], r.axes["seed"]) == (system, loops, 2) else r
        for r in results
    ]


def test_results_as_the_paper_has_them_reproduce_every_claim(results: list[CellResult]) -> None:
    assert outcomes(results) == ["reproduced"] * 6


@pytest.mark.parametrize(
    ("system", "loops", "loss", "claim"),
    [("lt", 12, 6.0, 0), ("flt", 12, 5.25, 1), ("flt", 12, None, 1), ("lt-query", 12, 5.0, 4)],
)
def test_one_seed_that_does_otherwise_undoes_a_claim_about_all(
    results: list[CellResult], make: Make, system: str, loops: int, loss: float | None, claim: int
) -> None:
    found = outcomes(change(results, make, system, loops, loss))
    assert found == ["not reproduced" if i == claim else "reproduced" for i in range(6)]


def test_claims_about_medians_follow_the_median(results: list[CellResult], make: Make) -> None:
    falling = [
        r if r.axes["loops"] != 6 else make(str(r.axes["system"]), 6, int(str(r.axes["seed"])), 5.0) for r in results
    ]
    assert outcomes(falling) == [
        "reproduced", "reproduced", "not reproduced", "not reproduced", "reproduced", "not reproduced",
    ]  # fmt: skip


def test_a_claim_without_its_cells_is_not_tested(results: list[CellResult], make: Make) -> None:
    assert outcomes([r for r in results if r.axes["system"] == "one-pass"]) == ["not tested"] * 6
    assert outcomes([make("flt", 12, 0, 5.0)]) == ["not tested", "reproduced", *["not tested"] * 4]


def test_claims_are_judged_for_each_variant(make: Make) -> None:
    def at(rate: float, loss: float) -> CellResult:
        return make("flt", 12, 0, loss, axes={"system": "flt", "loops": 12, "seed": 0, "optimizer.matrix_lr": rate})

    claims = [c for c in judge_claims(Groups([at(0.01, 6.0), at(0.03, 5.0)])) if c.outcome != "not tested"]
    assert [(c.variant, c.outcome) for c in claims] == [
        ("matrix_lr 0.01", "not reproduced"), ("matrix_lr 0.03", "reproduced"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "numbers"),
    [
        ((6.41, 6.43), "0.01 to 0.03 nats above"),
        ((6.42,), "0.02 nats above"),
        ((6.3, 6.35), "0.05 to 0.10 nats below"),
        ((6.38, 6.42), "-0.02 to 0.02 nats below"),
    ],
)
def test_a_claim_says_on_which_side_of_the_unigram_level_losses_are(losses, numbers, make: Make) -> None:
    cells = [make("lt", 12, seed, loss) for seed, loss in enumerate(losses)]
    assert judge_claims(Groups(cells))[0].evidence == numbers


def test_the_summary_says_what_was_seen_and_what_was_not(results: list[CellResult], make: Make) -> None:
    changed = change(results, make, "flt", 12, None)
    groups = Groups(changed)
    text = summarise(groups, judge_claims(groups), num_missing=2, num_failed=1)
    assert text.startswith("At T = 12: lt 0.01 nats above the unigram level (3 collapsed); ")
    assert "flt 1.48 nats below the unigram level (2 stable, 1 exploding)." in text
    assert "Reproduced: lt at T = 12 ends within 0.3 nats of the unigram level on every seed; " in text
    assert (
        "Not reproduced: flt at T = 12, with the same settings, ends more than 1.2 nats below it on every seed." in text
    )
    assert text.endswith("2 cells have no outcome, 1 of them because they failed.")
    assert summarise(Groups([]), [], num_missing=3, num_failed=0) == "No cell has an outcome yet."


def test_t_1_stands_beside_every_t(results: list[CellResult]) -> None:
    rows = outcome_table(Groups(results)).rows
    assert len(rows) == 3 + 3 + 3 + 1  # groups
    assert {row["one_pass"] for row in rows} == {4.97}
    by_name = {(row["system"], row["loops"]): row for row in rows}
    flt = by_name["flt", 12]
    assert (flt["loss"], flt["low"], flt["high"], flt["verdicts"]) == (4.92, 4.91, 4.93, "3 stable")
    assert flt["gain"] == pytest.approx(0.05)  # 0.04, 0.05, 0.06 by seed
    assert by_name["lt", 12]["below"] == pytest.approx(-0.01)
    assert by_name["one-pass", 1]["gain"] is None


def test_loop_use_shows_fewer_loops_more_loops_and_ablations(results: list[CellResult]) -> None:
    table = loop_use_table(Groups(results))
    row = next(row for row in table.rows if (row["system"], row["loops"]) == ("flt", 12))
    assert (row["one"], row["trained"], row["most"]) == pytest.approx((5.22, 4.92, 5.02))
    assert (row["swapped"], row["zeroed"], row["most_loops"]) == pytest.approx((0.5, 0.75, 16))
    assert (row["first_change"], row["last_change"]) == (0.5, 0.5**11)
    assert all(row["loops"] != 1 for row in table.rows)


def test_a_task_is_reported_by_questions_answered_exactly(make: Make, tmp_path: Path) -> None:
    def solve(seed: int, easy: float) -> CellResult:
        budgets = [
            {"num_loops": m, "schedule": ",".join([f"1/{m}"] * m), "loss": 1.0, "solved": (easy + 0.5) / 2 - 0.01 * m,
             "solved_by_difficulty": {"1": easy, "2": 0.5}}
            for m in (2, 1)
        ]  # fmt: skip
        result = make("flt", 2, seed, 1.0)
        recipe = {name: value for name, value in result.recipe.items() if name != "data"}
        run = {**result.run, "budgets": budgets}
        return make("flt", 2, seed, 1.0, run=run, recipe={**recipe, "task": {"name": "pointer_chasing"}})

    results = (solve(0, 0.9), solve(1, 0.7))
    report = write_stability_report(Study(tmp_path, "A task", tuple(r.cell for r in results), results))
    (by_difficulty,), (by_budget,) = report.tables["difficulty"].rows, report.tables["solved"].rows
    assert (by_difficulty["difficulty 1"], by_difficulty["difficulty 2"]) == pytest.approx((0.8, 0.5))
    assert (by_difficulty["solved"], by_difficulty["low"], by_difficulty["high"]) == pytest.approx((0.63, 0.58, 0.68))
    assert (by_budget["1"], by_budget["2"]) == pytest.approx((0.64, 0.63))
    page = (tmp_path / "report.html").read_text()
    assert "rows of the task pointer_chasing" in page
    assert "By difficulty" in page


def test_figures_have_a_panel_a_system_with_t_1_in_each(results: list[CellResult]) -> None:
    figures = {figure.name: figure for figure in stability_figures(Groups(results))}
    assert list(figures) == [
        "final-loss", "training-loss", "gradient-norm", "residual-norm", "residual-map", "budgets", "state-change",
    ]  # fmt: skip
    for name in ("training-loss", "gradient-norm", "budgets"):
        axes = figures[name].figure.axes
        assert [ax.get_title(loc="left") for ax in axes] == list(PAPER), name
        labels = [[drawn.get_label() for drawn in ax.get_lines()] for ax in axes]
        assert all(label[0] == "T = 1" for label in labels), name
        assert labels[0][:4] == ["T = 1", "T = 3", "T = 6", "T = 12"]
    (overview,) = figures["final-loss"].figure.axes
    assert [float(x) for x in overview.get_lines()[0].get_xdata()] == [1, 3, 6, 12]
    assert all(figure.alt and figure.caption and figure.formula for figure in figures.values())


def test_a_study_without_loops_or_curves_still_has_a_report(make: Make, tmp_path: Path) -> None:
    only = make("one-pass", 1, 0, 5.0)
    study = Study(tmp_path, "One", (only.cell,), (only,))
    assert write_stability_report(study).page is not None
    assert not (tmp_path / "figures").exists()
    broken = make("lt", 3, 0, None, curves={}, verdicts=[])
    report = write_stability_report(Study(tmp_path / "b", "Two", (broken.cell,), (broken,)))
    assert "exploding" in report.summary


def test_the_report_is_one_page_with_png_and_csv_beside_it(
    results: list[CellResult], make: Make, tmp_path: Path
) -> None:
    results = [r for r in results if r.axes["seed"] == 0 and r.axes["loops"] in (1, 12)]
    failure = CellResult(
        cell="lt_T9_seed0", status="failed", axes={"system": "lt", "loops": 9, "seed": 0}, recipe={}, error="E: <no>"
    )
    cells = (*(r.cell for r in results), failure.cell, "lt_T9_seed1")
    report = write_stability_report(Study(tmp_path, "A <study>", cells, (*results, failure)))
    page = (tmp_path / "report.html").read_text()
    assert report.page == tmp_path / "report.html"
    assert "A &lt;study&gt;" in page
    assert "E: &lt;no&gt;" in page
    assert "lt_T9_seed1" in page
    assert page.count("<img") == 7
    assert 'src="http' not in page
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "final-loss.png", "training-loss.png", "gradient-norm.png", "residual-norm.png", "residual-map.png", "budgets.png",
        "state-change.png",
    }  # fmt: skip
    with (tmp_path / "tables" / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["cell"] for row in rows] == [*(r.cell for r in results), failure.cell]
    assert (rows[0]["loss"], rows[0]["verdict"], rows[0]["loss_at_1"], rows[-1]["error"]) == (
        "6.4",
        "collapsed",
        "6.7",
        "E: <no>",
    )
    json.dumps(report.to_json(), allow_nan=False)
    assert report.to_json()["missing"] == ["lt_T9_seed0", "lt_T9_seed1"]


def test_nothing_is_written_where_no_cell_has_an_outcome(tmp_path: Path) -> None:
    report = write_stability_report(Study(tmp_path / "new", "None", ("a",), ()))
    assert (report.page, dict[str, Any](report.tables)) == (None, {})
    assert not (tmp_path / "new").exists()
