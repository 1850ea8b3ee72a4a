"""One self-contained HTML page: prose, tables and pictures in a single file that loads nothing from anywhere.

Pictures travel inside the file, styles are inline, there is no script. The page follows the reader's light or dark mode;
SVG pictures of `loopformers.report.plots` change their paper and ink with it.
"""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loopformers.errors import ConfigError
from loopformers.files import write_whole
from loopformers.report.style import GRID, INK, MUTED, PAPER
from loopformers.report.tables import Table

__all__ = ["Block", "Page", "Picture", "Prose", "Sample", "Section", "save_page"]

DARK = {INK: "#e6edf3", MUTED: "#9198a1", GRID: "#343b45", PAPER: "#151b23"}
"""What the colours of plots become in dark mode."""

STYLE_FILE = Path(__file__).with_name("page.css")


@dataclass(frozen=True, slots=True)
class Prose:
    """Paragraphs of plain text, with an empty line between two."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture with what a reader needs to judge it.

    Args:
        content: Bytes of an SVG or PNG file, as `figure_bytes` returns.
        alt: What the picture shows, for those who do not see it.
        caption: What it means.
        formula: How the shown quantity is computed.
        wide: Take the whole width of the page: many panels.

    Raises:
        ConfigError: Neither SVG nor PNG, or no alternative text.
    """

    content: bytes
    alt: str
    caption: str
    formula: str = ""
    wide: bool = False

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ConfigError(f"the picture captioned {self.caption!r} has no alt text; say in words what it shows")
        if not (self._is_png or self._is_svg):
            raise ConfigError(
                f"the picture captioned {self.caption!r} starts with {self.content[:8]!r}, and is neither SVG nor PNG; "
                "make it with figure_bytes"
            )

    @property
    def _is_png(self) -> bool:
        return self.content.startswith(b"\x89PNG\r\n\x1a\n")

    @property
    def _is_svg(self) -> bool:
        return b"<svg" in self.content[:2000]

    def data_uri(self) -> str:
        """Return the picture as the value of an `src` attribute."""
        content = self.content if self._is_png else _follow_dark_mode(self.content)
        kind = "png" if self._is_png else "svg+xml"
        return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text that a model wrote, after the text that it was given."""

    title: str
    prompt: str
    continuation: str


Block = Prose | Picture | Table | Sample
"""What a section is made of."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it. Pictures that follow each other stand side by side where there is room."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A report.

    Args:
        title: Of the page.
        lead: One sentence: what was done and what came out.
        sections: In order.
        footer: Where the numbers come from: the command, the version.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    footer: str = ""

    def to_html(self) -> str:
        """Return the whole document. All text is escaped."""
        links = "".join(
            f'<li><a href="#section-{i}">{html.escape(section.heading)}</a></li>'
            for i, section in enumerate(self.sections, start=1)
        )
        body = "\n".join(_section(section, i) for i, section in enumerate(self.sections, start=1))
        navigation = f'<nav aria-label="Sections"><ol>{links}</ol></nav>' if len(self.sections) > 1 else ""
        footer = f"<footer>{html.escape(self.footer)}</footer>\n" if self.footer else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self.title)}</title>\n<style>\n{STYLE_FILE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
            f'<header>\n<h1>{html.escape(self.title)}</h1>\n<p class="lead">{html.escape(self.lead)}</p>\n{navigation}\n'
            f"</header>\n<main>\n{body}\n</main>\n{footer}</body>\n</html>\n"
        )


def save_page(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write a page as one UTF-8 file, which appears whole or not at all."""
    return write_whole(path, page.to_html())


def _section(section: Section, number: int) -> str:
    parts: list[str] = []
    pictures: list[str] = []
    for block in section.blocks:
        if isinstance(block, Picture):
            pictures.append(_picture(block))
            continue
        parts += _gallery(pictures)
        pictures = []
        match block:
            case Prose():
                parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in _paragraphs(block.text)]
            case Table():
                parts.append(f'<div class="table" tabindex="0" role="group">{block.to_html()}</div>')
                if block.note:
                    parts.append(f'<p class="note">{html.escape(block.note)}</p>')
            case Sample():
                parts.append(
                    f'<div class="sample"><h3>{html.escape(block.title)}</h3><pre><span class="prompt">'
                    f"{html.escape(block.prompt)}</span>{html.escape(block.continuation)}</pre></div>"
                )
    parts += _gallery(pictures)
    content = "\n".join(parts)
    return f'<section id="section-{number}">\n<h2>{html.escape(section.heading)}</h2>\n{content}\n</section>'


def _gallery(pictures: Sequence[str]) -> list[str]:
    return [f'<div class="pictures">\n{"".join(pictures)}</div>'] if pictures else []


def _picture(picture: Picture) -> str:
    formula = f'<span class="formula">{html.escape(picture.formula)}</span>' if picture.formula else ""
    kind = ' class="wide"' if picture.wide else ""
    return (
        f'<figure{kind}><img src="{picture.data_uri()}" alt="{html.escape(picture.alt)}">'
        f"<figcaption>{html.escape(picture.caption)}{formula}</figcaption></figure>\n"
    )


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _follow_dark_mode(svg: bytes) -> bytes:
    """Have an SVG of ours take its paper, ink and lines from the reader's colour scheme.

    The four colours become custom properties of the picture itself: an embedded picture does not see the page's styles.
    """
    text = svg.decode("utf-8")
    names = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"}
    for color, name in names.items():
        text = text.replace(color, f"var({name})")
    light = "".join(f"{name}:{color};" for color, name in names.items())
    dark = "".join(f"{name}:{DARK[color]};" for color, name in names.items())
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    opening, close, body = text[text.index("<svg") :].partition(">")  # without the prologue, which names an address
    return f"{opening}{close}{style}{body}".encode()
