"""A few worker processes that each do one task after the other and report what happens.

Every worker is spawned, runs one thread of torch, and ignores Ctrl-C: the parent alone decides when to stop, and tells
the workers through an event, so that each can end where its work can be continued. A worker that dies takes its task with
it and nothing else. This module imports no torch, and neither does the parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from loopformers.model.untrained import untrained_on_purpose

__all__ = ["Emit", "Failed", "Finished", "Reported", "Started", "Stopping", "TaskEvent", "TaskFunction", "run_tasks"]

Emit = Callable[[Any], None]
"""Sends a picklable value from a task to the parent."""

TaskFunction = Callable[[str, Emit, Callable[[], bool]], None]
"""(task, emit, stop requested) -> None. A picklable function that raises KeyboardInterrupt once it has stopped."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has begun a task."""

    task: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A task emitted a value."""

    task: str
    value: Any


@dataclass(frozen=True, slots=True)
class Finished:
    """A task came to its end."""

    task: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A task raised an error, or its process died."""

    task: str
    error: str
    details: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """Ctrl-C was pressed: the tasks that run come to a point from which they can continue."""

    tasks: tuple[str, ...]


TaskEvent = Started | Reported | Finished | Failed | Stopping
"""Anything that the parent hears of."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    task: str


def run_tasks(
    function: TaskFunction, tasks: Sequence[str], *, jobs: int, on_event: Callable[[TaskEvent], None]
) -> list[Failed]:
    """Run a function on each task, `jobs` at a time.

    With one job all tasks run in this process, where Ctrl-C reaches them as KeyboardInterrupt. With more, each runs in a
    worker process; after Ctrl-C the tasks that run are asked to stop and waited for, and a second one ends them at once.

    Args:
        function: What to do. Its module must be cheap to import: the parent imports it too.
        tasks: Their names, in the order of their start.
        jobs: Processes at the same time.
        on_event: Told everything, in this process.

    Returns:
        The tasks that failed.

    Raises:
        KeyboardInterrupt: Ctrl-C, once the tasks have stopped.
    """
    if jobs == 1:
        return _run_here(function, tasks, on_event)
    return _Pool(function, tasks, on_event).run(min(jobs, len(tasks)))


def _run_here(function: TaskFunction, tasks: Sequence[str], on_event: Callable[[TaskEvent], None]) -> list[Failed]:
    failures = []
    for task in tasks:
        on_event(Started(task))
        try:
            with untrained_on_purpose():
                function(task, lambda value, task=task: on_event(Reported(task, value)), lambda: False)  # type: ignore[misc]
        except Exception as error:  # whatever it is, the others go on
            failures.append(_failure(task, error))
            on_event(failures[-1])
        else:
            on_event(Finished(task))
    return failures


class _Pool:
    """The parent's side of the workers."""

    def __init__(self, function: TaskFunction, tasks: Sequence[str], on_event: Callable[[TaskEvent], None]) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.function = function
        self.waiting = deque(tasks)
        self.on_event = on_event
        self.stop = self.context.Event()
        self.workers: list[_Worker] = []
        self.failures: list[Failed] = []

    def run(self, jobs: int) -> list[Failed]:
        try:
            with _noticed_interrupt() as interrupted:
                for _ in range(jobs):
                    self._start_worker()
                self._listen(interrupted)
        finally:
            for worker in self.workers:
                worker.process.terminate()
                worker.process.join()
        if interrupted.is_set():
            raise KeyboardInterrupt
        return self.failures

    def _start_worker(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(self.function, theirs, self.stop), daemon=True)
        process.start()
        theirs.close()  # or a dead worker's end would never be noticed
        task = self.waiting.popleft()
        self.workers.append(_Worker(process, ours, task))
        ours.send(task)

    def _listen(self, interrupted: threading.Event) -> None:
        while self.workers:
            if interrupted.is_set() and not self.stop.is_set():
                self.stop.set()
                self.waiting.clear()
                self.on_event(Stopping(tuple(worker.task for worker in self.workers)))
            ready = wait([worker.connection for worker in self.workers], timeout=0.2)
            for worker in [worker for worker in self.workers if worker.connection in ready]:
                try:
                    event = worker.connection.recv()
                except (EOFError, OSError):
                    self._bury(worker)
                else:
                    self._hear(worker, event)

    def _hear(self, worker: _Worker, event: TaskEvent | None) -> None:
        if event is None:  # it has stopped
            self._dismiss(worker)
            return
        self.on_event(event)
        if isinstance(event, Failed):
            self.failures.append(event)
        if isinstance(event, Finished | Failed):
            if self.waiting:
                worker.task = self.waiting.popleft()
                worker.connection.send(worker.task)
            else:
                worker.connection.send(None)
                self._dismiss(worker)

    def _bury(self, worker: _Worker) -> None:
        self._dismiss(worker)
        if self.stop.is_set():
            return
        code = worker.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        failure = Failed(worker.task, f"its process ended with {how}; was it out of memory?", "")
        self.failures.append(failure)
        self.on_event(failure)
        if self.waiting:
            self._start_worker()

    def _dismiss(self, worker: _Worker) -> None:
        worker.process.join()
        worker.connection.close()
        self.workers.remove(worker)


@contextlib.contextmanager
def _noticed_interrupt() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C: an exception in the middle of a message would lose what follows it."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # only the main thread may handle signals
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)  # a second one ends at once

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def _work(function: TaskFunction, connection: Connection, stop: Any) -> None:
    """Do tasks until None comes or a stop is asked for: the worker's side."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by the task
    while (task := connection.recv()) is not None:
        connection.send(Started(task))
        try:
            with untrained_on_purpose():
                function(task, lambda value, task=task: connection.send(Reported(task, value)), stop.is_set)  # type: ignore[misc]
        except KeyboardInterrupt:
            connection.send(None)
            return
        except Exception as error:
            connection.send(_failure(task, error))
        else:
            connection.send(Finished(task))


def _failure(task: str, error: Exception) -> Failed:
    details = "".join(traceback.format_exception(error))
    return Failed(task, f"{type(error).__name__}: {error}", details)
