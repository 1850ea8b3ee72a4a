"""Forked children of a test: a second process that is refused, and one that dies at a chosen moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from loopformers.errors import ConfigError

__all__ = ["KILLED", "REFUSED", "exit_code_of", "killed_at_rename", "start_elsewhere"]

REFUSED = 5
"""Exit code of a child that was told that this process owns what it asked for."""

KILLED = 7
"""Exit code of a child that died where it should."""

OTHER_ERROR = 6


def exit_code_of(work: Callable[[], object]) -> int:
    """Return the exit code of a child that does `work`: 0 when it ends, whatever it raises is `OTHER_ERROR`."""
    child = os.fork()
    if not child:
        code = OTHER_ERROR  # a child that raised must not go on with the tests of its parent
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_elsewhere(work: Callable[[], object]) -> int:
    """Return `REFUSED` if another process that starts `work` is told that this one owns it."""

    def start() -> None:
        try:
            work()
        except ConfigError as error:
            os._exit(REFUSED if f"in use by process {os.getppid()} on " in str(error) else OTHER_ERROR)

    return exit_code_of(start)


def killed_at_rename(kill: int, work: Callable[[], object]) -> int:
    """Return `KILLED` if another process that does `work` comes to its rename number `kill`, where it dies."""

    def die() -> None:
        replace, calls = os.replace, iter(range(1, 99))

        def replace_or_die(source: Any, target: Any) -> None:
            if next(calls) == kill:
                os._exit(KILLED)
            replace(source, target)

        os.replace = replace_or_die
        work()

    return exit_code_of(die)
