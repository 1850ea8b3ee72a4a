from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopformers.errors import ConfigError, DataError, WriteError
from loopformers.studies.grid import Grid, expand_grid
from loopformers.studies.results import RESULTS_FILE, CellResult, ResultsFile, failed
from loopformers.training.recipe import to_fields


@pytest.fixture
def grid(content: dict[str, Any]) -> Grid:
    return expand_grid(content, name="tiny")


def result_of(grid: Grid, number: int, make: Callable[..., CellResult]) -> CellResult:
    cell = grid.cells[number]
    return make("x", 2, 0, 5.0, cell=cell.id, axes=dict(cell.axes), recipe=to_fields(cell.recipe))


def test_results_come_back_as_they_were_and_the_last_line_of_a_cell_counts(
    grid: Grid, make: Callable[..., CellResult], tmp_path: Path
) -> None:
    file = ResultsFile(tmp_path)
    assert file.begin(grid).results == {}
    first, second = result_of(grid, 0, make), result_of(grid, 1, make)
    for result in (second, failed(grid.cells[0], "E: no"), first):
        file.append(result)
    held = file.begin(grid)
    assert held.cells == tuple(cell.id for cell in grid.cells)
    assert held.results == {second.cell: second, first.cell: first}
    assert [held.results[cell].has_outcome for cell in held.results] == [True, True]
    assert not failed(grid.cells[0], "E: no").has_outcome


def test_the_header_names_the_schema_and_its_version(grid: Grid, tmp_path: Path) -> None:
    ResultsFile(tmp_path).begin(grid)
    header = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert (header["schema"], header["version"], header["grid"]) == ("loopformers.study", 1, "tiny")


def test_a_grid_that_has_grown_keeps_its_results(
    content: dict[str, Any], grid: Grid, make: Callable[..., CellResult], tmp_path: Path
) -> None:
    file = ResultsFile(tmp_path)
    file.begin(grid)
    file.append(result_of(grid, 3, make))
    content["blocks"].append({"model.num_loops": [5]})
    grown = expand_grid(content, name="tiny")
    held = file.begin(grown)
    assert len(held.cells) == 5
    assert list(file.read().results) == [grid.cells[3].id]
    assert file.read().cells == held.cells


def test_results_of_another_grid_are_refused(
    content: dict[str, Any], grid: Grid, make: Callable[..., CellResult], tmp_path: Path
) -> None:
    file = ResultsFile(tmp_path)
    file.begin(grid)
    file.append(result_of(grid, 0, make))
    before = file.path.read_bytes()
    content["blocks"][0]["model.preset"] = ["flt"]
    with pytest.raises(ConfigError, match="another grid: cell 'lt_T2_seed0' is not in grid 'other'"):
        file.begin(expand_grid(content, name="other"))
    content["blocks"][0]["model.preset"] = ["lt"]
    content["base"]["training"]["steps"] = 9
    with pytest.raises(ConfigError, match=r"another grid: cell 'lt_T2_seed0' has training.steps=9 \(there: 4\)"):
        file.begin(expand_grid(content, name="tiny"))
    assert file.path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "loopformers.study", "version": 2}\n', "version 2, and this version of loopformers reads"),
        ('{"schema": "another", "version": 1}\n', "has schema 'another'"),
        ("{}\n", "is no results file of a study"),
        ("", "is no results file of a study"),
    ],
)
def test_a_file_of_another_schema_is_refused(grid: Grid, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).write_text(text)
    with pytest.raises(DataError, match=said):
        ResultsFile(tmp_path).begin(grid)
    assert (tmp_path / RESULTS_FILE).read_text() == text


def test_a_line_cut_off_by_a_crash_is_removed_and_a_damaged_one_refused(
    grid: Grid, make: Callable[..., CellResult], tmp_path: Path
) -> None:
    file = ResultsFile(tmp_path)
    file.begin(grid)
    file.append(result_of(grid, 0, make))
    whole = file.path.read_text()
    file.path.write_text(whole + whole.splitlines()[1][:50])
    assert list(file.read().results) == [grid.cells[0].id]
    assert file.path.read_text() != whole, "reading writes nothing: the study may be running"
    assert list(file.begin(grid).results) == [grid.cells[0].id]
    assert file.path.read_text() == whole
    file.path.write_text(whole + '{"cell": 1}\n' + whole.splitlines()[1] + "\n")
    with pytest.raises(DataError, match=r"line 3 of .*: its field 'cell' is 1 but must be a text"):
        file.read()


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no results.jsonl; run the study there first"):
        ResultsFile(tmp_path).read()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": 1}, "has a field 'colour' that this version of loopformers does not know"),
        ({"status": "done"}, "its field 'status' is 'done'"),
        ({"seconds": "long"}, "its field 'seconds' is 'long' but must be a number or null"),
        ({"curves": []}, r"its field 'curves' is \[\] but must be an object"),
        ({"cell": None}, "its field 'cell' is None but must be a text"),
    ],
)
def test_a_result_of_another_version_or_type_is_refused_with_its_line(
    grid: Grid, make: Callable[..., CellResult], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    file = ResultsFile(tmp_path)
    file.begin(grid)
    file.append(result_of(grid, 0, make))
    header, line = file.path.read_text().splitlines()
    file.path.write_text(f"{header}\n{json.dumps(json.loads(line) | change)}\n")
    with pytest.raises(DataError, match=rf"line 2 of .*{said}"):
        file.read()


def test_results_that_vanish_are_not_begun_without_a_header(
    grid: Grid, make: Callable[..., CellResult], tmp_path: Path
) -> None:
    file = ResultsFile(tmp_path)
    file.begin(grid)
    file.path.unlink()
    with pytest.raises(WriteError, match=r"results\.jsonl' cannot be written"):
        file.append(result_of(grid, 0, make))
    assert not file.path.exists()
    file.path.write_text(json.dumps({"schema": "loopformers.study", "version": 1, "grid": 3}))
    with pytest.raises(DataError, match="its field 'grid' is 3 but must be a text"):
        file.read()
