"""Progress bars: on a terminal alone; elsewhere commands print lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from loopformers.cli.console import stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from loopformers.studies.workers import Stopping

__all__ = ["Bars", "progress_bar"]


class Bars:
    """Bars of counted work, each with a status beside it (the field `status`).

    Args:
        console: Where to draw.
        width: Of the descriptions.
        time_left: Show the time that is left in the place of the time that has passed.
    """

    def __init__(self, console: Console, *, width: int = 0, time_left: bool = False) -> None:
        self.console = console
        self.progress = _progress(console, width=width, time_left=time_left, status=True)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are."""
        self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say_stopping(self, event: Stopping) -> None:
        """Say what Ctrl-C leads to."""
        running = ", ".join(event.tasks) or "nothing"
        self.say(f"Stopping {running} after the running step and saving; Ctrl-C again ends at once.")


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far a piece of work is.

    Args:
        description: What is done.
        total: How much there is to do.

    Yields:
        A function that is called with how much was done since its last call.
    """
    bar = _progress(stderr(), width=0, time_left=True, status=False)
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def _progress(console: Console, *, width: int, time_left: bool, status: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[Any] = [TextColumn(f"{{task.description:<{width}}}", markup=False), BarColumn(), MofNCompleteColumn()]
    if status:
        columns.append(TextColumn("{task.fields[status]}", markup=False))
    columns.append(TimeRemainingColumn() if time_left else TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
