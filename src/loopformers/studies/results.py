"""The results of a study: one JSON Lines file, a header and then a line for each cell that has run.

    {"schema": "loopformers.study", "version": 1, "grid": "stability", "title": "..", "cells": ["flt_T12_seed0", ..]}
    {"cell": "flt_T12_seed0", "status": "finished", "axes": {..}, "recipe": {..}, "run": {..}, ..}

A line is appended when its cell ends; of several lines of one cell the last counts, as a failed cell is run again. The fields of
a line are those of `CellResult`, and docs/studies/engine.md describes them. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from loopformers.errors import ConfigError, DataError
from loopformers.files import write_whole, writing
from loopformers.readers import parse_json
from loopformers.records import make_record
from loopformers.studies.grid import Cell, Grid, Label
from loopformers.training.recipe import differences, from_fields, to_fields

__all__ = ["RESULTS_FILE", "SCHEMA", "SCHEMA_VERSION", "STATUSES", "CellResult", "Held", "ResultsFile", "Status"]

SCHEMA, SCHEMA_VERSION = "loopformers.study", 1

RESULTS_FILE = "results.jsonl"

Status = Literal["finished", "diverged", "failed"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """What became of one cell. Lists over steps have one entry an update; null stands for a number that is not finite."""

    cell: str
    """Its id."""
    status: Status
    """finished; diverged: a loss or gradient was not finite, and training ended there; failed: no result."""
    axes: Mapping[str, Label]
    """`system`, `loops`, `seed`, and the grid's further axes."""
    recipe: Mapping[str, Any]
    """Every field of what was trained."""
    error: str = ""
    """Why it failed or diverged."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `training.run_folder.RunResult`: losses at every budget, unigram level, verdict, FLOPs, parameters."""
    stability: Mapping[str, Any] = field(default_factory=dict)
    """`oscillation` and `residual`, the measures of `loopformers.analysis.stability`."""
    verdicts: Sequence[Mapping[str, Any]] = ()
    """`step` and `verdict` of each change of the verdict that is made during training."""
    loop_use: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `loopformers.evaluation.loop_use.LoopUse`."""
    curves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, over steps: `step`, `loss`, `gradient_norm`, `log_std`; lists by loop: `residual_norms`,
    `loop_gradient_norms`, `state_cosines`."""
    seconds: float | None = None
    """Wall time of the updates, without evaluation."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """What ran it."""
    validation: list[Mapping[str, Any]] = field(default_factory=list)
    """`step`, `training_flops` and `losses`, by number of loops run, of each validation; the last at the end."""

    @property
    def has_outcome(self) -> bool:
        """Whether training came to an end of its own, good or bad: such a cell is not run again."""
        return self.status != "failed"

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Held:
    """What a results file holds."""

    grid: str
    """Name of the grid."""
    title: str
    """Of the study."""
    cells: tuple[str, ...]
    """Ids of all cells of the grid, in order."""
    results: Mapping[str, CellResult]
    """The last result of each cell that has run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The first line of a results file."""

    schema: str
    version: int
    grid: str
    title: str
    cells: tuple[str, ...]


class ResultsFile:
    """The results file of a study's folder.

    Args:
        folder: Of the study.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS_FILE

    def begin(self, grid: Grid) -> Held:
        """Make the file for a grid, or see that it is this grid's; one that has grown since, by seeds or systems, still is.

        Raises:
            DataError: As in `read`.
            ConfigError: It holds cells that the grid has not, or has with another recipe.
        """
        cells = tuple(cell.id for cell in grid.cells)
        results: Mapping[str, CellResult] = {}
        if self.path.exists():
            held = self.read()
            known = {cell.id: cell for cell in grid.cells}
            for result in held.results.values():
                self._check_same(result, known.get(result.cell), grid)
            if held.cells == cells and self.path.read_bytes().endswith(b"\n"):
                return held
            results = held.results
        header = {"schema": SCHEMA, "version": SCHEMA_VERSION, "grid": grid.name, "title": grid.title, "cells": cells}
        lines = [json.dumps(header), *(json.dumps(result.to_json()) for result in results.values())]
        write_whole(self.path, "".join(line + "\n" for line in lines))
        return Held(grid.name, grid.title, cells, results)

    def append(self, result: CellResult) -> None:
        """Add the line of a cell that has ended."""
        line = json.dumps(result.to_json(), allow_nan=False)
        with (
            writing(self.path),
            self.path.open("r+", encoding="utf-8") as file,
        ):  # a file that is gone is not begun anew
            file.seek(0, os.SEEK_END)
            file.write(line + "\n")

    def read(self) -> Held:
        """Return what the file holds. A last line that was cut off by a crash is left out: its cell runs again.

        Raises:
            DataError: No such file, another schema or version, or a line that is no result.
        """
        if not self.path.exists():
            raise DataError(f"{str(self.path.parent)!r} holds no {RESULTS_FILE}; run the study there first")
        lines = self.path.read_bytes().splitlines(keepends=True)
        header = self._header(lines[0] if lines else b"")
        if len(lines) > 1 and not lines[-1].endswith(b"\n"):
            lines.pop()
        results: dict[str, CellResult] = {}
        for number, line in enumerate(lines[1:], start=2):
            result = self._result(line, number)
            results[result.cell] = result
        return Held(header.grid, header.title, header.cells, results)

    def _result(self, line: bytes, number: int) -> CellResult:
        source = f"line {number} of {str(self.path)!r}"
        remedy = "restore the file, or remove the line: its cell runs again"
        return make_record(CellResult, _parse(line, source), source, error=DataError, remedy=remedy)

    def _header(self, line: bytes) -> Header:
        try:
            fields = _parse(line, str(self.path))
            found = fields["schema"], fields["version"]
        except (DataError, KeyError) as error:
            raise DataError(f"{str(self.path)!r} is no results file of a study; choose another output_dir") from error
        if found != (SCHEMA, SCHEMA_VERSION):
            raise DataError(
                f"{str(self.path)!r} has schema {found[0]!r} version {found[1]!r}, and this version of loopformers reads "
                f"{SCHEMA!r} version {SCHEMA_VERSION}; choose another output_dir, or use the version that wrote it"
            )
        return make_record(Header, fields, str(self.path), error=DataError, remedy="choose another output_dir")

    def _check_same(self, result: CellResult, cell: Cell | None, grid: Grid) -> None:
        folder = str(self.path.parent)
        if cell is None:
            raise ConfigError(
                f"output_dir={folder!r} holds results of another grid: cell {result.cell!r} is not in grid {grid.name!r}; "
                "give the grid that it was made with, or another output_dir"
            )
        if changed := differences(cell.recipe, from_fields(result.recipe)):
            changes = ", ".join(f"{key}={new!r} (there: {old!r})" for key, (new, old) in changed.items())
            raise ConfigError(
                f"output_dir={folder!r} holds results of another grid: cell {result.cell!r} has {changes}; give the grid that "
                "it was made with, or another output_dir"
            )


def _parse(line: bytes, source: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 text") from error
    return parse_json(text, dict, source, DataError, "restore the file")


def failed(cell: Cell, error: str) -> CellResult:
    """Return the result of a cell that has none."""
    return CellResult(cell=cell.id, status="failed", axes=dict(cell.axes), recipe=to_fields(cell.recipe), error=error)
