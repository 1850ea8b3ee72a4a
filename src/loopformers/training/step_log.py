"""A JSON-lines file with records of steps that a resumed run continues without repeating or losing one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopformers.errors import DataError
from loopformers.files import write_whole, writing

__all__ = ["METRICS_FILE", "StepLog"]

METRICS_FILE = "metrics.jsonl"
"""Name of the log of updates in a run's folder."""


class StepLog:
    """One JSON object a line, each with an integer `step` (updates done), in rising order.

    The file and its folder are made by the first record. From then on they must stay: a file that is removed while records
    are being written is not made anew, because nobody could tell that its beginning is missing.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_records = 0
        """Records that the file holds, as far as this object has written or kept them."""

    def append(self, record: Mapping[str, Any], *, to_disk: bool = False) -> None:
        """Write one record.

        Args:
            record: With a `step`.
            to_disk: Wait until the record is on the disk itself.

        Raises:
            DataError: It holds a number that JSON cannot hold (nan, infinity).
            WriteError: It cannot be written, or the file with the earlier records is gone.
        """
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError as error:
            raise DataError(f"record {dict(record)!r} of {self.path} holds a number that is not finite") from error
        with writing(self.path):
            if not self.num_records:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", opener=self._open) as file:
                file.write(line.encode() + b"\n")
                file.flush()
                if to_disk:
                    os.fsync(file.fileno())
        self.num_records += 1

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_CREAT if self.num_records else flags, 0o666)

    def to_disk(self) -> None:
        """Wait until all records are on the disk itself, for what is written next to rest on them.

        Raises:
            WriteError: The file is gone, or cannot be written.
        """
        if self.num_records:
            with writing(self.path), open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return all complete records; a last line that was cut off by a crash is left out.

        Raises:
            DataError: A line before the last is no record: not UTF-8, no JSON object, or without a `step`.
        """
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror or error}); restore it") from error
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(_record(line))
            except (ValueError, RecursionError) as error:
                if number == len(lines):
                    break
                raise DataError(
                    f"line {number} of {self.path} is not a record of a step ({str(error) or type(error).__name__}); restore the "
                    "file from a copy, or start a new run in another folder"
                ) from error
        return records

    def truncate(self, step: int) -> list[dict[str, Any]]:
        """Drop every record after `step` and return those that stay. The file is replaced whole or not at all."""
        kept = [record for record in self.read() if record["step"] <= step]
        if self.path.exists():
            write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self.num_records = len(kept)
        return kept


def _record(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise ValueError("it was cut off")
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"it holds {type(record).__name__} where an object must be")
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise ValueError("it has no whole number as its step")
    return record
