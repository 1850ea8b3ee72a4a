"""Paths as users write them. They are expanded once, where they enter: in a recipe, a variable or an argument."""

from __future__ import annotations

import os
import re

from loopformers.errors import ConfigError, shorten

__all__ = ["expand_path"]


def expand_path(text: str | os.PathLike[str], name: str = "path") -> str:
    """Return a path with `~` and `~user` at its start replaced by that home folder.

    Other parts stay as they are: a relative path stays relative, and environment variables are not expanded, as the same
    recipe would then mean another folder in another shell. A path that starts with one is refused, since it would
    otherwise name a folder called `$HOME`.

    Args:
        text: The path.
        name: What it is, for errors.

    Raises:
        ConfigError: An empty path, one with a NUL or with bytes that are not text, the home of a user who does not exist,
            or a path that starts with an environment variable.
    """
    path = os.fspath(text)
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{name}={shorten(path)} is empty and names no file or folder; give a path")
    if "\0" in path:
        raise ConfigError(f"{name}={shorten(path)} contains a NUL character, which paths cannot have; remove it")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name}={shorten(path)} is not UTF-8 text (character {error.start + 1}); rename the file or folder"
        ) from error
    if re.match(r"\$(\w|\{)", path):
        raise ConfigError(
            f"{name}={shorten(path)} starts with an environment variable, and these are not expanded here; write ~ for your "
            "home folder, or the full path (or ./$NAME for a folder with exactly that name)"
        )
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(
            f"{name}={shorten(path)}: there is no home folder of {path.partition('/')[0]!r}; correct the user's name, or write "
            f"./{path[:60]} for a file or folder with exactly that name"
        )
    return expanded
