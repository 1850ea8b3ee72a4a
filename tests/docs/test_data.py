"""What the page on data says is what the package does."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from loopformers.cli import data

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^loopformers data (.*)$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_the_command_line_takes(command):
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    assert parser.parse_args(shlex.split(command)).data_command in ("build", "info")


def test_there_are_commands_and_the_total_is_the_sum():
    assert len(COMMANDS) >= 5
    rows = re.findall(r"^\| [\w.-]+ \| \S+ \| ([\d,]+) \| ([\d,]+) \| \w", PAGE, re.M)
    total = re.search(r"^\| all \| \| ([\d,]+) \| ([\d,]+) \|", PAGE, re.M)
    assert len(rows) == 12
    for column in (0, 1):
        numbers = [int(row[column].replace(",", "")) for row in rows]
        assert sum(numbers) == int(total[column + 1].replace(",", ""))


def test_the_example_runs_and_resumes_with_the_second_window():
    names = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], names)
    assert set(names["window"]) == {"input_ids", "labels", "position_ids"}
    following = iter(names["windows"])
    next(following)
    assert np.array_equal(next(following)["input_ids"], next(iter(names["resumed"]))["input_ids"])
