"""One table value, rendered for a terminal, Markdown, HTML, LaTeX, CSV and JSON.

A table knows its units and formats, so that a number reads the same wherever it is shown; raw values travel in CSV and
JSON. This module imports neither rich nor matplotlib until a rendering asks for it.
"""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from loopformers.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    import rich.table

__all__ = ["ALIGNMENTS", "MISSING", "Alignment", "Column", "Table", "Value"]

Alignment = Literal["left", "center", "right"]
ALIGNMENTS: tuple[str, ...] = get_args(Alignment)

Value = str | int | float | bool | None
"""What a cell holds; None and nan are missing."""

MISSING = "\N{EN DASH}"
"""How a missing value is shown."""

INFINITY = "\N{INFINITY}"
"""How an infinite value is shown; JSON, which has none, holds the string `inf` or `-inf`."""

YES, NO = "yes", "no"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """How one column is named and shown.

    Args:
        key: Name of the value in a row, and in CSV and JSON.
        title: Heading.
        unit: Shown beside the heading: "nats per token". Empty: none.
        align: left, center or right. Numbers read best on the right.
        format: A format specification for numbers, as in `format(value, spec)`: `.3f`, `,d`, `.2%`. Empty: as it is.

    Raises:
        ConfigError: Unknown alignment, or a format that numbers do not take.
    """

    key: str
    title: str
    unit: str = ""
    align: Alignment = "left"
    format: str = ""

    def __post_init__(self) -> None:
        if self.align not in ALIGNMENTS:
            raise ConfigError(unknown_name("align", self.align, ALIGNMENTS))
        try:
            format(1, self.format)
        except ValueError as error:
            raise ConfigError(
                f"format={self.format!r} of column {self.key!r} is no format of a number ({error}); write for example .3f"
            ) from error

    @property
    def heading(self) -> str:
        """Title and unit: `loss (nats per token)`."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def text(self, value: Value) -> str:
        """Show one value.

        Raises:
            ConfigError: A fraction in a column of whole numbers.
        """
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return MISSING
        if isinstance(value, bool):
            return YES if value else NO
        if isinstance(value, float) and math.isinf(value):
            return INFINITY if value > 0 else f"-{INFINITY}"
        if isinstance(value, int | float):
            # A format for whole numbers refuses floats, and 3.0 in such a column is the number 3.
            number = int(value) if self.format.endswith("d") and value == int(value) else value
            try:
                return format(number, self.format)
            except ValueError as error:
                raise ConfigError(
                    f"column {self.key!r} shows whole numbers (format={self.format!r}), and {value!r} is none; "
                    "round it, or give the column a format such as .1f"
                ) from error
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table. Rows may leave values out; a value without a column is an error.

    Args:
        title: Caption.
        columns: In order; keys are distinct.
        rows: One mapping a row, from a column's key to its value.
        note: A sentence below the table: what was measured and how.

    Raises:
        ConfigError: No columns, one key twice, or a row with a value that no column shows.

    Example:
        >>> columns = (Column(key="model", title="model"), Column(key="loss", title="loss", unit="nats", format=".2f"))
        >>> print(Table(title="Losses", columns=columns, rows=({"model": "flt", "loss": 4.913},)).to_markdown())
        **Losses**
        <BLANKLINE>
        | model | loss (nats) |
        | :--- | :--- |
        | flt | 4.91 |
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "rows", tuple(self.rows))
        keys = [column.key for column in self.columns]
        if not keys:
            raise ConfigError(f"table {self.title!r} has no columns; give at least one")
        if len(set(keys)) < len(keys):
            raise ConfigError(f"table {self.title!r} has columns {keys}, and each key must be there once")
        for row in self.rows:
            if unknown := sorted(row.keys() - set(keys)):
                raise ConfigError(f"table {self.title!r}: " + unknown_name("column", unknown[0], keys))

    def texts(self) -> list[list[str]]:
        """Every cell as it is shown, row by row."""
        return [[column.text(row.get(column.key)) for column in self.columns] for row in self.rows]

    def to_rich(self) -> rich.table.Table:
        """Return a table for a terminal. Values are plain text: brackets in them are no markup."""
        import rich.box
        import rich.table
        from rich.text import Text

        table = rich.table.Table(
            title=Text(self.title, style="bold"),
            caption=Text(self.note) if self.note else None,
            box=rich.box.SIMPLE_HEAD,
            show_edge=False,
            title_justify="left",
            caption_justify="left",
        )
        for column in self.columns:
            heading = Text(column.title)
            if column.unit:
                heading.append(f"\n{column.unit}", style="dim")
            table.add_column(heading, justify=column.align, vertical="bottom", overflow="fold")
        for cells in self.texts():
            table.add_row(*(Text(cell) for cell in cells))
        return table

    def to_markdown(self) -> str:
        """Return a Markdown table under its title in bold, without a newline at the end."""
        rules = {"left": ":---", "center": ":---:", "right": "---:"}
        lines = [
            [_markdown(column.heading) for column in self.columns],
            [rules[column.align] for column in self.columns],
        ]
        lines += [[_markdown(cell) for cell in cells] for cells in self.texts()]
        parts = [f"**{_markdown(self.title)}**", "\n".join(f"| {' | '.join(cells)} |" for cells in lines)]
        if self.note:
            parts.append(_markdown(self.note))
        return "\n\n".join(parts)

    def to_html(self) -> str:
        """Return a `<table>` element; all text is escaped, alignment is a class (`left`, `center`, `right`)."""
        head = "".join(
            f'<th scope="col" class="{column.align}">{html.escape(column.title)}'
            + (f'<span class="unit">{html.escape(column.unit)}</span>' if column.unit else "")
            + "</th>"
            for column in self.columns
        )
        body = "".join(f"<tr>{self._html_cells(cells)}</tr>" for cells in self.texts())
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _html_cells(self, cells: Sequence[str]) -> str:
        tags = ['th scope="row"', *["td"] * (len(cells) - 1)]  # the first cell names its row
        return "".join(
            f'<{tag} class="{column.align}">{html.escape(cell)}</{tag.split()[0]}>'
            for tag, column, cell in zip(tags, self.columns, cells, strict=True)
        )

    def to_latex(self) -> str:
        """Return a `table` environment with rules of the package booktabs, under its title as caption."""
        heading = " & ".join(_latex(column.heading) for column in self.columns)
        rows = [" & ".join(map(_latex, cells)) + " \\\\" for cells in self.texts()]
        alignment = "".join(column.align[0] for column in self.columns)
        caption = _latex(self.title) + (f". {_latex(self.note)}" if self.note else "")
        lines = [
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{caption}}}",
            f"\\begin{{tabular}}{{{alignment}}}",
            "\\toprule",
            f"{heading} \\\\",
            "\\midrule",
            *rows,
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
        ]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Return raw values under their keys, RFC 4180 with `\\n` line ends; a missing value is an empty field."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        for row in self.rows:
            values = [_json_value(row.get(column.key)) for column in self.columns]
            writer.writerow(["" if value is None else str(value) for value in values])
        return buffer.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return title, columns, note and raw rows, ready for `json.dumps(..., allow_nan=False)`."""
        return {
            "title": self.title,
            "columns": [{"key": c.key, "title": c.title, "unit": c.unit} for c in self.columns],
            "rows": [{c.key: _json_value(row.get(c.key)) for c in self.columns} for row in self.rows],
            "note": self.note,
        }


def _json_value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _markdown(text: str) -> str:
    for character in "\\`*_[]<>|":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\N{PLUS-MINUS SIGN}": "$\\pm$",
    INFINITY: "$\\infty$",
    MISSING: "--",
}
"""What characters become that LaTeX reads as commands, or has none of."""


def _latex(text: str) -> str:
    return " ".join("".join(LATEX.get(character, character) for character in text).split())
