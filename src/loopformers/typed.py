"""Dataclasses from JSON: each field is held against its annotation, so that no wrong type gets past the reader of a file."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from loopformers.errors import DataError, LoopformersError

__all__ = ["from_fields"]

T = TypeVar("T")

NON_FINITE = {"inf": math.inf, "-inf": -math.inf}
"""How strict JSON holds infinities here; NaN is null."""

MAX_SHOWN = 60


def from_fields(
    kind: type[T],
    fields: Any,
    *,
    source: str,
    error: type[LoopformersError] = DataError,
    remedy: str = "write it again, or restore it from a copy",
) -> T:
    """Return a dataclass with the fields of a JSON object.

    Annotations may be bool, int, float, str, None, Any, unions of these, Mapping with keys of str, and Sequence or tuple of
    one type. A float may be null, which is NaN, unless its annotation has None.

    Args:
        kind: The dataclass.
        fields: What JSON gave.
        source: Where it comes from, for errors: a file, and the place in it.
        error: What to raise.
        remedy: Ends the text of an error.

    Raises:
        LoopformersError: Of the type `error`: no object, a field that is missing or unknown, or a value of another type.
    """
    if not isinstance(fields, Mapping):
        raise error(f"{source} holds {_shown(fields)} where an object must be; {remedy}")
    declared = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := [name for name in fields if name not in declared]:
        raise error(f"{source} has a field {unknown[0]!r} that is not known here; {remedy}")
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, field in declared.items():
        if name in fields:
            values[name] = _value(hints[name], fields[name], f"{source}: {name}", error, remedy)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{source} lacks the field {name!r}; {remedy}")
    return kind(**values)


def _value(hint: Any, value: Any, place: str, error: type[LoopformersError], remedy: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _value(hint, value, place, error, remedy)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _value(arguments[1], entry, f"{place}.{key}", error, remedy) for key, entry in value.items()}
    if origin is not None and issubclass(origin, Sequence) and isinstance(value, list):
        entries = [_value(arguments[0], entry, f"{place}[{i}]", error, remedy) for i, entry in enumerate(value)]
        return tuple(entries) if origin is tuple else entries
    if hint is float:
        if value is None:
            return math.nan
        if isinstance(value, str) and value in NON_FINITE:
            return NON_FINITE[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass
    elif origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = getattr(origin or hint, "__name__", str(hint))
    raise error(f"{place} is {_shown(value)}, and must be of type {wanted}; {remedy}")


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}.."
