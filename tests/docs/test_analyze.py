"""What the page on analysis says is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

from loopformers.studies.analysis_report import MEASURES

PAGE = (Path(__file__).parents[2] / "docs" / "analyze.md").read_text(encoding="utf-8")


def test_the_example_runs_and_its_loops_move():
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], names)
    assert len(names["moved"]) == 3
    assert all(moved > 0 for moved in names["moved"])
    assert names["h"][0].shape == (1, 5, 24)


def test_every_measure_of_the_report_has_a_row():
    rows = re.findall(r"^\| ([^|]+) \|", PAGE, re.M)
    for measure in MEASURES:
        assert any(row.strip("*").startswith(measure.title.split(",")[0]) for row in rows), measure.title
