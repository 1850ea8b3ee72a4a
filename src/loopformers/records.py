"""Typed reading of what a program wrote: the fields of a JSON object become a dataclass, or an error that names the field."""

from __future__ import annotations

import dataclasses
import math
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopformers.errors import CheckpointError, LoopformersError, shorten

__all__ = ["make_record"]

T = TypeVar("T")

NON_FINITE: Mapping[str | None, float] = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
"""What stands in strict JSON for numbers that are not finite."""

NAMES: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", None: "null"}


def make_record(
    kind: type[T],
    fields: Mapping[str, Any],
    source: str | os.PathLike[str],
    *,
    error: type[LoopformersError] = CheckpointError,
    remedy: str = "restore it from a copy, or make it again",
    null_is_nan: bool = False,
) -> T:
    """Return a dataclass made of the fields of a JSON object; lists become tuples where tuples are declared.

    Args:
        kind: The dataclass; fields with a default may be absent.
        fields: As `json.loads` returns them.
        source: Names the file, and the place in it, in errors.
        error: What to raise.
        remedy: What the reader of an error can do; ends its text.
        null_is_nan: Whether the file is strict JSON, in which a number that is not finite is written as null (NaN), `"inf"` or
            `"-inf"`. A field that may be None keeps its null.

    Raises:
        LoopformersError: Of the type `error`: a field is unknown, missing, or of another type than declared.
    """
    name = os.fspath(source)
    if not isinstance(fields, Mapping):
        raise error(f"{name} is {shorten(fields)} but must be an object; {remedy}")
    declared = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    unknown = sorted(fields.keys() - declared.keys())
    if unknown:
        raise error(
            f"{name} has a field {unknown[0]!r} that this version of loopformers does not know; read it with the version that "
            f"wrote it, or {remedy}"
        )
    values = {}
    reader = _Reader(NON_FINITE if null_is_nan else {})
    for key, field in declared.items():
        if key in fields:
            try:
                values[key] = reader.convert(fields[key], hints[key], key)
            except ValueError as cause:
                raise error(f"{name}: {cause}; {remedy}") from cause
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{name} lacks the field {key!r}; {remedy}")
    return kind(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Converts values as type hints have them, and remembers what else stands for a number."""

    non_finite: Mapping[str | None, float]

    def convert(self, value: Any, hint: Any, place: str) -> Any:
        """Return a value as a type hint has it.

        Raises:
            ValueError: It is of another type; the text names the field, `place`.
        """
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is Any:
            return value
        if origin in (Union, types.UnionType):
            return self._convert_union(value, arguments, place)
        if origin is Literal:
            if value not in arguments:
                raise ValueError(
                    f"its field {place!r} is {shorten(value)}, which is none of {', '.join(map(repr, arguments))}"
                )
            return value
        if hint is float:
            return self._convert_float(value, place)
        if hint in (str, bool, int):
            if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
                raise _mismatch(value, NAMES[hint], place)
            return value
        base = origin or hint
        if issubclass(base, Mapping):
            if not isinstance(value, dict):
                raise _mismatch(value, "an object", place)
            entry_hint = arguments[1] if arguments else Any
            return {key: self.convert(entry, entry_hint, f"{place}.{key}") for key, entry in value.items()}
        if issubclass(base, Sequence):
            if not isinstance(value, list):
                raise _mismatch(value, "a list", place)
            entry_hint = arguments[0] if arguments else Any
            entries = [self.convert(entry, entry_hint, f"{place}[{i}]") for i, entry in enumerate(value)]
            return tuple(entries) if base is tuple else entries
        raise TypeError(f"no reader for the type {hint!r}")

    def _convert_union(self, value: Any, options: Sequence[Any], place: str) -> Any:
        kinds = [option for option in options if option is not type(None)]
        if value is None and len(kinds) < len(options):
            return None
        if len(kinds) == 1 and get_origin(kinds[0]) is not None:
            return self.convert(value, kinds[0], place)  # its own error says which entry is wrong
        for option in kinds:
            try:
                return self.convert(value, option, place)
            except ValueError:
                continue
        words = " or ".join(NAMES.get(None if option is type(None) else option, "another value") for option in options)
        raise _mismatch(value, words, place)

    def _convert_float(self, value: Any, place: str) -> float:
        if (value is None or isinstance(value, str)) and value in self.non_finite:
            return self.non_finite[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass
        raise _mismatch(value, NAMES[float], place)


def _mismatch(value: Any, words: str, place: str) -> ValueError:
    shown = shorten(value)
    held = shown if len(shown) <= 60 and not isinstance(value, dict) else f"a value of type {type(value).__name__}"
    return ValueError(f"its field {place!r} is {held} but must be {words}")
