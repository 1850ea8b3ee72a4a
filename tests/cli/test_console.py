from __future__ import annotations

import json
import math

import pytest

from loopformers.cli.console import json_value, print_heading, print_json, print_note, print_table, write
from loopformers.report.tables import Column, Table


def test_json_is_one_strict_ascii_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": math.nan, "perplexity": math.inf, "loops": (1, 2), "text": "naïve –", 3: None})
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.isascii()
    assert json.loads(output.out) == {"loss": None, "perplexity": "inf", "loops": [1, 2], "text": "naïve –", "3": None}


def test_json_values_keep_what_json_has() -> None:
    assert json_value({"a": [True, 1, 2.5, "x", None, {"b": -math.inf}]}) == {
        "a": [True, 1, 2.5, "x", None, {"b": "-inf"}]
    }


def test_results_go_to_stdout_and_remarks_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_heading("4 loops [1/4]")
    write("a piece")
    print_note("loaded [model]")
    assert capsys.readouterr() == ("4 loops [1/4]\na piece", "loaded [model]\n")


def test_a_table_that_is_piped_is_never_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    columns = tuple(Column(key=f"column_{i}", title=f"a long heading {i}") for i in range(20))
    print_table(Table(title="Wide", columns=columns, rows=({column.key: "value" for column in columns},)))
    title, heading, _, row, end = capsys.readouterr().out.splitlines()
    assert title.strip() == "Wide"
    assert heading.split() == " ".join(column.title for column in columns).split()
    assert row.split() == ["value"] * 20
    assert end == ""


def test_what_is_captured_holds_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    print_heading("heading")
    print_table(Table(title="t", columns=(Column(key="a", title="a", unit="u"),), rows=({"a": 1},)))
    assert "\x1b" not in capsys.readouterr().out
