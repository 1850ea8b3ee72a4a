"""The command `loopformers`: a table of subcommands, of which the chosen one alone is imported.

A command is a module with `add_arguments(parser)`, which also sets the parser's description and epilog, and
`run(arguments) -> exit code`; where it has `TAKES_OVERRIDES`, arguments that its parser does not know reach it as
`arguments.overrides`. It imports what is heavy inside `run`, so that help stays cheap.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loopformers import __version__
from loopformers.boundary import INTERRUPTED, USAGE_ERROR, run_command
from loopformers.cli.console import warnings_as_notes
from loopformers.cli.parser import Parser
from loopformers.errors import ConfigError

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand that is not imported yet.

    Args:
        module: Where it lives.
        help: One line for the list of commands.
    """

    module: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "quickstart": Command(
        "loopformers.cli.quickstart", "train three looped systems side by side and report what becomes of them"
    ),
    "train": Command("loopformers.cli.train", "train the model of a recipe, or continue where it was interrupted"),
    "plan": Command("loopformers.cli.plan", "what a recipe will cost: operations, memory by loops, time"),
    "data": Command("loopformers.cli.data", "build a corpus from packages, and count what a source of text holds"),
    "info": Command("loopformers.cli.info", "parameters, FLOPs and cache bytes of a model, by number of loops"),
    "generate": Command("loopformers.cli.generate", "continue a text at one or several numbers of loops"),
    "evaluate": Command("loopformers.cli.evaluate", "what models are worth: by budget, schedule, text and task"),
    "analyze": Command("loopformers.cli.analyze", "what loops do to states, of one model or two side by side"),
    "study": Command("loopformers.cli.study", "grids of training runs, and what they show"),
    "convert": Command(
        "loopformers.cli.convert", "turn an official checkpoint into a folder that from_pretrained opens"
    ),
}
"""Subcommands by name, in the order of the help."""

EPILOG = """\
examples:
  loopformers quickstart --output-dir runs/quickstart
  loopformers train --config quickstart-flt --model.num_loops 6
  loopformers plan flt-small --no-time
  loopformers info flt --num-loops 1,4,12
  loopformers generate runs/quickstart/elastic-flt --prompt "It was" --num-loops 1,4,12

loopformers COMMAND --help says more about a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; default: the process's.

    Returns:
        Exit code: 0; 2 for bad input and 70 for a fault of this package, with the reason on stderr; 130 after Ctrl-C; 141
        when the reader of the output has gone; or what the command returns.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    code = run_command(lambda: _run(given))
    if code == INTERRUPTED and argv is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C again, while the interpreter ends, ends it at once
    return code


def _run(argv: Sequence[str]) -> int:
    _check_encoding(argv)
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if name is not None and name not in COMMANDS:
        raise ConfigError(_unknown_command(name))
    parser, subparsers = _parser()
    if name is None:
        parser.parse_args(argv)  # --help, --version, or an option that we do not have
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    module = importlib.import_module(COMMANDS[name].module)
    module.add_arguments(subparsers[name])
    subparsers[name].takes_overrides = getattr(module, "TAKES_OVERRIDES", False)
    if subparsers[name].takes_overrides:
        arguments, overrides = parser.parse_known_args(argv)
        arguments.overrides = overrides
    else:
        arguments = parser.parse_args(argv)
    with warnings_as_notes():
        code: int = module.run(arguments)
    return code


def _check_encoding(argv: Sequence[str]) -> None:
    """Refuse arguments that are no text: neither in the locale's encoding nor in UTF-8.

    Under a locale without an encoding of its own (LC_ALL=C) the bytes of UTF-8 arrive as surrogates. They are right for
    paths, which are handed back to the system; `console.argument_text` makes text of them.
    """
    for argument in argv:
        try:
            os.fsencode(argument).decode("utf-8") if not argument.isascii() and _has_surrogates(argument) else None
        except UnicodeError as error:
            raise ConfigError(
                f"the argument {argument!r} contains bytes that are not UTF-8; give text and paths in UTF-8"
            ) from error


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _parser() -> tuple[Parser, dict[str, Parser]]:
    width = max(map(len, COMMANDS))
    listing = "".join(f"\n  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="loopformers",
        usage="loopformers COMMAND [options]",
        description=f"Train, run, evaluate and study looped transformer language models.\n\ncommands:{listing}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"loopformers {__version__}")
    choices = parser.add_subparsers(prog="loopformers", metavar="COMMAND", help=argparse.SUPPRESS)
    subparsers = {
        name: choices.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        for name in COMMANDS
    }
    return parser, subparsers


def _unknown_command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"command {name!r} is not known;{hint} {'Choose' if near else 'choose'} one of: {', '.join(COMMANDS)}"
