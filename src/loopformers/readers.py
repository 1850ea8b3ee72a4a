"""Read small files that people and other programs write, JSON and YAML, with one error for everything that can be wrong.

A file that this package did not just write may be missing, truncated, huge, nested a hundred thousand levels deep, or
hold another type than its reader expects. Every reader here answers with one of our errors, which names the file, what is
wrong with it and what to do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from loopformers.errors import CheckpointError, ConfigError, LoopformersError, first_line
from loopformers.yaml_events import YamlError, build_value

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_YAML_BYTES",
    "parse_json",
    "parse_yaml",
    "read_json",
    "read_text",
    "read_yaml",
]

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""Largest file that is read whole. Our own files stay far below; a larger one is damaged or hostile."""

MAX_DEPTH = 100
"""Deepest nesting of lists and objects."""

MAX_YAML_BYTES = 2**18
"""Largest YAML file. People write these, and the largest grid that ships is a hundredth of this."""

JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
YAML_NAMES: dict[type, str] = {dict: "a mapping", list: "a list"}


def read_json(
    path: str | os.PathLike[str],
    kind: type[T] = dict,  # type: ignore[assignment]
    *,
    error: type[LoopformersError] = CheckpointError,
    remedy: str = "write it again, or restore it from a copy",
    max_bytes: int = MAX_BYTES,
) -> T:
    """Return the content of a JSON file.

    Args:
        path: The file.
        kind: Python type of the outermost value: dict, list or str.
        error: What to raise.
        remedy: What the reader of an error can do; ends its text.
        max_bytes: Largest file to read.

    Raises:
        LoopformersError: Of the type `error`: the file is missing, cannot be read, is too large, is not UTF-8 or not JSON,
            is nested too deeply, or holds another type.
    """
    return parse_json(read_text(path, error=error, remedy=remedy, max_bytes=max_bytes), kind, path, error, remedy)


def parse_json(
    text: str | bytes,
    kind: type[T],
    source: str | os.PathLike[str],
    error: type[LoopformersError] = CheckpointError,
    remedy: str = "write it again, or restore it from a copy",
) -> T:
    """Return the value of a JSON text; `source` names where it comes from in errors. See `read_json`."""
    name = os.fspath(source)
    try:
        value = json.loads(text)
    except RecursionError as cause:
        raise error(f"{name} is nested more than {MAX_DEPTH} levels deep; {remedy}") from cause
    except ValueError as cause:  # not JSON, or a number of thousands of digits
        raise error(f"{name} is not readable JSON, perhaps truncated ({first_line(cause)}); {remedy}") from cause
    if _depth_exceeds(value, MAX_DEPTH):
        raise error(f"{name} is nested more than {MAX_DEPTH} levels deep; {remedy}")
    if not isinstance(value, kind):
        raise error(
            f"{name} contains a value of type {type(value).__name__} but must contain "
            f"{JSON_NAMES.get(kind, kind.__name__)}; {remedy}"
        )
    return value


def read_yaml(
    path: str | os.PathLike[str],
    kind: type[T] = dict,  # type: ignore[assignment]
    *,
    as_text: bool = False,
    error: type[LoopformersError] = ConfigError,
    remedy: str = "correct it there",
    max_bytes: int = MAX_YAML_BYTES,
) -> T:
    """Return the content of a YAML file; keys are text, and an empty file is an empty mapping.

    Args:
        path: The file.
        kind: Python type of the outermost value: dict or list.
        as_text: Keep scalars as they are written, for a reader that knows what each must be; only null becomes None.
            Otherwise an unquoted scalar is null, true, false, a decimal number, or else text: `on`, `0o17`, `12:30` and
            `2024-01-31` are text.
        error: What to raise.
        remedy: What the reader of an error can do; ends its text.
        max_bytes: Largest file to read.

    Raises:
        LoopformersError: Of the type `error`: as `read_json`; also a key that stands twice in a mapping, a tag, a second
            document, or aliases that stand for more than a file can hold.
    """
    text = read_text(path, error=error, remedy=remedy, max_bytes=max_bytes)
    return parse_yaml(text, kind, path, as_text=as_text, error=error, remedy=remedy)


def parse_yaml(
    text: str,
    kind: type[T],
    source: str | os.PathLike[str],
    *,
    as_text: bool = False,
    error: type[LoopformersError] = ConfigError,
    remedy: str = "correct it there",
) -> T:
    """Return the value of a YAML text; `source` names where it comes from in errors. See `read_yaml`."""
    import yaml

    name = os.fspath(source)
    try:
        value = build_value(yaml.parse(text, Loader=yaml.SafeLoader), as_text=as_text, max_depth=MAX_DEPTH)
    except YamlError as refusal:
        raise error(f"{name}{refusal}; {remedy}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as cause:  # ValueError: an escape beyond Unicode
        reason = " ".join(str(cause).split())
        raise error(f"{name} is not readable YAML ({reason[:300]}); {remedy}") from cause
    if value is None and kind is dict:
        value = {}
    if not isinstance(value, kind):
        found = "a list" if isinstance(value, list) else "a single value"
        raise error(f"{name} contains {found} but must contain {YAML_NAMES.get(kind, kind.__name__)}; {remedy}")
    return value


def read_text(
    path: str | os.PathLike[str],
    *,
    error: type[LoopformersError] = CheckpointError,
    remedy: str = "write it again, or restore it from a copy",
    max_bytes: int = MAX_BYTES,
) -> str:
    """Return the text of a UTF-8 file; a byte-order mark is not part of it. Arguments and errors as `read_json`."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise error(f"{file} is not a regular file; {remedy}")
        with file.open("rb") as opened:
            content = opened.read(max_bytes + 1)
    except FileNotFoundError as cause:
        raise error(f"{file} does not exist; {remedy}") from cause
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise error(f"{str(file)!r} cannot be read ({getattr(cause, 'strerror', None) or cause}); {remedy}") from cause
    if len(content) > max_bytes:
        raise error(f"{file} is larger than {max_bytes:,} bytes, the most that such a file may have; {remedy}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{file} is not UTF-8 text (byte {cause.start}); {remedy}") from cause


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True
