"""What a study shows while it runs: a bar over the grid, and one for each cell that is being trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopformers.cli.progress import Bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from loopformers.studies.results import CellResult
    from loopformers.studies.workers import TaskEvent

__all__ = ["StudyBars"]


class StudyBars(Bars):
    """Bars on a terminal; elsewhere a line at the end of each cell.

    Args:
        console: Where to draw.
        num_cells: Of the grid.
        num_done: Cells that have an outcome already.
    """

    def __init__(self, console: Console, *, num_cells: int, num_done: int) -> None:
        super().__init__(console, width=28)
        self.num_cells, self.num_done = num_cells, num_done
        self.cells: dict[str, TaskID] = {}
        self.grid = self.progress.add_task("cells", total=num_cells, completed=num_done, status="")

    def on_event(self, event: TaskEvent) -> None:
        """Show an event of `run_study`."""
        from loopformers.studies.results import CellResult
        from loopformers.studies.workers import Failed, Finished, Reported, Started, Stopping

        match event:
            case Started(task):
                self.cells[task] = self.progress.add_task(task, total=None, status="loading")
            case Reported(task, CellResult() as result):
                self._end(task, outcome_of(result))
            case Reported(task, value):
                self._update(task, total=value.num_steps, completed=value.step, status=f"loss {value.loss:6.3f}")
            case Finished(task):
                self._drop(task)
            case Failed(task, error):
                self._end(task, f"failed: {error}")
                self._drop(task)
            case Stopping():
                self.say_stopping(event)

    def _end(self, task: str, outcome: str) -> None:
        self.num_done += 1
        self.progress.update(self.grid, completed=self.num_done)
        self.say(f"[{self.num_done}/{self.num_cells}] {task}: {outcome}")

    def _update(self, task: str, **fields: Any) -> None:
        if task in self.cells:
            self.progress.update(self.cells[task], **fields)

    def _drop(self, task: str) -> None:
        if task in self.cells:
            self.progress.remove_task(self.cells.pop(task))


def outcome_of(result: CellResult) -> str:
    """Say in a few words how a cell ended."""
    loss = result.run.get("loss")
    shown = "no finite loss" if loss is None else f"loss {loss:.3f}"
    return f"{result.run.get('verdict')}, {shown}"
