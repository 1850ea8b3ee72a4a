"""The values of a JSON file one after the other: JSON Lines, one array, or objects that spread over lines.

A line is read as it is needed. A file whose first line does not end its value (`[`, or `{` of pretty-printed JSON) is
read whole, as a value's end cannot be known before. Every parser here refuses nesting that it cannot follow; Arrow's own
JSON reader crashes on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from loopformers.data.unpack import not_utf8
from loopformers.errors import DataError

__all__ = ["JsonValue", "read_json_values"]

BLANK = " \t\r\n"


class JsonValue(NamedTuple):
    """A value, and the line that it begins on (that its array begins on, for an item of one), from 1."""

    line: int
    value: Any


def read_json_values(opened: BinaryIO, name: str, *, max_bytes: int, skip: int = 0) -> Iterator[JsonValue]:
    """Return the values of a JSON file; of an array that is the whole file, its items.

    Args:
        opened: The file's bytes, UTF-8.
        name: What errors call it.
        max_bytes: The longest line, or the largest file of another form than JSON Lines.
        skip: Values at the beginning to leave out.

    Raises:
        DataError: Not JSON, nested too deeply, an object with a key twice, or more than `max_bytes`. Names the line.
    """
    return islice(_values(opened, name, max_bytes), skip, None)


def _values(opened: BinaryIO, name: str, max_bytes: int) -> Iterator[JsonValue]:
    array_seen = None
    number = found = 0
    while line := _read_line(opened, name, number + 1, max_bytes):
        number += 1
        text = _decode(line, name, number)
        if number == 1:
            text = text.removeprefix("\ufeff")
        if not text.strip(BLANK):
            continue
        if found == 0 and _is_open(text):
            rest = opened.read(max_bytes - len(line) + 1)
            if len(line) + len(rest) > max_bytes:
                raise DataError(
                    f"{name} is not JSON Lines and has more than {max_bytes:,} bytes, too many to read whole; write one "
                    "object a line"
                )
            text += _decode(rest, name, number + 1)
        for value in _parse(text, name, number):
            if array_seen is not None or (isinstance(value.value, list) and found):
                raise DataError(
                    f"{name}, line {array_seen or value.line}, is an array among other values, but a file must contain either "
                    "one array or only objects; write one object per line"
                )
            found += 1
            if isinstance(value.value, list):
                array_seen = value.line
                yield from (JsonValue(value.line, item) for item in value.value)
            else:
                yield value


def _read_line(opened: BinaryIO, name: str, number: int, max_bytes: int) -> bytes:
    line = opened.readline(max_bytes + 1)
    if len(line) > max_bytes:
        raise DataError(
            f"{name}, line {number}, has more than {max_bytes:,} bytes, the most that one line may have; cut its document in "
            "several"
        )
    return line


def _decode(data: bytes, name: str, number: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = number + data[: error.start].count(b"\n")
        raise not_utf8(f"{name}, line {line},", error) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKeyError(twice)
    return found


class _RepeatedKeyError(ValueError):
    pass


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _is_open(text: str) -> bool:
    """Whether a text is the beginning of a value that further lines may complete."""
    try:
        DECODER.raw_decode(text.lstrip(BLANK))
    except json.JSONDecodeError as error:
        return error.pos >= len(text.strip(BLANK))
    except (ValueError, RecursionError):
        return False  # the parser that reads it says what is wrong
    return False


def _parse(text: str, name: str, number: int) -> Iterator[JsonValue]:
    """Every value of a text whose first line has a number."""
    position, end = _after_blank(text, 0), len(text)
    while position < end:
        begins = number + text.count("\n", 0, position)
        try:
            value, position = DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}, line {number + error.lineno - 1}, is not JSON ({error.msg}, column {error.colno}), perhaps cut "
                "off; correct or remove the line, or fetch the file again"
            ) from error
        except _RepeatedKeyError as error:
            raise DataError(
                f"{name}, line {begins}, has the key {str(error)!r} twice in one object, and only one can be meant; "
                "remove one"
            ) from error
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits
            reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not readable JSON ({error})"
            raise DataError(f"{name}, line {begins}, {reason}; correct or remove the line") from error
        yield JsonValue(begins, value)
        position = _after_blank(text, position)


def _after_blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in BLANK:
        position += 1
    return position
