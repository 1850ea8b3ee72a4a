"""Clean prose from the files that packages of documentation hold: one function a format.

Each function reads a file (`.gz` and `.dz` are decompressed) and yields its documents as (name, text), where the name
tells documents of one file apart and is empty for the only one. Markup, navigation and anchors go; headings, paragraphs
and code stay, a blank line between blocks.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import html.parser
import itertools
import re
import string
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from loopformers.errors import DataError

__all__ = ["FORMATS", "read_dict", "read_html", "read_man", "read_pod", "read_rest", "read_sword"]


def read_bytes(file: Path) -> bytes:
    """The content of a file, decompressed."""
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix in (".gz", ".dz") else data


def read_text(file: Path) -> str:
    """The text of a file: UTF-8, or Latin-1 where it is not."""
    data = read_bytes(file)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def tidy(text: str) -> str:
    """No space at line ends, no more than one blank line together, none at either end."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t\f\r\xa0]+\n", "\n", text + "\n")).strip("\n")


# -- HTML ------------------------------------------------------------------------------------------------------

VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
BLOCKS = frozenset((
    "address", "article", "aside", "blockquote", "body", "center", "dd", "details", "div", "dl", "dt", "fieldset",
    "figure", "form", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "main", "ol", "p", "pre", "section", "summary",
    "table", "tbody", "thead", "tr", "ul",
))  # fmt: skip
SKIPPED_TAGS = frozenset((
    "head", "script", "style", "nav", "header", "footer", "button", "form", "noscript", "svg", "iframe",
))  # fmt: skip
SKIPPED_CLASSES = frozenset((
    "headerlink", "related", "sphinxsidebar", "footer", "navheader", "navfooter", "toc", "toctree-wrapper",
    "contents", "docnav", "NAVHEADER", "NAVFOOTER",
))  # fmt: skip
SKIPPED_ROLES = frozenset(("navigation", "search"))


class HtmlText(html.parser.HTMLParser):
    """Collects the text of a page, a line break around every block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []
        self.num_skipped = self.num_preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        if tag in VOID:
            if tag in ("br", "hr"):
                self.parts.append("\n")
            return
        attributes = dict(attrs)
        classes = (attributes.get("class") or "").split()
        skipped = (
            tag in SKIPPED_TAGS
            or not SKIPPED_CLASSES.isdisjoint(classes)
            or attributes.get("role") in SKIPPED_ROLES
            or "hidden" in attributes
        )
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag != "li" and tag != "tr" else "\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")
        self.open.append((tag, skipped))
        self.num_skipped += skipped
        self.num_preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        """Close an element, and those inside it that were left open."""
        if all(name != tag for name, _ in self.open):
            return
        while True:
            name, skipped = self.open.pop()
            self.num_skipped -= skipped
            self.num_preformatted -= name == "pre"
            if name in BLOCKS:
                self.parts.append("\n\n" if name != "li" and name != "tr" else "\n")
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        """Keep text; outside <pre> white space is one space."""
        if not self.num_skipped:
            self.parts.append(data.replace(" ", "\0") if self.num_preformatted else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """What was collected."""
        joined = "".join(self.parts).replace("¶", "")
        return tidy(re.sub(r" *\n *", "\n", re.sub(r" {2,}", " ", joined)).replace("\0", " "))


def read_html(file: Path) -> Iterator[tuple[str, str]]:
    """A page without its head, scripts, navigation, forms and tables of contents."""
    parser = HtmlText()
    parser.feed(read_text(file))
    parser.close()
    yield "", parser.text()


# -- POD -------------------------------------------------------------------------------------------------------

POD_ENTITIES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}


def read_pod(file: Path) -> Iterator[tuple[str, str]]:
    """Perl's plain old documentation (perlpod); the code around it is left out."""
    blocks, in_pod, hidden = [], False, False
    for block in re.split(r"\n[ \t]*\n", read_text(file)):
        command = re.match(r"\s*=([a-z]\w*)[ \t]*(.*)", block, re.S)
        if command:
            name, argument = command.groups()
            in_pod = name != "cut"
            hidden = (hidden or name == "begin") and name != "end"
            if name.startswith("head") or name == "item":
                argument = re.sub(r"^[*\d.]+\s*", "", argument) if name == "item" else argument
                blocks.append(pod_inline(" ".join(argument.split())))
        elif in_pod and not hidden:
            verbatim = block.lstrip("\n")[:1] in (" ", "\t")
            blocks.append(block.strip("\n") if verbatim else pod_inline(" ".join(block.split())))
    yield "", tidy("\n\n".join(block for block in blocks if block))


