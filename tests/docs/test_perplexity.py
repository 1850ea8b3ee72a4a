"""The commands that the page on evaluation shows for perplexity run, on tiny checkpoints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from loopformers.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^loopformers (evaluate perplexity .*)$", PAGE, flags=re.MULTILINE)


def test_every_command_on_perplexity_runs(quickstart_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (quickstart_models / "book.txt").write_text(
        "The sea lay still, and nobody on the quay said why. " * 20, encoding="utf-8"
    )
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        words = ["book.txt" if word == "bundled" else word for word in shlex.split(command)]  # a whole novel takes long
        assert main(words) == 0, f"{command}\n{capsys.readouterr().err}"
