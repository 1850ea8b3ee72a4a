"""Files that appear whole or not at all, and one error that names the path when one cannot be written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from loopformers.errors import WriteError, first_line

__all__ = ["PARTIAL", "write_whole", "writing"]

PARTIAL = re.compile(r"\..+\.\d+\.partial")
"""Names of files that `write_whole` has not finished."""


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file aside, in the same folder, then rename it into place; make the folder if there is none.

    Args:
        path: The file; what it holds is replaced.
        content: Text, written as UTF-8, or bytes.

    Returns:
        The path.

    Raises:
        WriteError: The file cannot be written; an older one is as it was.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(aside, target)
        finally:
            with contextlib.suppress(OSError):  # what made the writing fail is what the reader must see
                aside.unlink()
    return target


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], *failures: type[Exception]) -> Iterator[None]:
    """Turn the system's error inside the block into a WriteError that names a path.

    Args:
        path: What is being written.
        failures: Types other than OSError that a library raises when it cannot write.

    Raises:
        WriteError: The block could not write. Its `errno` and `strerror` are the system's.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *failures)
    try:
        yield
    except WriteError:
        raise
    except kinds as cause:
        reason = getattr(cause, "strerror", None) or first_line(cause)
        error = WriteError(
            f"{os.fspath(path)!r} cannot be written ({reason}); free some space, or make sure that its folder exists and is "
            "writable"
        )
        error.errno, error.strerror = getattr(cause, "errno", None), reason
        raise error from cause
