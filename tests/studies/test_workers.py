from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from loopformers.errors import ScheduleWarning
from loopformers.studies.workers import Failed, Finished, Reported, Started, Stopping, TaskEvent, run_tasks


def count_letters(task: str, emit: Callable[[Any], None], stop_requested: Callable[[], bool]) -> None:
    if task == "broken":
        raise ValueError("no letters here")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    emit(len(task))


def wait_for_stop(task: str, emit: Callable[[Any], None], stop_requested: Callable[[], bool]) -> None:
    emit("ready")
    while not stop_requested():
        time.sleep(0.01)
    emit("saved")
    raise KeyboardInterrupt


def warn(task: str, emit: Callable[[Any], None], stop_requested: Callable[[], bool]) -> None:
    warnings.warn("5 steps of 1/5 were never drawn", ScheduleWarning, stacklevel=1)


def run(tasks: list[str], jobs: int) -> tuple[list[Failed], list[TaskEvent]]:
    events: list[TaskEvent] = []
    return run_tasks(count_letters, tasks, jobs=jobs, on_event=events.append), events


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_runs_once_and_reports(jobs: int) -> None:
    failures, events = run(["one", "three", "fifteen"], jobs)
    assert failures == []
    for task in ("one", "three", "fifteen"):
        own = [event for event in events if event.task == task]  # type: ignore[union-attr]
        assert own == [Started(task), Reported(task, len(task)), Finished(task)]


@pytest.mark.filterwarnings("error::loopformers.errors.ScheduleWarning")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_study_runs_untrained_budgets_without_a_word(jobs: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_tasks(warn, ["one", "two"], jobs=jobs, on_event=lambda event: None) == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_is_reported_and_the_others_go_on(jobs: int) -> None:
    failures, events = run(["broken", "one", "three"], jobs)
    assert [(f.task, f.error) for f in failures] == [("broken", "ValueError: no letters here")]
    assert "count_letters" in failures[0].details
    assert {Finished("one"), Finished("three")} <= set(events)


def test_a_process_that_dies_takes_only_its_task_with_it() -> None:
    failures, events = run(["killed", "one", "three"], 2)
    assert [(f.task, f.error) for f in failures] == [
        ("killed", "its process ended with signal 9; was it out of memory?")
    ]
    assert {Finished("one"), Finished("three")} <= set(events)


def test_ctrl_c_lets_running_tasks_stop_where_they_can_continue() -> None:
    events: list[TaskEvent] = []

    def listen(event: TaskEvent) -> None:
        events.append(event)
        if sum(event == Reported(task, "ready") for task in ("a", "b") for event in events) == 2 and len(events) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_tasks(wait_for_stop, ["a", "b", "never started"], jobs=2, on_event=listen)
    assert Stopping(("a", "b")) in events
    assert {Reported("a", "saved"), Reported("b", "saved")} <= set(events)
    assert Started("never started") not in events
