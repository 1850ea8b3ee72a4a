from __future__ import annotations

import pytest

from loopformers.cli.main import main
from loopformers.errors import ConfigError
from loopformers.training.launcher import VARIABLES, check_launcher, process_rank, world_size

MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in (*VARIABLES, *MEETING):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "-1"}, 0),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, 0),
        ({"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2", **MEETING}, 2),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MEETING}, 3),
    ],
)
def test_what_a_launcher_says_is_taken(variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **variables)
    assert check_launcher() == rank


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' must be a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' must be"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999"),
        ({"RANK": "abc"}, "RANK='abc' must be a whole number of at least 0"),
        ({"RANK": "1.0"}, "RANK='1.0' must be"),
        ({"LOCAL_RANK": "7"}, r"LOCAL_RANK=7 with 1 process\(es\)"),
        ({"WORLD_SIZE": "2", "RANK": "2", **MEETING}, r"RANK=2 with 2 process\(es\)"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 but MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", **MEETING},
            "LOCAL_RANK=2 with 2",
        ),
    ],
)
def test_what_no_launcher_says_is_refused_by_name(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(monkeypatch, **variables)
    with pytest.raises(ConfigError, match=text):
        check_launcher()
    for command in (["train", "--config", "quickstart-flt"], ["plan", "quickstart-flt", "--no-time"]):
        assert main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("text", ["abc", "", "0", "1.5", "9" * 30])
def test_whoever_reads_a_number_of_processes_gets_one_or_an_error_that_names_it(text, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert world_size() == 3
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE='.*' must be a whole number of at least 1"):
        world_size()


def test_the_rank_is_0_without_a_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert process_rank() == 0
    monkeypatch.setenv("RANK", "2")
    assert process_rank() == 2
