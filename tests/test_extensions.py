from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopformers.errors import ConfigError
from loopformers.extensions import VARIABLE, load_extensions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_named_modules_are_imported_once_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine_one", "mine_two"):
        (folder / f"{name}.py").write_text(f"print('{name} runs')")
    monkeypatch.setenv(VARIABLE, "mine_one, mine_two,")
    load_extensions()
    load_extensions()
    assert capsys.readouterr().out == "mine_one runs\nmine_two runs\n"


def test_nothing_is_imported_where_the_environment_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = set(sys.modules)
    load_extensions()
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", ["not_here", "not_here.below"])
def test_a_module_that_is_not_there_is_refused_with_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ConfigError, match=rf"names '{name}', and Python finds no such module; install it, or put"):
        load_extensions()


def test_what_a_module_of_yours_lacks_itself_is_its_own_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine_lacking.py").write_text("import not_here_either")
    monkeypatch.setenv(VARIABLE, "mine_lacking")
    with pytest.raises(ModuleNotFoundError, match="not_here_either"):
        load_extensions()
