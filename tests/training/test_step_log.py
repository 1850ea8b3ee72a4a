from __future__ import annotations

import math
from pathlib import Path

import pytest

from loopformers.errors import DataError
from loopformers.training.step_log import StepLog


def test_records_come_back_in_order(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run" / "metrics.jsonl")
    assert log.read() == []
    for step in (1, 2, 3):
        log.append({"step": step, "loss": step / 8})
    assert [record["loss"] for record in log.read()] == [0.125, 0.25, 0.375]


def test_truncation_keeps_records_up_to_a_step(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    assert log.truncate(2) == []
    assert not log.path.exists()
    for step in (1, 2, 3):
        log.append({"step": step})
    assert log.truncate(2) == [{"step": 1}, {"step": 2}] == log.read()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    with log.path.open("a") as file:
        file.write('{"step": 2')
    assert log.read() == [{"step": 1}]
    log.truncate(1)
    log.append({"step": 2})
    assert [record["step"] for record in log.read()] == [1, 2]


def test_damage_before_the_end_is_reported(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        log.read()


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not finite"):
        StepLog(tmp_path / "metrics.jsonl").append({"step": 1, "loss": math.nan})
