from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere_in_the_repository(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in headings(file), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_mentions_a_place_outside_the_repository(page):
    text = page.read_text(encoding="utf-8")
    absolute = re.findall(r"(?<![\w.:/<*~-])/(?:work|home|root|tmp|mnt|opt|usr|var|Users)/[\w./-]*", text)
    assert not absolute
    assert not re.findall(r"(?:\.\./)+shared\b", text)
