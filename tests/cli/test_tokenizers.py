"""Every command that opens a tokenizer opens it in the one place that runs no foreign code and names what is damaged."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import loopformers
from loopformers.cli.main import main

COMMANDS = [
    "generate DIR --prompt abc",
    "analyze DIR --windows 1",
    "evaluate budget DIR --windows 1 --no-time",
    "evaluate schedules DIR --budget 2 --windows 1",
    "evaluate perplexity DIR --data TEXT",
    "evaluate tasks DIR --tasks sciq --data TASKS --output-dir OUT",
    "data info TEXT --split-by tail --tokenizer DIR",
    "train --config quickstart-flt --data.tokenizer DIR --data.sources TEXT --data.split_by tail --training.output_dir OUT",
]


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer to be damaged, beside a text and a task."""
    (tmp_path / "text.txt").write_text("On day 1 the sea was calm. " * 99)
    (tmp_path / "sciq").mkdir()
    row = {"question": "?", "support": "", "correct_answer": "a", **{f"distractor{i}": "b" for i in (1, 2, 3)}}
    (tmp_path / "sciq" / "test.jsonl").write_text(json.dumps(row))
    return Path(shutil.copytree(checkpoints / "loopformer", tmp_path / "model"))


def run(command: str, folder: Path) -> int:
    root = folder.parent
    places = {"DIR": folder, "TEXT": root / "text.txt", "TASKS": root, "OUT": root / "out"}
    return main([str(places.get(word, word)) for word in command.split()])


@pytest.mark.parametrize("command", COMMANDS)
def test_code_beside_a_tokenizer_never_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass T: pass\n")
    file = folder / "tokenizer_config.json"
    asked = {"tokenizer_class": "Nope", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **asked}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    assert run(command, folder) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "asks for code of its own" in output.err
    assert "trust_remote_code" not in output.err
    assert not (folder / "ran").exists()
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_tokenizer_is_one_line_that_names_the_file(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").write_text("[]")
    assert run(command, folder) == 2
    assert (
        f"{folder / 'tokenizer.json'} contains a value of type list but must contain an object"
        in capsys.readouterr().err
    )


def test_no_other_place_opens_a_tokenizer_or_allows_foreign_code() -> None:
    found = {}
    for file in Path(loopformers.__file__).parent.rglob("*.py"):
        for call in re.findall(
            r"\w*Tokenizer\w*\.from_pretrained|(?:, |\()trust_remote_code=\w+", file.read_text(encoding="utf-8")
        ):
            found.setdefault(call, set()).add(file.name)
    assert found.pop("AutoTokenizer.from_pretrained") == {"tokenizer.py"}
    assert set(found) == {", trust_remote_code=False"}
