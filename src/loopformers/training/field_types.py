"""What a recipe's field takes: one conversion from what is written to a value, whether in a file, a variable or an argument.

Text is what all three have in common: a YAML file is read with its scalars as they are written, and the type of the field
says what they mean. So `1e-3` is a number and `1,4,12` a list of budgets everywhere, and `yes`, `0x10` or `12:30` are
refused everywhere where a truth value or a number must be.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from loopformers.readers import parse_yaml
from loopformers.yaml_events import NULLS, TRUTHS, read_float, read_int

__all__ = ["argument_value", "convert", "type_name"]

HOME = "~"
"""Null in YAML and a folder everywhere else, so refused."""


def argument_value(text: str) -> str | None:
    """Return what an argument or a variable says, as a YAML file would be read: `null` is None, all else is text.

    Raises:
        ValueError: An empty text, which would be null in a file and is more often a variable of a shell that is not set.
    """
    if not text.strip():
        raise ValueError("is empty; write null for none")
    return None if text in NULLS else text


def convert(value: Any, kind: Any) -> Any:
    """Return a value as a field's type has it.

    Args:
        value: Text as it is written, or a value of Python; None for null. A list is a list of these.
        kind: int, float, bool, str, None, a Literal of text, a tuple, list or mapping of those, or a union.

    Raises:
        ValueError: It is none of that type; the text, if any, says more than the type does.
    """
    if isinstance(value, str) and value.strip() == HOME:
        raise ValueError("means null in YAML but a folder elsewhere: write null, or the path of your home folder")
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args)
    if origin is typing.Literal:
        if value not in args:
            raise ValueError
        return value
    if origin in (tuple, list):
        return _convert_list(value, origin, args)
    if origin in (dict, Mapping):
        entries = _parse(value, dict) if isinstance(value, str) and value.lstrip().startswith("{") else value
        if not isinstance(entries, Mapping):
            raise ValueError
        return {str(key): convert(entry, args[1]) for key, entry in entries.items()}
    if kind in _SIMPLE:
        return _SIMPLE[kind](value)
    raise ValueError(
        f"has a type that no recipe can write, {kind}; use numbers, texts, truth values and lists of those"
    )


def _convert_union(value: Any, kinds: Sequence[Any]) -> Any:
    told = ""
    for kind in kinds:
        try:
            return convert(value, kind)
        except ValueError as error:
            told = told or str(error).strip()
    raise ValueError(told)


def _convert_list(value: Any, origin: type, args: Sequence[Any]) -> Any:
    if isinstance(value, str):
        text = value.strip()
        is_list = text.startswith("[") and text.endswith("]")
        entries: Any = _parse(text, list) if is_list else [part.strip() for part in text.split(",")]
    else:
        entries = value if isinstance(value, list | tuple) else [value]
    kinds = [arg for arg in args if arg is not Ellipsis]
    if len(kinds) > 1 and len(entries) != len(kinds):
        raise ValueError(f"has {len(entries)} values")
    return origin(convert(entry, kinds[i] if len(kinds) > 1 else kinds[0]) for i, entry in enumerate(entries))


def _parse(text: str, kind: type) -> Any:
    return parse_yaml(
        text, kind, "", as_text=True, remedy="write [a, b], with quotes around an entry that holds a comma"
    )


def _none(value: Any) -> None:
    if value is not None:
        raise ValueError


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip() not in TRUTHS:
        raise ValueError
    return TRUTHS[value.strip()]


def _int(value: Any) -> int:
    found = read_int(value.strip()) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, int):
        raise ValueError
    return found


def _float(value: Any) -> float:
    found = read_float(value.strip()) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError
    try:
        number = float(found)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    if not value.strip():
        raise ValueError("is empty")
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("holds a NUL or a byte that is not UTF-8 text")
    return value


_SIMPLE: Mapping[Any, Any] = {int: _int, float: _float, bool: _bool, str: _str, type(None): _none}


def type_name(kind: Any) -> str:
    """Say in words what a value must be."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin in (tuple, list):
        entries = [arg for arg in args if arg is not Ellipsis]
        if len(entries) > 1 and Ellipsis not in args:
            return f"a list of {len(entries)} values, each {type_name(entries[0])}"
        return f"a list, each entry {type_name(entries[0])}"
    if origin in (dict, Mapping):
        return f"a mapping from text to {type_name(args[1])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(kind, str(kind))
