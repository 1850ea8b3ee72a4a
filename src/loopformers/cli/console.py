"""What commands print: results on stdout, everything else on stderr, and with `--json` pure JSON on stdout.

Text comes in as UTF-8, from stdin and from arguments, whatever the locale; going out, it has the encoding of the locale, and
`loopformers.boundary` sees to it that a character which that lacks is written as an escape.

The only module that owns rich consoles. They are made on each call, so that they follow a redirected stream.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from loopformers.boundary import INTERRUPTED
from loopformers.errors import CheckpointWarning, ConfigError, ExitWarning, ObjectiveWarning, ScheduleWarning

if TYPE_CHECKING:
    from rich.console import Console

    from loopformers.report.tables import Table

__all__ = [
    "INTERRUPTED",
    "argument_text",
    "json_text",
    "json_value",
    "print_heading",
    "print_json",
    "print_note",
    "print_table",
    "read_stdin",
    "stderr",
    "stdout",
    "warnings_as_notes",
    "write",
]

MAX_STDIN = 64 * 2**20
"""Most characters that are read from stdin."""


OUR_WARNINGS = (CheckpointWarning, ExitWarning, ObjectiveWarning, ScheduleWarning)
"""What the package warns of on purpose, in sentences for users."""


def stdout() -> Console:
    """Return a console on stdout, for results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return a console on stderr, for progress and remarks."""
    return _console(sys.stderr)


def _console(file: IO[str]) -> Console:
    from rich.console import Console

    class PlainConsole(Console):
        """A console that lets a broken pipe be an error like any other; rich would end the process with exit code 1."""

        def on_broken_pipe(self) -> None:
            raise

    return PlainConsole(file=file)


def argument_text(name: str, value: str) -> str:
    """Return the value of an argument that is text, as it was typed.

    Under a locale without an encoding of its own (LC_ALL=C), characters beyond ASCII arrive as surrogates that stand for
    the bytes of UTF-8.

    Raises:
        ConfigError: The bytes are not UTF-8.
    """
    try:
        value.encode("utf-8")
        return value
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError as error:
        raise ConfigError(f"{name} {value!r} contains bytes that are not UTF-8; give text in UTF-8") from error


def read_stdin(name: str) -> str:
    """Return the text on stdin, which is read as UTF-8.

    Args:
        name: The argument that asks for it, for errors.

    Raises:
        ConfigError: stdin is closed, holds something other than UTF-8, or far more than a text.
    """
    if sys.stdin is None:
        raise ConfigError(f"{name} reads stdin, which is closed; give the text as an argument, or pipe it to stdin")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        text = sys.stdin.read(MAX_STDIN + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: stdin is not UTF-8 (byte {error.start}: {error.reason}); convert the text to UTF-8 first"
        ) from error
    if len(text) > MAX_STDIN:
        raise ConfigError(
            f"{name}: stdin has more than {MAX_STDIN:,} characters, the most that is read; give less text"
        )
    return text


def print_table(table: Table) -> None:
    """Print a table on stdout, with an empty line below it. Piped into a file it is as wide as it needs to be."""
    console = stdout()
    if not console.is_terminal:
        console.width = 10_000  # no terminal, no edge to wrap at
    console.print(table.to_rich())
    console.print()


def print_heading(text: str) -> None:
    """Print a line above a result on stdout; bold on a terminal."""
    stdout().print(text, style="bold", markup=False, highlight=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a remark on stderr."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def warnings_as_notes(say: Callable[[str], None] = print_note) -> Iterator[None]:
    """Print our own warnings as remarks, without the line of code that a Python warning names.

    Args:
        say: Prints a line; default: on stderr. A progress bar has its own way, which keeps it in place.
    """
    with warnings.catch_warnings():
        for category in OUR_WARNINGS:
            warnings.simplefilter("always", category)  # who gives them gives each once
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, OUR_WARNINGS):
                say(f"warning: {message}")
            else:
                usual(message, category, *place)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, in ASCII: readable under every encoding. See `json_value`."""
    sys.stdout.write(json_text(value))


def json_text(value: Any) -> str:
    """Return one JSON document as it is printed and saved. See `json_value`."""
    return json.dumps(json_value(value), indent=2, allow_nan=False) + "\n"


def write(text: str) -> None:
    """Write a piece of a text that is still growing, and show it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def json_value(value: Any) -> Any:
    """Return a value as strict JSON has it: tuples become lists, nan null, and infinities the strings `inf` and `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [json_value(entry) for entry in value]
    return value
