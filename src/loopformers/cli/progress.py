"""A progress bar for work that is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loopformers.cli.console import stderr

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far a piece of work is, on a terminal alone.

    Args:
        description: What is done.
        total: How much there is to do.

    Yields:
        A function that is called with how much was done since its last call.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
