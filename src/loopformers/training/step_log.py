"""A JSON-lines file with records of steps that a resumed run continues without repeating or losing one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopformers.errors import DataError
from loopformers.files import write_whole

__all__ = ["METRICS_FILE", "StepLog"]

METRICS_FILE = "metrics.jsonl"
"""Name of the log of updates in a run's folder."""


class StepLog:
    """One JSON object a line, each with an integer `step` (updates done), in rising order.

    Args:
        path: The file; its folder is made on the first record.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; numbers that JSON cannot hold (nan, infinity) are refused with DataError."""
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError as error:
            raise DataError(f"record {dict(record)!r} of {self.path} holds a number that is not finite") from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all complete records; a last line that was cut off by a crash is left out.

        Raises:
            DataError: A line before the last is no JSON object.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not line.endswith("\n"):
                    raise ValueError("incomplete")
            except ValueError as error:
                if number == len(lines):
                    break
                raise DataError(
                    f"line {number} of {self.path} is no JSON object; restore or remove the file"
                ) from error
            records.append(record)
        return records

    def truncate(self, step: int) -> list[dict[str, Any]]:
        """Drop every record after `step` and return those that stay. The file is replaced whole or not at all."""
        kept = [record for record in self.read() if record["step"] <= step]
        if self.path.exists():
            write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        return kept
