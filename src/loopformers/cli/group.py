"""Commands that hold subcommands, each a module of the same contract as a command (see `loopformers.cli.main`)."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from loopformers.errors import ConfigError

__all__ = ["add_subcommands", "run_subcommand"]


def add_subcommands(parser: argparse.ArgumentParser, command: str, modules: Mapping[str, tuple[str, str]]) -> None:
    """Declare the subcommands of a command.

    Args:
        parser: Of the command.
        command: Its name.
        modules: By name, the module that holds the subcommand and one line for the list. All are imported here.
    """
    choices = "{" + ",".join(modules) + "}"
    parser.usage = f"loopformers {command} {choices} [options]"
    subparsers = parser.add_subparsers(prog=parser.prog, dest="subcommand", metavar=choices)
    for name, (module, summary) in modules.items():
        subparser = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        importlib.import_module(module).add_arguments(subparser)


def run_subcommand(arguments: argparse.Namespace, command: str, modules: Mapping[str, tuple[str, str]]) -> int:
    """Run the subcommand that was chosen, and return its exit code.

    Raises:
        ConfigError: None was chosen.
    """
    if arguments.subcommand is None:
        raise ConfigError(f"{command} needs to know what to do; choose one of: {', '.join(modules)}")
    module = importlib.import_module(modules[arguments.subcommand][0])
    code: int = module.run(arguments)
    return code
