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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loopformers import __version__
from loopformers.cli.console import INTERRUPTED
from loopformers.errors import LoopformersError

__all__ = ["COMMANDS", "Command", "main"]

SUCCESS = 0
USAGE_ERROR = 2
"""Exit code for what a user can put right, the one that argparse uses."""
BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone: 128 + SIGPIPE."""


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
        Exit code: 0, 2 for bad input (the reason stands on stderr), 130 after Ctrl-C, or what the command returns.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(given)
    except LoopformersError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out, and must find it open.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # a file that cannot be read or written
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:  # argparse, after --help or a bad option
        return end.code if isinstance(end.code, int) else SUCCESS


def _run(argv: Sequence[str]) -> int:
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if name is not None and name not in COMMANDS:
        return _fail(_unknown_command(name))
    parser, subparsers = _parser()
    if name is None:
        parser.parse_args(argv)  # --help, --version, or an option that we do not have
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    module = importlib.import_module(COMMANDS[name].module)
    module.add_arguments(subparsers[name])
    if getattr(module, "TAKES_OVERRIDES", False):
        arguments, overrides = parser.parse_known_args(argv)
        arguments.overrides = overrides
    else:
        arguments = parser.parse_args(argv)
    code: int = module.run(arguments)
    sys.stdout.flush()  # here a reader that has gone is still noticed
    return code


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    width = max(map(len, COMMANDS))
    listing = "".join(f"\n  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
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


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return USAGE_ERROR
