"""Your own parts, known by name in every command and process: recurrences, presets, tasks.

A module of yours enters its classes into our registries (`STREAMS`, `INJECTIONS`, `PRESETS`, `TASKS`). In a program that
imports it, nothing else is needed. Commands, and the processes that they start, import the modules that the environment
variable LOOPFORMERS_IMPORT names, with commas between them. A checkpoint or a recipe can't make them import anything.
"""

from __future__ import annotations

import importlib
import os

from loopformers.environment import IMPORT as VARIABLE
from loopformers.errors import ConfigError

__all__ = ["VARIABLE", "load_extensions"]


def load_extensions() -> None:
    """Import the modules that the environment names; once each, as Python does.

    Raises:
        ConfigError: There is no such module.
    """
    for name in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and lacks something itself
            raise ConfigError(
                f"{VARIABLE}={os.environ[VARIABLE]!r} names {name!r}, and Python finds no such module; install it, or put its "
                "folder into PYTHONPATH"
            ) from error
