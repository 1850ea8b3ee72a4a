"""The errors of this package.

Every error that a user can cause is a `LoopformersError`; its text states the value, the rule it breaks and the remedy.
Each also derives from the built-in exception that a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CacheError",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "DataError",
    "ExitWarning",
    "LoopformersError",
    "MissingExtraError",
    "NonFiniteError",
    "WriteError",
    "check_count",
    "first_line",
    "unknown_name",
]


class LoopformersError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(LoopformersError, ValueError):
    """A configuration, an argument or a combination of them is not legal."""


class CheckpointError(LoopformersError, ValueError):
    """A checkpoint is truncated, foreign, or does not fit the model."""


class CheckpointWarning(UserWarning):
    """A checkpoint is passed over in favour of an earlier one, or is continued without having been verified."""


class WriteError(LoopformersError, OSError):
    """A file could not be written: no space, no permission, or its folder has been removed."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CacheError(LoopformersError, RuntimeError):
    """A cache is used in a way that would make decoding inexact."""


class DataError(LoopformersError, ValueError):
    """Data are missing, empty or too short for what is asked of them."""


class NonFiniteError(LoopformersError, ArithmeticError):
    """A loss or a gradient is not finite."""


class ExitWarning(UserWarning):
    """An exit rule on a model whose training never decoded the states that its tokens leave with."""


class MissingExtraError(LoopformersError, ImportError):
    """A feature needs an optional dependency that is not installed."""


def check_count(name: str, value: object, *, at_least: int = 1) -> None:
    """Raise ConfigError unless a value is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {at_least}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without the final full stop, to quote inside an error of ours.

    Libraries write several lines, often with advice that does not hold here. An error without text gives its type's name.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")


def unknown_name(what: str, value: object, allowed: Iterable[str]) -> str:
    """Return the text for a value outside a closed set, with the nearest legal name where one is near.

    Example:
        >>> unknown_name("preset", "ftl", ["flt", "lt"])
        "preset='ftl' is not known; did you mean 'flt'? Choose one of: flt, lt"
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"{what}={value!r} is not known;{hint} {'Choose' if near else 'choose'} one of: {', '.join(names)}"
