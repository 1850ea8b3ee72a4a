from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loopformers.errors import ConfigError
from loopformers.report import page as page_module
from loopformers.report.page import Page, Picture, Prose, Sample, Section, save_page
from loopformers.report.plots import Curve, figure_bytes, plot_budgets
from loopformers.report.style import INK, PAPER
from loopformers.report.tables import Column, Table

VOID = {"meta", "img", "link", "br", "hr", "input"}
EVIL = '<script src="http://evil.example/x.js">&"\'</script>'


class Document(HTMLParser):
    """Refuses tags that are not closed in order, and keeps elements, their attributes and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text_in(self, tag: str) -> list[str]:
        return [data for name, data in self.texts if name == tag]


@pytest.fixture(scope="module")
def svg() -> bytes:
    return figure_bytes(plot_budgets([Curve("flt", [1, 2], [3.0, 2.0]), Curve("lt", [1, 2], [3.0, 4.0])]))


@pytest.fixture(scope="module")
def png() -> bytes:
    return figure_bytes(plot_budgets([Curve("flt", [1, 2], [3.0, 2.0])]), "png")


def make_table(title: str = "Losses", note: str = "") -> Table:
    columns = (Column(key="model", title="model"), Column(key="loss", title="loss", unit="nats", format=".2f"))
    return Table(title=title, columns=columns, rows=({"model": "flt", "loss": 4.913},), note=note)


def make_page(*blocks: Any, **fields: Any) -> Page:
    return Page(**{"title": "Report", "lead": "What came out.", "sections": [Section("Results", blocks)], **fields})


def picture(content: bytes, **fields: Any) -> Picture:
    return Picture(**{"content": content, "alt": "loss by budget", "caption": "More loops help.", **fields})


def test_a_page_is_a_well_formed_document_with_its_language_encoding_and_title(svg: bytes, png: bytes) -> None:
    blocks = [Prose("One.\n\nTwo\nlines."), make_table(note="One seed."), picture(svg), picture(png)]
    text = make_page(*blocks, Sample(title="At 4 loops", prompt="Once", continuation=" upon\na time")).to_html()
    document = Document(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert document.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in document.all("meta")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in document.all("meta")
    assert document.text_in("title") == document.text_in("h1") == ["Report"]
    assert document.text_in("p") == ["What came out.", "One.", "Two lines.", "One seed."]
    assert document.text_in("pre") == [" upon\na time"]
    assert document.text_in("td") == ["4.91"]


def test_a_page_loads_nothing_and_runs_nothing(svg: bytes, png: bytes) -> None:
    text = make_page(Prose("See."), make_table(), picture(svg), picture(png)).to_html()
    document = Document(text)
    outside = re.sub(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?:|//|@import|url\(", outside.replace("<!DOCTYPE", ""))
    assert not {tag for tag, _ in document.elements} & {"script", "link", "iframe", "object", "embed", "base"}
    assert not [name for _, attributes in document.elements for name in attributes if name.startswith("on")]
    for attributes in document.all("img"):
        assert str(attributes["src"]).startswith("data:image/")
    for attributes in document.all("a"):
        assert str(attributes["href"]).startswith("#")


def test_everything_a_caller_gives_is_escaped(png: bytes) -> None:
    blocks = [
        Prose(EVIL),
        make_table(EVIL, note=EVIL),
        picture(png, alt=EVIL, caption=EVIL, formula=EVIL),
        Sample(title=EVIL, prompt=EVIL, continuation=EVIL),
    ]
    sections = [Section(EVIL, blocks), Section("Second", [])]
    document = Document(make_page(title=EVIL, lead=EVIL, footer=EVIL, sections=sections).to_html())
    assert document.all("script") == []
    assert document.all("img")[0]["alt"] == EVIL
    for tag in ("title", "h1", "h2", "h3", "figcaption", "footer", "pre", "caption"):
        assert EVIL in document.text_in(tag), tag


def test_pictures_carry_alt_text_caption_and_formula(png: bytes) -> None:
    document = Document(make_page(picture(png, formula="exp(loss)")).to_html())
    (image,) = document.all("img")
    assert image["alt"] == "loss by budget"
    assert base64.b64decode(str(image["src"]).partition(",")[2]) == png
    assert document.text_in("figcaption") == ["More loops help."]
    assert "exp(loss)" in document.text_in("span")


def test_an_embedded_svg_changes_paper_and_ink_with_the_colour_scheme_and_points_nowhere(svg: bytes) -> None:
    kind, _, content = picture(svg).data_uri().partition(",")
    assert kind == "data:image/svg+xml;base64"
    text = base64.b64decode(content).decode()
    root = ElementTree.fromstring(text)
    style = root[0].text or ""
    assert f"--ink:{INK};" in style
    assert "@media (prefers-color-scheme:dark)" in style
    assert "var(--ink)" in text
    assert "var(--paper)" in text
    assert INK not in text.replace(style, "")
    assert PAPER not in text.replace(style, "")
    hrefs = [v for element in root.iter() for name, v in element.attrib.items() if name.rpartition("}")[2] == "href"]
    assert all(value.startswith("#") for value in hrefs)
    assert "DOCTYPE" not in text


def test_neighbouring_pictures_stand_in_one_gallery_and_others_apart(png: bytes) -> None:
    document = Document(make_page(picture(png), picture(png), Prose("Between."), picture(png)).to_html())
    assert [d for d in document.all("div") if d.get("class") == "pictures"] == [{"class": "pictures"}] * 2


def test_links_lead_to_every_section() -> None:
    sections = [Section("One", []), Section("Two", [])]
    document = Document(make_page(sections=sections).to_html())
    assert [a["href"] for a in document.all("a")] == ["#section-1", "#section-2"]
    assert [s["id"] for s in document.all("section")] == ["section-1", "section-2"]


def test_wide_tables_scroll_inside_their_own_box_and_by_keyboard() -> None:
    document = Document(make_page(make_table()).to_html())
    assert {"class": "table", "tabindex": "0", "role": "group"} in document.all("div")


def test_the_style_sheet_knows_both_modes() -> None:
    text = make_page().to_html()
    assert "color-scheme: light dark" in text
    assert "@media (prefers-color-scheme: dark)" in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": b"GIF89a..."}, r"starts with b'GIF89a..', and is neither SVG nor PNG"),
        ({"alt": "  "}, "has no alt text; say in words what it shows"),
    ],
)
def test_a_picture_that_cannot_be_shown_to_everyone_is_refused(png: bytes, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        picture(**{"content": png, **fields})


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_page(make_page(Prose("naïve – text")), tmp_path / "new" / "report.html")
    assert "naïve – text" in target.read_text(encoding="utf-8")
    assert list(target.parent.iterdir()) == [target]

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(page_module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_page(make_page(Prose("other")), target)
    assert "naïve – text" in target.read_text(encoding="utf-8")
    assert list(target.parent.iterdir()) == [target]
