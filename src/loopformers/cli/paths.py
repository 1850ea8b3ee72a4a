"""Paths as arguments: expanded here, once, for every command, and refused where they cannot name anything.

Both functions are a `type` of argparse.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from loopformers.errors import ConfigError
from loopformers.paths import expand_path

__all__ = ["path", "path_object"]


def path(text: str) -> str:
    """Read a path, or a name that may stand for one, as `expand_path` does."""
    try:
        return expand_path(text)
    except ConfigError as error:  # argparse would show a ValueError without its text
        raise argparse.ArgumentTypeError(str(error)) from error


def path_object(text: str) -> Path:
    """Read a path, as a `Path`."""
    return Path(path(text))
