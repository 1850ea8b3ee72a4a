from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.md"


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_every_block_of_the_tour_runs_and_prints_what_the_page_shows():
    blocks = python_blocks(TOUR.read_text(encoding="utf-8"))
    assert len(blocks) > 8
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "tour", str(TOUR), 0)
    report: list[str] = []
    results = doctest.DocTestRunner().run(page, out=report.append)
    assert results.failed == 0, "".join(report)
    assert results.attempted == sum(block.count(">>> ") for block in blocks)


def test_the_tour_builds_each_of_the_systems_it_compares():
    text = TOUR.read_text(encoding="utf-8")
    for word in ('"lt"', '"flt"', '"loopformer"', '"elastic-flt"', "loop_states", "CacheError", "loss_parts"):
        assert word in text


def test_the_picture_is_what_its_script_draws(tmp_path):
    drawn = tmp_path / "tour.svg"
    subprocess.run([sys.executable, str(ROOT / "docs" / "images" / "tour.py"), str(drawn)], check=True)

    def shapes(path: Path) -> list[str]:  # metadata name the version of matplotlib
        return re.findall(r"<(path|use|g)\b", path.read_text(encoding="utf-8"))

    assert shapes(drawn) == shapes(ROOT / "docs" / "images" / "tour.svg")