def pod_inline(text: str) -> str:
    """Text without formatting codes, such as `B<...>` and `C<< ... >>`."""
    text = re.sub(r"([A-Z])<<+\s+(.*?)\s+>>+", lambda code: pod_code(code[1], code[2]), text)
    while (plain := re.sub(r"([A-Z])<([^<>]*)>", lambda code: pod_code(code[1], code[2]), text)) != text:
        text = plain
    return text.replace("\0", "<").replace("\1", ">")


def pod_code(letter: str, content: str) -> str:
    """What one formatting code prints."""
    if letter in "XZ":
        return ""
    if letter == "E":
        named = POD_ENTITIES.get(content) or html.unescape(f"&{content};")
        return named.replace("<", "\0").replace(">", "\1")
    if letter == "L":
        shown, bar, target = content.partition("|")
        return shown if bar else target or content.strip("/").replace("/", " in ").replace('"', "")
    return content


# -- reStructuredText ------------------------------------------------------------------------------------------

DROPPED_DIRECTIVES = frozenset((
    "image", "figure", "toctree", "contents", "only", "raw", "index", "kernel-doc", "kernel-figure", "include",
    "literalinclude", "highlight", "currentmodule", "module", "sectionauthor", "moduleauthor", "tabularcolumns",
    "kernel-render", "kernel-include", "cssclass", "SPDX-License-Identifier",
))  # fmt: skip
REST_INLINE = (
    (re.compile(r":[\w:+-]+:`~?!?([^`<]*?)\s*(?:<[^`>]*>)?`"), r"\1"),  # roles
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),  # links with their target
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`]+)`__?(?!\w)"), r"\1"),
    (re.compile(r"`([^`]+)`"), r"\1"),
    (re.compile(r"\s?\[[#*\w]+\]_(?!\w)"), ""),  # footnotes
    (re.compile(r"\*\*(\S(?:[^*]*\S)?)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*(\S(?:[^*]*\S)?)\*(?![\w*])"), r"\1"),
    (re.compile(r"\|(\w[\w .-]*)\|"), r"\1"),  # substitutions
)
UNDERLINE = re.compile(r"\s*([" + re.escape(string.punctuation) + r"])\1{2,}\s*")
TABLE_RULE = re.compile(r"\s*[+=-][+=\- ]{3,}\s*")


def read_rest(file: Path) -> Iterator[tuple[str, str]]:
    """reStructuredText: directives that print nothing go with their bodies, others keep their bodies."""
    kept: list[str] = []
    dropping: int | None = None  # indentation of a directive whose body is left out
    options = False
    for line in read_text(file).expandtabs().splitlines():
        indent = len(line) - len(line.lstrip())
        if dropping is not None and (not line.strip() or indent > dropping):
            continue
        dropping = None
        explicit = re.match(r"\s*\.\. ?(?:\|[^|]+\| )?([\w:+-]+?)::(.*)", line)
        if explicit:
            if explicit[1].split(":")[-1] in DROPPED_DIRECTIVES or line.lstrip().startswith(".. |"):
                dropping = indent
            elif explicit[2].strip() and explicit[1] not in ("code-block", "sourcecode", "code", "parsed-literal"):
                kept.append(" " * indent + explicit[2].strip())
            options = True
        elif re.match(r"\s*\.\.( |$)", line):
            dropping = indent  # a comment, target or footnote
        elif (options and re.match(r"\s+:[\w-]+:", line)) or UNDERLINE.fullmatch(line) or TABLE_RULE.fullmatch(line):
            continue
        else:
            options = options and not line.strip()
            kept.append(re.sub(r"::\s*$", ":", line))
    text = "\n".join(kept)
    for pattern, replacement in REST_INLINE:
        text = pattern.sub(replacement, text)
    yield "", tidy(text.replace("\\ ", ""))


# -- manual pages ----------------------------------------------------------------------------------------------

MAN_GLYPHS = {
    "aq": "'",
    "oq": "`",
    "cq": "'",
    "lq": '"',
    "rq": '"',
    "dq": '"',
    "em": "--",
    "en": "-",
    "bu": "*",
    "rs": "\\",
}
MAN_STRINGS = {"C`": "", "C'": "", 'L"': '"', 'R"': '"', "Aq": "'", "--": "--", "PI": "pi"}


