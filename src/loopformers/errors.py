"""The errors of this package.

Every error that a user can cause is a `LoopformersError`; its text states the value, the rule it breaks and the remedy.
Each also derives from the built-in exception that a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import sys
import warnings
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
    "ObjectiveWarning",
    "ScheduleWarning",
    "WriteError",
    "check_count",
    "first_line",
    "shorten",
    "unknown_name",
    "warn_caller",
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


class ObjectiveWarning(UserWarning):
    """A model is being trained on a loss that is not its configured objective, or on no target at all."""


class ScheduleWarning(UserWarning):
    """A conditioned model runs at step sizes, or at a number of loops, that its training never drew."""


class MissingExtraError(LoopformersError, ImportError):
    """A feature needs an optional dependency that is not installed."""


class _Shortener(reprlib.Repr):
    """Writes the beginning and the end of what is long, and the first entries of what is deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 160, 160
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write whole numbers of more than 4,300 digits."""
        if value.bit_length() <= 256:
            return repr(value)
        return f"<whole number of about {math.ceil(value.bit_length() * math.log10(2)):,} digits>"


_SHORTENER = _Shortener()


def shorten(value: object) -> str:
    """Return a value as an error shows it: its `repr` in one line, cut to a length that fits a message, whatever it holds.

    Example:
        >>> shorten([1, "a"]), shorten(10**5000), len(shorten("x" * 10**7))
        ("[1, 'a']", '<whole number of about 5,001 digits>', 160)
    """
    text = re.sub(r"\s*\n\s*", " ", _SHORTENER.repr(value))  # a configuration or a tensor writes itself in many
    return text if len(text) <= 600 else f"{text[:400]}...{text[-100:]}"


def check_count(name: str, value: object, *, at_least: int = 1, at_most: int | None = None) -> None:
    """Raise ConfigError unless a value is a whole number from `at_least` to `at_most` (None: without a ceiling)."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < at_least:  # type: ignore[operator]
        raise ConfigError(f"{name}={shorten(value)} must be a whole number of at least {at_least}")
    if at_most is not None and value > at_most:  # type: ignore[operator]
        raise ConfigError(f"{name}={shorten(value)} must be a whole number of at most {at_most:,}")


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
    near = difflib.get_close_matches(str(value), names, n=1) if isinstance(value, str) and len(value) < 200 else []
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"{what}={shorten(value)} is not known;{hint} {'Choose' if near else 'choose'} one of: {', '.join(names)}"


_INNER = ("loopformers", "torch", "transformers", "accelerate", "peft", "trl", "contextlib")
"""Packages whose frames lie between a line of the user's and a warning of ours."""


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the line outside this package and the libraries below it that led here, which is the line to change.

    A model is called through modules, decorators and trainers, so that no fixed number of frames is right.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
