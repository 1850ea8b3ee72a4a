"""What commands print: results on stdout, everything else on stderr, and with `--json` pure JSON on stdout.

The only module that owns rich consoles. They are made on each call, so that they follow a redirected stream.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from loopformers.report.tables import Table

__all__ = [
    "INTERRUPTED",
    "json_text",
    "json_value",
    "print_heading",
    "print_json",
    "print_note",
    "print_table",
    "stderr",
    "stdout",
    "write",
]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def stdout() -> Console:
    """Return a console on stdout, for results."""
    from rich.console import Console

    return Console(file=sys.stdout)


def stderr() -> Console:
    """Return a console on stderr, for progress and remarks."""
    from rich.console import Console

    return Console(file=sys.stderr)


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
