"""`loopformers generate --exit`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loopformers.cli.main import main
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model

PROMPT = "It was a bright cold day"


@pytest.fixture(scope="module")
def trained_for_it(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exit") / "every-loop"
    tokenizer = bundled_tokenizer()
    tiny_model("lt-input", objective="every_loop", num_loops=5, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generate(folder: Path, *arguments: object) -> int:
    return main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "6", *map(str, arguments)])


def sample(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    assert generate(folder, *arguments, "--json") == 0
    output = capsys.readouterr()
    (found,) = json.loads(output.out)["samples"]
    return found, output.err


def test_average_loops_are_reported_and_the_loops_of_each_token(
    trained_for_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, remarks = sample(trained_for_it, capsys, "--exit", "argmax:1")
    loops = found["exit"]["loops"]
    assert len(loops) == found["num_new_tokens"] == 6
    assert all(2 <= n <= 5 for n in loops)
    assert found["exit"]["average_loops"] == sum(loops) / 6
    assert remarks == f"exit argmax:1: {sum(loops) / 6:.2f} of 5 loops a token, over 6 new tokens\n"


def test_a_rule_that_never_fires_writes_what_no_rule_writes(
    trained_for_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_rule, _ = sample(trained_for_it, capsys, "--exit", "argmax:9")
    without, _ = sample(trained_for_it, capsys)
    assert with_rule["token_ids"] == without["token_ids"]
    assert with_rule["exit"]["loops"] == [5] * 6
    assert "exit" not in without


def test_the_number_of_loops_bounds_the_rule(trained_for_it: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, remarks = sample(trained_for_it, capsys, "--exit", "argmax:9", "--num-loops", 3)
    assert found["exit"]["loops"] == [3] * 6
    assert "3.00 of 3 loops" in remarks


def test_an_average_is_calibrated_on_the_bundled_text(trained_for_it: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, remarks = sample(trained_for_it, capsys, "--exit", "state", "--average-loops", 3)
    rule = found["exit"]["rule"]
    assert rule.startswith("state:0.")
    assert f"--exit {rule} gives 3 loops on average on the bundled validation text" in remarks
    again, _ = sample(trained_for_it, capsys, "--exit", rule)
    assert again["token_ids"] == found["token_ids"]
    assert again["exit"]["loops"] == found["exit"]["loops"]


def test_notes_stand_before_the_text_and_not_in_it(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()  # shows both streams, as they come
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert generate(checkpoints / "elastic-flt", "--exit", "state", "--average-loops", 3) == 0
    lines = terminal.getvalue().splitlines()
    starts = ["--exit state:", "warning: exit rule state:", PROMPT]
    assert [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in starts] == sorted(
        i for i, line in enumerate(lines) if line.startswith(tuple(starts))
    )


def test_a_model_that_was_not_trained_for_it_is_measured_and_warned_of(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(checkpoints / "elastic-flt", "--exit", "state:0.5") == 0
    output = capsys.readouterr()
    assert output.out.startswith(PROMPT)
    assert "warning: exit rule state:0.5 on a model that was not trained for it: its short runs" in output.err
    assert "held-out tokens, loss " in output.err
    assert "loops on average, against " in output.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--exit", "kl"], "write for example kl:5e-4"),
        (["--exit", "lk:1"], "exit rule='lk' is not known"),
        (["--average-loops", "3"], "name one, such as --exit kl"),
        (["--exit", "kl:1", "--average-loops", "3"], "write --exit kl, or leave --average-loops out"),
        (["--exit", "argmax", "--average-loops", "3"], "rule to calibrate='argmax' is not known"),
        (["--exit", "kl", "--average-loops", "9"], "average_loops=9.0 must lie between 2"),
        (["--exit", "kl:1", "--num-beams", "2"], "--exit with --num-beams"),
    ],
)
def test_bad_input_is_refused_before_anything_is_printed(
    trained_for_it: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(trained_for_it, *arguments, "--json") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in output.err


def test_a_checkpoint_that_does_not_say_its_loops_is_refused(
    trained_for_it: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((trained_for_it / "config.json").read_text())
    assert fields.pop("num_loops") == 5
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert generate(tmp_path, "--exit", "kl:1") == 2
    assert "does not say num_loops, the number of loops that the model was trained with" in capsys.readouterr().err
