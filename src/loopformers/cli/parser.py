"""The argument parser of all commands, and the types of their numbers: one place for ranges, one form of error."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from loopformers.errors import ConfigError
from loopformers.limits import MAX_COUNT, MAX_SEED

__all__ = ["Parser", "count", "number", "seed"]

MAX_SHOWN = 30
"""Characters of a number that an error quotes."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, which raises ConfigError where the original prints its usage and ends the process.

    Parsers of subcommands are of the same class: argparse makes them so.
    """

    takes_overrides = False
    """Whether options that are not declared are fields of a recipe, which the command itself reads."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse an unknown option here, where the options of the command are known.

        argparse leaves it to the outermost parser, or complains first of a required option that was only misspelt.
        """
        given = list(args) if args is not None else []
        try:
            known, others = super().parse_known_args(args, namespace)
        except ConfigError:
            self._refuse_unknown(given)
            raise
        self._refuse_unknown(others)
        return known, others

    def _refuse_unknown(self, given: Sequence[str]) -> None:
        """Raise ConfigError for the first option that is not declared, with the nearest that is."""
        if self.takes_overrides or self._subparsers is not None:
            return
        for argument in given:
            name = argument.partition("=")[0]
            if argument == "--":
                return
            if name.startswith("--") and name not in self._option_string_actions:
                near = difflib.get_close_matches(
                    name, [o for o in self._option_string_actions if o.startswith("--")], n=1
                )
                self.error(f"option {name} is not known" + (f"; did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with what is wrong and where help is."""
        joint = "" if message.endswith("?") else ";"
        raise ConfigError(f"{message.removeprefix('argument ')}{joint} run {self.prog} --help for the options")


def count(at_least: int = 1, at_most: int = MAX_COUNT, *, advice: str = "") -> Callable[[str], int]:
    """Return an argument's type: a whole number in a range, both ends included; `advice` ends the error."""

    def read(text: str) -> int:
        rule = f"a whole number from {at_least:,} to {at_most:,}"
        digits = text.strip().removeprefix("-").removeprefix("+")
        # int() would take "1_000" and digits of other scripts, and refuses thousands of digits with advice on Python
        value = int(text) if digits.isascii() and digits.isdigit() and len(digits) <= MAX_SHOWN else None
        if value is None or not at_least <= value <= at_most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} must be {rule}" + (f"; {advice}" if advice else ""))
        return value

    return read


seed = count(0, MAX_SEED)
"""Type of a seed."""


def number(
    *, above: float | None = None, at_least: float | None = None, at_most: float | None = None, advice: str = ""
) -> Callable[[str], float]:
    """Return an argument's type: a finite number in a range.

    Args:
        above: Excluded lower end.
        at_least: Included lower end.
        at_most: Included upper end.
        advice: Ends the error, after a semicolon.
    """
    bounds = [
        *([] if above is None else [f"above {above:g}"]),
        *([] if at_least is None else [f"at least {at_least:g}"]),
        *([] if at_most is None else [f"at most {at_most:g}"]),
    ]

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = (
            math.isfinite(value)
            and (above is None or value > above)
            and (at_least is None or value >= at_least)
            and (at_most is None or value <= at_most)
        )
        if not fits:
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} must be a finite number{' ' if bounds else ''}{' and '.join(bounds)}"
                + (f"; {advice}" if advice else "")
            )
        return value

    return read


def _shown(text: str) -> str:
    if len(text) > MAX_SHOWN:
        return f"{text[:MAX_SHOWN]!r}.. ({len(text):,} characters)"
    return text if text.isascii() and text.isprintable() and text.strip() == text != "" else repr(text)
