"""Typed reading of what a program wrote: the fields of a JSON object become a dataclass, or an error that names the field."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopformers.errors import CheckpointError, LoopformersError

__all__ = ["make_record"]

T = TypeVar("T")

NAMES: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", None: "null"}


def make_record(
    kind: type[T],
    fields: Mapping[str, Any],
    source: str | os.PathLike[str],
    *,
    error: type[LoopformersError] = CheckpointError,
    remedy: str = "restore it from a copy, or make it again",
) -> T:
    """Return a dataclass made of the fields of a JSON object; lists become tuples where tuples are declared.

    Args:
        kind: The dataclass; fields with a default may be absent.
        fields: As `json.loads` returns them.
        source: Names the file in errors.
        error: What to raise.
        remedy: What the reader of an error can do; ends its text.

    Raises:
        LoopformersError: Of the type `error`: a field is unknown, missing, or of another type than declared.
    """
    name = os.fspath(source)
    declared = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    unknown = sorted(fields.keys() - declared.keys())
    if unknown:
        raise error(
            f"{name} has a field {unknown[0]!r} that this version of loopformers does not know; read it with the version that "
            f"wrote it, or {remedy}"
        )
    values = {}
    for key, field in declared.items():
        if key in fields:
            try:
                values[key] = _convert(fields[key], hints[key])
            except ValueError as cause:
                raise error(f"{name}: its field {key!r} {cause}; {remedy}") from cause
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{name} lacks the field {key!r}; {remedy}")
    return kind(**values)


def _convert(value: Any, hint: Any) -> Any:
    """Return a value as a type hint has it.

    Raises:
        ValueError: It is of another type; the text completes "the field ..".
    """
    if hint is Any:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(value, option)
            except ValueError:
                continue
        raise ValueError(_mismatch(value, arguments))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"is {value!r}, which is none of {', '.join(map(repr, arguments))}")
        return value
    if hint in (None, type(None)):
        if value is not None:
            raise ValueError(_mismatch(value, (None,)))
        return None
    if hint in (str, bool, int, float):
        accepted = (int, float) if hint is float else hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(_mismatch(value, (hint,)))
        return value
    base = origin or hint
    if issubclass(base, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"holds {type(value).__name__} where an object must be")
        return {key: _convert(entry, arguments[1] if arguments else Any) for key, entry in value.items()}
    if issubclass(base, Sequence):
        if not isinstance(value, list):
            raise ValueError(f"holds {type(value).__name__} where a list must be")
        entries = [_convert(entry, arguments[0] if arguments else Any) for entry in value]
        return tuple(entries) if base is tuple else entries
    raise TypeError(f"no reader for the type {hint!r}")


def _mismatch(value: Any, options: Sequence[Any]) -> str:
    words = " or ".join(NAMES.get(None if option is type(None) else option, "another value") for option in options)
    shown = repr(value)
    return f"holds {shown if len(shown) <= 60 else type(value).__name__} where {words} must be"
