from __future__ import annotations

from typing import Literal

import pytest

from loopformers.training.field_types import argument_value, convert, type_name

Shares = tuple[float, float, float]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("12", int, 12),
        (" -3 ", int, -3),
        ("1_000", int, 1000),
        ("1e-3", float, 0.001),
        (".5", float, 0.5),
        (2, float, 2.0),
        ("TRUE", bool, True),
        (False, bool, False),
        ("1.50", str, "1.50"),
        ("yes", str, "yes"),
        (None, float | None, None),
        ("null", str | None, "null"),  # as written with quotes; see argument_value
        ("1,2, 4", tuple[int | str, ...], (1, 2, 4)),
        ('[1, "2,1,1"]', tuple[int | str, ...], (1, "2,1,1")),
        (["2,1,1", "3"], tuple[int | str, ...], ("2,1,1", 3)),
        ("[]", tuple[str, ...], ()),
        ("[a].txt,b", tuple[str, ...], ("[a].txt", "b")),
        (7, tuple[int, ...], (7,)),
        ("0.8,0.1,0.1", Shares, (0.8, 0.1, 0.1)),
        ("5", int | list[int] | None, 5),
        ("5,6", int | list[int] | None, [5, 6]),
        ("{a: 1, b: 2}", dict[str, int], {"a": 1, "b": 2}),
        ("tail", Literal["document", "tail"], "tail"),
    ],
)
def test_text_and_values_become_what_the_type_says(value: object, kind: object, expected: object) -> None:
    found = convert(value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1e3", int), ("010", int), ("0x10", int), ("12:30", int), ("3.0", int), (True, int), (3.0, int), ("٣", int),
        ("9" * 5000, int), ("1e400", float), (10**400, float), (".inf", float), ("nan", float), ("1:30", float), ("x", float),
        ("yes", bool), ("on", bool), ("1", bool), (1, bool), (12, str), (None, str), ("", str), ("a\0", str), ("\udcff", str),
        ("~", str), ("~", float | None), ("1,,2", tuple[int, ...]), ("0.9,0.1", Shares), ("[1", tuple[int, ...]),
        ([[1]], tuple[int, ...]), ({"a": 1}, tuple[int, ...]), ("head", Literal["document", "tail"]), ("a", object),
    ],
)  # fmt: skip
def test_what_the_type_does_not_say_is_refused(value: object, kind: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller adds the field, its value and its type
        convert(value, kind)


def test_null_is_none_in_an_argument_and_an_empty_one_is_refused() -> None:
    assert [argument_value(text) for text in ("null", "NULL", "none", "'null'")] == [None, None, "none", "'null'"]
    for text in ("", "  "):
        with pytest.raises(ValueError, match="is empty"):
            argument_value(text)


def test_types_have_words() -> None:
    assert type_name(int | list[int] | None) == "a whole number or a list, each entry a whole number or null"
    assert type_name(Shares) == "a list of 3 values, each a number"
    assert type_name(dict[str, float]) == "a mapping from text to a number"
