"""Build values from YAML events: the small part of YAML that experiment files need, without its surprises and bombs.

PyYAML's loaders keep the last of two equal keys, read `on` as true, `12:30:00` as 45000 and `1e-3` as text, and let an alias
stand for millions of values. Here a key stands once, a plain scalar is what JSON would make of it, or else text, and
whatever aliases stand for is counted before it is used. Nothing here recurses, so no depth exhausts the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MAX_VALUES", "YamlError", "build_value", "plain_value", "read_float", "read_int"]

MAX_VALUES = 2**20
"""Most values and characters of a file, everything that an alias stands for counted where it stands."""

NULLS = ("", "null", "Null", "NULL")
TRUTHS: Mapping[str, bool] = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

# Neither octal (010, 0o10), hexadecimal nor sexagesimal: programs disagree on what those mean.
INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
NUMBER = re.compile(r"[-+]?((0|[1-9](_?[0-9])*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
MAX_DIGITS = 400
"""Longest number. Python refuses whole numbers of more than 4,300 digits, and no size has as many as these."""


class YamlError(Exception):
    """What is wrong with a file; the text follows its name in an error."""


def read_int(text: str) -> int | None:
    """Return the whole number that a text is (`12`, `-3`, `1_000`), or None."""
    return int(text) if len(text) <= MAX_DIGITS and INTEGER.fullmatch(text) else None


def read_float(text: str) -> float | None:
    """Return the number that a text is (`0.5`, `.5`, `1e-3`, `12`), infinite where it is too large, or None."""
    return float(text) if len(text) <= MAX_DIGITS and NUMBER.fullmatch(text) else None


def plain_value(text: str) -> Any:
    """Return what an unquoted scalar means: null, a truth value, a number, or else text."""
    if text in NULLS or text == "~":
        return None
    if text in TRUTHS:
        return TRUTHS[text]
    whole = read_int(text)
    number = read_float(text) if whole is None else whole
    return text if number is None else number


@dataclass(slots=True)
class _Open:
    """A list or a mapping whose end has not been read."""

    value: Any
    anchor: str | None
    counted: int
    """Values that the file held before it."""
    deepest: int
    """Deepest level inside it, counted from the outermost."""
    key: str | None = None
    """The key whose value comes next."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where each key stands."""
    merged: list[Mapping[str, Any]] = field(default_factory=list)
    """Mappings of `<<`, whose keys hold where the mapping has none of its own."""


def build_value(events: Iterable[Any], *, as_text: bool, max_depth: int) -> Any:
    """Return the value of a document, or None where there is none.

    Args:
        events: What `yaml.parse` yields.
        as_text: Whether scalars are kept as they are written; only null becomes None. Else see `plain_value`.
        max_depth: Deepest nesting of lists and mappings, with aliases.

    Raises:
        YamlError: A key that stands twice, a tag, a second document, or too many or too deep values.
    """
    import yaml

    stack: list[_Open] = []
    anchors: dict[str, tuple[Any, int, int]] = {}  # by anchor: its value, how many values that is, and how deep
    root: Any = None
    documents = counted = 0

    def count(size: int, depth: int, line: int) -> None:
        nonlocal counted
        counted += size
        if counted > MAX_VALUES:
            raise YamlError(
                f" has more than {MAX_VALUES:,} values and characters, counting what aliases repeat (line {line})"
            )
        if depth > max_depth:
            raise YamlError(f" is nested more than {max_depth} levels deep (line {line})")
        if stack:
            stack[-1].deepest = max(stack[-1].deepest, depth)

    def put(value: Any, line: int) -> None:
        nonlocal root
        if not stack:
            root = value
            return
        top = stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is not None:
            if top.key == "<<":
                top.merged += _mappings(value, line)
            else:
                top.value[top.key] = value
            top.key = None
        else:
            if not isinstance(value, str):
                raise YamlError(f" has a key in line {line} that is a list or a mapping; keys are text")
            if value in top.lines:
                raise YamlError(
                    f" has the key {value[:80]!r} twice in one mapping, in lines {top.lines[value]} and {line}"
                )
            top.key, top.lines[value] = value, line

    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise YamlError(f" holds a second document, from line {line}; it must hold one")
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise YamlError(
                    f" uses the anchor {event.anchor[:80]!r} in line {line}, which is not defined before it"
                )
            value, size, depth = anchors[event.anchor]
            count(size, len(stack) + depth, line)
            put(value, line)
        elif isinstance(event, yaml.ScalarEvent):
            _check_tag(event, line)
            count(1 + len(event.value), len(stack), line)
            is_key = bool(stack) and isinstance(stack[-1].value, dict) and stack[-1].key is None
            value = event.value
            if event.style is None and not is_key:
                value = (None if value in NULLS else value) if as_text else plain_value(value)
            if event.anchor is not None:
                anchors[event.anchor] = (value, 1 + len(event.value), 0)
            put(value, line)
        elif isinstance(event, yaml.CollectionStartEvent):
            _check_tag(event, line)
            before = counted
            count(1, len(stack) + 1, line)
            made: Any = [] if isinstance(event, yaml.SequenceStartEvent) else {}
            stack.append(_Open(made, event.anchor, before, len(stack) + 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            done = stack.pop()
            if done.merged:  # the first of several mappings wins, and own keys win over all
                done.value = {key: v for mapping in [*reversed(done.merged), done.value] for key, v in mapping.items()}
            if done.anchor is not None:
                anchors[done.anchor] = (done.value, counted - done.counted, done.deepest - len(stack))
            if stack:
                stack[-1].deepest = max(stack[-1].deepest, done.deepest)
            put(done.value, line)
    return root


def _mappings(value: Any, line: int) -> list[Mapping[str, Any]]:
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, dict) for entry in found):
        raise YamlError(f" has << in line {line} with a value that is not a mapping")
    return found


def _check_tag(event: Any, line: int) -> None:
    if event.tag is not None:
        raise YamlError(f" has the tag {event.tag[:80]!r} in line {line}, and tags are not supported; remove it")
