"""Keeps transformers off the terminal where a program of ours speaks itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["quiet_transformers"]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars, reminders and loading reports off the terminal."""
    from transformers.utils import logging  # the package itself need not be loaded to define this

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
