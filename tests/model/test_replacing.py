from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopformers.errors import CheckpointError, CheckpointWarning
from loopformers.folders import owned
from loopformers.model.replacing import replaced_folder
from tests.children import KILLED, REFUSED, exit_code_of, start_elsewhere

CONFIG = '{"model_type": "loopformers"}'


def make_model(folder: Path, weights: str, config: str = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_text(weights)
    return folder


def replace(out: Path, source: Path, weights: str = "new", *, overwrite: bool = True) -> None:
    with replaced_folder(out, source, overwrite=overwrite) as aside:
        make_model(aside, weights)


def weights_of(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_model(tmp_path / "official", "theirs", "{}")


def test_a_folder_that_is_or_holds_the_source_is_never_replaced(source: Path, tmp_path: Path) -> None:
    inside = make_model(tmp_path / "ours" / "below" / "official", "theirs")
    make_model(tmp_path / "ours" / "x", "")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    for out, origin in (
        (source, source),
        (source, source / "model.safetensors"),
        (tmp_path / "ours", inside),
        (tmp_path / "ours", inside / "model.safetensors"),
        (tmp_path / "link", inside),
        (tmp_path / "ours", tmp_path / "link" / "below" / "official"),
        (tmp_path / "new" / ".." / "official", source),
    ):
        with pytest.raises(CheckpointError, match="is, or holds, the checkpoint that is converted"):
            replace(out, origin)
    assert (weights_of(source), weights_of(inside)) == ("theirs", "theirs")


def no_config(out: Path) -> None:
    (out / "config.json").unlink()


def broken_config(out: Path) -> None:
    (out / "config.json").write_text("{")


def foreign_config(out: Path) -> None:
    (out / "config.json").write_text('{"model_type": "llama"}')


def another_file(out: Path) -> None:
    (out / "thesis.tex").touch()


def another_folder(out: Path) -> None:
    (out / "checkpoint-3").mkdir()


def a_run(out: Path) -> None:
    (out / "metrics.jsonl").touch()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (no_config, "is no model's folder"),
        (broken_config, "config.json is not readable JSON"),
        (foreign_config, "holds a model of type 'llama'"),
        (another_file, "holds 'thesis.tex', which no conversion writes"),
        (another_folder, "holds 'checkpoint-3'"),
        (a_run, "holds 'metrics.jsonl'"),
    ],
)
def test_only_a_model_and_nothing_else_is_replaced(
    source: Path, tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    out = make_model(tmp_path / "out", "old")
    change(out)
    before = sorted(out.iterdir())
    with pytest.raises(CheckpointError, match=text):
        replace(out, source)
    assert sorted(out.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official", "out"]


def test_a_file_is_not_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        replace(tmp_path / "file", source)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_that_a_command_is_writing_to_is_not_replaced(source: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "out", "old")
    with owned(tmp_path / "out"):
        assert start_elsewhere(lambda: replace(tmp_path / "out", source)) == REFUSED
    assert weights_of(tmp_path / "out") == "old"


def test_a_failure_leaves_what_was_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "out", "old")

    def fail(aside: Path, weights: str) -> None:
        (aside / "half").mkdir(parents=True)
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules[__name__], "make_model", fail)
    with pytest.raises(ZeroDivisionError):
        replace(tmp_path / "out", source)
    assert weights_of(tmp_path / "out") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official", "out"]


@pytest.mark.parametrize(("kill", "found"), [(1, "old"), (2, "old"), (3, "new")])
def test_a_kill_at_any_point_leaves_the_old_or_the_new_model(
    source: Path, tmp_path: Path, kill: int, found: str
) -> None:
    """Before the old model goes, between the two renames, and before what was replaced is deleted."""
    out = make_model(tmp_path / "out", "old")

    def die() -> None:
        calls = iter(range(1, 9))

        def or_die(do: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                if str(args[0]).endswith("/converted") and "rmtree" in do.__name__:
                    return None  # cleaning before the work begins
                if next(calls) == kill:
                    os._exit(KILLED)
                return do(*args, **kwargs)

            return step

        os.replace, shutil.rmtree = or_die(os.replace), or_die(shutil.rmtree)  # type: ignore[assignment]
        replace(out, source)

    assert exit_code_of(die) == KILLED
    assert out.exists() is (kill != 2)
    if kill == 2:
        with (
            pytest.warns(CheckpointWarning, match="killed before its model was in place; the model .* before is back"),
            pytest.raises(CheckpointError, match="exists already"),
        ):
            replace(out, source, overwrite=False)
    assert weights_of(out) == found
    replace(out, source, "newest")
    assert weights_of(out) == "newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official", "out"]


def test_what_an_earlier_version_left_is_found(source: Path, tmp_path: Path) -> None:
    make_model(tmp_path / ".out-x1_y2z3a" / "replaced", "old")
    with pytest.warns(CheckpointWarning, match="is back"):
        replace(tmp_path / "out", source)
    assert weights_of(tmp_path / "out") == "new"


def test_two_conversions_into_one_folder_do_not_meet(source: Path, tmp_path: Path) -> None:
    with replaced_folder(tmp_path / "out", source, overwrite=False) as aside:
        assert start_elsewhere(lambda: replace(tmp_path / "out", source)) == REFUSED
        make_model(aside, "first")
    assert weights_of(tmp_path / "out") == "first"
