from __future__ import annotations

import csv
import io
import json
import math
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from loopformers.errors import ConfigError
from loopformers.report.tables import Column, Table

COLUMNS = (
    Column(key="model", title="model"),
    Column(key="loss", title="loss", unit="nats per token", align="right", format=".3f"),
    Column(key="steps", title="steps", align="right", format=",d"),
    Column(key="collapsed", title="collapsed", align="center"),
)


def make_table(*rows: dict[str, Any], **fields: Any) -> Table:
    return Table(**{"title": "Final losses", "columns": COLUMNS, "rows": rows, **fields})


TABLE = make_table(
    {"model": "flt", "loss": 4.91349, "steps": 12000, "collapsed": False},
    {"model": "lt", "loss": math.nan, "collapsed": True},
    {"model": "base", "loss": math.inf, "steps": 3.0},
    note="Validation loss after the last step.",
)


def in_terminal(table: Table, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table.to_rich())
    return console.file.getvalue()  # type: ignore[attr-defined]


class Cells(HTMLParser):
    """Collects cells by row, and refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data


def test_values_follow_the_format_of_their_column_and_missing_ones_are_an_en_dash() -> None:
    assert TABLE.texts() == [
        ["flt", "4.913", "12,000", "no"],
        ["lt", "–", "–", "yes"],
        ["base", "∞", "3", "–"],
    ]


def test_a_column_of_whole_numbers_takes_whole_floats_and_refuses_fractions() -> None:
    column = Column(key="x", title="x", format=",d")
    assert column.text(-4.0) == "-4"
    with pytest.raises(ConfigError, match=r"column 'x' shows whole numbers .* and 4.5 is none"):
        column.text(4.5)


def test_a_column_without_a_format_shows_numbers_as_they_are() -> None:
    assert [Column(key="x", title="x").text(value) for value in (-math.inf, 0.25, 7)] == ["-∞", "0.25", "7"]


def test_markdown_has_a_heading_with_units_an_alignment_row_and_one_line_a_row() -> None:
    assert TABLE.to_markdown() == (
        "**Final losses**\n"
        "\n"
        "| model | loss (nats per token) | steps | collapsed |\n"
        "| :--- | ---: | ---: | :---: |\n"
        "| flt | 4.913 | 12,000 | no |\n"
        "| lt | – | – | yes |\n"
        "| base | ∞ | 3 | – |\n"
        "\n"
        "Validation loss after the last step."
    )


def test_markdown_escapes_what_would_end_a_cell_or_become_markup() -> None:
    markdown = make_table({"model": "a|b\n*c* <d>"}).to_markdown()
    assert r"| a\|b \*c\* \<d\> |" in markdown


def test_html_is_well_formed_and_shows_the_same_texts() -> None:
    cells = Cells(TABLE.to_html())
    assert cells.rows[0] == ["model", "lossnats per token", "steps", "collapsed"]
    assert cells.rows[1:] == TABLE.texts()


def test_html_escapes_titles_units_and_values() -> None:
    evil = '<script>alert("x")</script>&'
    table = Table(title=evil, columns=(Column(key="k", title=evil, unit=evil),), rows=({"k": evil},))
    text = table.to_html()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;") == 4


def test_csv_holds_raw_values_under_their_keys() -> None:
    rows = list(csv.DictReader(io.StringIO(TABLE.to_csv())))
    assert rows == [
        {"model": "flt", "loss": "4.91349", "steps": "12000", "collapsed": "False"},
        {"model": "lt", "loss": "", "steps": "", "collapsed": "True"},
        {"model": "base", "loss": "inf", "steps": "3.0", "collapsed": ""},
    ]


def test_csv_quotes_what_would_break_a_row() -> None:
    assert make_table({"model": 'a,"b"\nc'}).to_csv().splitlines()[1] == '"a,""b""'


def test_the_dict_is_strict_json_with_raw_values() -> None:
    record = json.loads(json.dumps(TABLE.to_dict(), allow_nan=False))
    assert record["title"] == "Final losses"
    assert record["columns"][1] == {"key": "loss", "title": "loss", "unit": "nats per token"}
    assert record["rows"][0] == {"model": "flt", "loss": 4.91349, "steps": 12000, "collapsed": False}
    assert record["rows"][1]["loss"] is None
    assert record["rows"][2]["loss"] == "inf"
    assert record["note"] == "Validation loss after the last step."


def test_a_terminal_shows_title_units_values_and_note() -> None:
    text = in_terminal(TABLE)
    for part in ("Final losses", "nats per token", "4.913", "12,000", "–", "∞", "Validation loss after the last step."):
        assert part in text


def test_brackets_in_values_are_no_markup_in_a_terminal() -> None:
    assert "[red]lt[/red]" in in_terminal(make_table({"model": "[red]lt[/red]"}))


def test_a_table_without_rows_renders_everywhere() -> None:
    table = make_table()
    assert Cells(table.to_html()).rows == [["model", "lossnats per token", "steps", "collapsed"]]
    assert table.to_csv() == "model,loss,steps,collapsed\n"
    assert table.to_markdown().endswith("| :--- | ---: | ---: | :---: |")
    assert "Final losses" in in_terminal(table)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_table({"los": 1.0}), "column='los' is not known; did you mean 'loss'?"),
        (lambda: make_table(columns=()), "has no columns"),
        (lambda: make_table(columns=(COLUMNS[0], COLUMNS[0])), "each key must be there once"),
        (lambda: Column(key="x", title="x", align="middle"), "align='middle' is not known"),  # type: ignore[arg-type]
        (lambda: Column(key="x", title="x", format=".3q"), r"format='.3q' of column 'x' is no format of a number"),
    ],
)
def test_what_cannot_be_shown_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_latex_has_rules_a_caption_and_no_character_that_it_would_read_as_a_command():
    columns = (Column(key="model", title="model_name"), Column(key="loss", title="loss", unit="%", align="right"))
    rows = ({"model": "a&b {50%} x^2 ~ \\", "loss": "1.0 \u00b10.1"}, {"model": "c", "loss": None})
    text = Table(title="Costs in $", columns=columns, rows=rows, note="n = 3").to_latex()
    assert text.splitlines()[2:6] == [
        r"\caption{Costs in \$. n = 3}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"model\_name & loss (\%) \\",
    ]
    cell = r"a\&b \{50\%\} x\textasciicircum{}2 \textasciitilde{} \textbackslash{} & 1.0 $\pm$0.1 \\"
    assert text.splitlines()[7:9] == [cell, r"c & -- \\"]