def read_man(file: Path) -> Iterator[tuple[str, str]]:
    """A manual page in man(7) macros, its definitions left out."""
    lines: list[str] = []
    defining = False
    for line in read_text(file).splitlines():
        macro = re.match(r"[.'][ \t]*(\S*)[ \t]*(.*)", line)
        if defining or macro is None:
            if line.startswith(".."):
                defining = False
            elif not defining:
                lines.append(man_inline(line))
            continue
        name, arguments = macro.groups()
        text = man_inline(" ".join(a or b for a, b in re.findall(r'"((?:[^"]|"")*)"|(\S+)', arguments)))
        if name in ("de", "ig"):
            defining = True
        elif name in ("SH", "SS"):
            lines += ["", text, ""]
        elif name in ("IP", "TP", "PP", "P", "LP", "sp", "Sp", "Vb", "Ve", "RE", "RS"):
            lines += ["", re.sub(r" ?\d+n?$", "", text)] if name == "IP" and text else [""]
        elif name in ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SM", "SB"):
            lines.append(text)
    yield "", tidy("\n".join(lines))


def man_inline(text: str) -> str:
    """Text without roff escapes."""
    text = re.sub(r'\\".*', "", text)
    text = re.sub(r"\\\*\((..)|\\\*\[([^]]*)\]", lambda name: MAN_STRINGS.get(name[1] or name[2], ""), text)
    text = re.sub(r"\\\((..)|\\\[([^]]*)\]", lambda name: MAN_GLYPHS.get(name[1] or name[2], ""), text)
    text = re.sub(r"\\f(?:\(..|\[[^]]*\]|.)|\\s[+-]?\d+|\\[&|^%c/,]|\\[hvw]'[^']*'", "", text)
    return re.sub(r"\\(.)", lambda escape: {"e": "\\", "-": "-", "~": " ", "0": " "}.get(escape[1], escape[1]), text)


# -- dictionaries ----------------------------------------------------------------------------------------------

DICT_DIGITS = {
    digit: value for value, digit in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")
}


def read_dict(file: Path) -> Iterator[tuple[str, str]]:
    """A dictionary of dictd: NAME.dict.dz, and NAME.index beside it (headword, offset, length, tab-separated).

    An entry inside another is left out, and so is one that repeats another but for its first line, its headword: synonyms
    share one definition.
    """
    index = file.with_name(re.sub(r"\.dict(\.dz)?$", ".index", file.name))
    if not index.exists():
        raise DataError(f"dictionary {str(file)!r} has no index {index.name!r} beside it; unpack the package again")
    data = read_bytes(file)
    entries: dict[tuple[int, int], str] = {}
    for line in read_text(index).splitlines():
        headword, start, size = line.split("\t")[:3]
        if not headword.startswith(("00-", "00database")):  # what the dictionary says about itself
            entries.setdefault((dict_number(start), dict_number(size)), headword)
    seen: set[bytes] = set()
    end = 0
    for (offset, length), headword in sorted(entries.items(), key=lambda entry: (entry[0][0], -entry[0][1])):
        if offset < end:
            continue
        end = offset + length
        text = data[offset:end].decode("utf-8", errors="replace")
        body = hashlib.sha256((text.partition("\n")[2].strip() or text).encode()).digest()[:12]
        if body not in seen:
            seen.add(body)
            text = re.sub(r"\{([^{}]*)\}", r"\1", text).replace("\\", "")  # cross-references; pronunciations
            yield f"{headword}@{offset}", tidy(text)


def dict_number(digits: str) -> int:
    """A number in the digits A-Z a-z 0-9 + /, the highest first."""
    number = 0
    for digit in digits:
        number = number * 64 + DICT_DIGITS[digit]
    return number


# -- SWORD -----------------------------------------------------------------------------------------------------


def read_sword(file: Path) -> Iterator[tuple[str, str]]:
    """A compressed commentary of SWORD (zCom, zCom4): each compressed block, a book or a chapter, is one document.

    NAME.?zs lists the blocks as three 32-bit numbers (offset, compressed size, size), NAME.?zz holds them. The index of
    verses is not needed: it says where in its block each comment begins.
    """
    blocks = file.with_name(file.name[:-1] + "z")
    data = blocks.read_bytes()
    for number, (offset, size, _) in enumerate(struct.iter_unpack("<III", file.read_bytes())):
        text = zlib.decompress(data[offset : offset + size]).decode("utf-8", errors="replace")
        text = re.sub(r"<(?:title|div|lb|p|l|lg|item|chapter)\b[^>]*>|</(?:title|p|l|lg|item)>", "\n\n", text)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
        lines = (" ".join(line.split()) for line in text.splitlines())
        yield str(number), tidy("\n\n".join(line for line, _ in itertools.groupby(lines) if line))


FORMATS: Mapping[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "html": read_html,
    "pod": read_pod,
    "rest": read_rest,
    "man": read_man,
    "dict": read_dict,
    "sword": read_sword,
}
"""Readers by the names that packages are listed with."""
