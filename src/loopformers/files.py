"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file aside, in the same folder, then rename it into place; make the folder if there is none.

    Args:
        path: The file; what it holds is replaced.
        content: Text, written as UTF-8, or bytes.

    Returns:
        The path.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return target
