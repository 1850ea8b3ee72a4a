from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| **")]


def test_terms_are_alphabetical_and_each_has_a_meaning():
    terms = [re.sub(r"[^a-z -]", "", row[0].lower()) for row in rows()]
    assert terms == sorted(terms)
    assert all(len(row) == 3 and row[1] for row in rows())


def test_every_verdict_objective_and_stage_is_in_the_glossary():
    from typing import get_args

    from loopformers.analysis.stability import VERDICTS
    from loopformers.objectives import OBJECTIVES
    from loopformers.recurrence.slots import Stage

    text = "\n".join(" | ".join(row) for row in rows())
    for word in (*VERDICTS, *OBJECTIVES, *get_args(Stage)):
        assert word in text
