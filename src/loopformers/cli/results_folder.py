"""Folders that commands write a result to: owned from the start of a command, and nothing in them is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from loopformers.errors import ConfigError
from loopformers.folders import owned, write_together

__all__ = ["check_absent", "results_folder", "save_result"]


@contextmanager
def results_folder(folder: Path | None, names: Sequence[str]) -> Iterator[None]:
    """Own a folder for a result inside the block; None: the command writes none.

    Args:
        folder: Made if there is none.
        names: Files of the result. The first is written last, so a folder without it holds no whole result; the others
            are then what a command that was killed has left, and are replaced.

    Raises:
        ConfigError: The folder holds a result, another process owns it, or it is a file.
    """
    if folder is None:
        yield
        return
    with owned(folder):
        check_absent(folder, names[:1])
        yield


def check_absent(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError where a folder holds one of the files that are about to be written."""
    for name in names:
        if (folder / name).exists():
            raise ConfigError(f"--output-dir {folder} already contains {name}; give another folder")


def save_result(folder: Path, names: Sequence[str], files: Mapping[str, str | bytes]) -> None:
    """Write the files of a result, the first of `names` last; after a crash the folder holds all of them or is cleaned."""
    write_together(folder, {name: files[name] for name in (*(n for n in files if n != names[0]), names[0])})
