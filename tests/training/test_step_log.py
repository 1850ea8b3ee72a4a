from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from loopformers.errors import DataError, WriteError
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


def test_a_log_that_vanishes_is_not_begun_anew(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run" / "metrics.jsonl")
    log.append({"step": 1})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(WriteError, match=r"metrics.jsonl' cannot be written \(No such file"):
        log.append({"step": 2})
    with pytest.raises(WriteError, match="No such file"):
        log.to_disk()
    assert not (tmp_path / "run").exists()
    resumed = StepLog(tmp_path / "metrics.jsonl")
    resumed.path.write_text('{"step": 1}\n{"step": 2}\n')
    assert len(resumed.truncate(1)) == resumed.num_records == 1
    resumed.path.unlink()
    with pytest.raises(WriteError, match="No such file"):
        resumed.append({"step": 2}, to_disk=True)


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"{}", b'{"step": "2"}', b'{"step": 2.5}', b'{"step": true}', b"[" * 9000, b'["step"]', b"\0\0"],
)
def test_a_line_that_is_no_record_is_named_unless_it_was_cut_off(tmp_path: Path, line: bytes) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.path.write_bytes(b'{"step": 1}\n' + line)
    assert log.read() == [{"step": 1}]
    log.path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 2 of .*metrics.jsonl is not a record of a step .*restore the file"):
        log.read()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        log.read()
