from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from loopformers.cli import evaluate, study
from loopformers.cli.main import COMMANDS, main
from loopformers.cli.paths import path, path_object

PATHS = {"DIR", "MODEL", "MODEL_OR_PRESET", "OUT", "OFFICIAL", "FILE", "SOURCE", "RECIPE", "GRID", "RESULTS"}
"""What help calls an argument that is a path, or a name where a path may stand."""


def test_both_types_expand_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert path("~/m") == "/home/someone/m"
    assert path_object("~/m") == Path("/home/someone/m")
    with pytest.raises(argparse.ArgumentTypeError, match="is empty"):
        path("")


def parsers() -> dict[str, argparse.ArgumentParser]:
    found = {}
    groups = (evaluate.SUBCOMMANDS, study.SUBCOMMANDS)
    modules = [command.module for command in COMMANDS.values()] + [m for group in groups for m, _ in group.values()]
    for module in modules:
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        found[module] = parser
        for action in parser._actions:  # those of `data`
            if isinstance(action, argparse._SubParsersAction):
                found |= {f"{module} {name}": sub for name, sub in action.choices.items()}
    return found


@pytest.mark.parametrize(("module", "parser"), parsers().items())
def test_every_path_of_every_command_is_read_as_one(module: str, parser: argparse.ArgumentParser) -> None:
    unread = [a.dest for a in parser._actions if a.metavar in PATHS and a.type not in (path, path_object)]
    assert not unread


def test_a_home_folder_in_an_argument_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("training: {output_dir: ~/runs/x}\n", encoding="utf-8")
    assert main(["train", "--config", "~/mine.yaml", "--print_config"]) == 0
    assert f"output_dir: {tmp_path}/runs/x" in capsys.readouterr().out
    assert not (tmp_path / "~").exists()
