from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopformers.cli.main import main
from loopformers.data.tokenizer import train_tokenizer
from loopformers.testing import tiny_model

OPTIONS = ["--data", "bundled/austen", "--windows", "3", "--seq-len", "20"]


def test_json_holds_every_measure_of_every_loop(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints / "loopformer"
    runs = ["--schedule", "uniform:3", "--schedule", "coarse-first:2"]
    assert main(["analyze", str(folder), *OPTIONS, *runs, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["data"], result["split"], result["seq_len"]) == ("bundled/austen", "validation", 20)
    profile = result["models"]["loopformer"]
    assert (profile["num_windows"], profile["num_tokens"], profile["num_targets"]) == (3, 60, 57)
    assert [(run["schedule"], len(run["loops"]), len(run["cka"])) for run in profile["runs"]] == [
        ("1/3,1/3,1/3", 3, 3),
        ("2/3,1/3", 2, 2),
    ]
    assert profile["runs"][0]["loops"][2]["loss"] > 0


def test_two_models_make_one_page(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "analysis"
    models = [str(checkpoints / "lt"), str(checkpoints / "elastic-flt")]
    assert main(["analyze", *models, *OPTIONS, "--output-dir", str(output)]) == 0
    printed = capsys.readouterr()
    assert "CKA, mean of pairs" in printed.out
    assert str(output / "report.html") in printed.err
    assert list(json.loads((output / "analysis.json").read_text())["models"]) == ["lt", "elastic-flt"]
    assert "What loops do: lt and elastic-flt" in (output / "report.html").read_text(encoding="utf-8")
    assert (output / "lens-lt.png").exists()
    assert main(["analyze", models[0], *OPTIONS, "--output-dir", str(output)]) == 2
    assert "already contains analysis.json; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["lt", "loopformer", "elastic-flt"], "3 models are more than the 2 that stand side by side"),
        (["lt", "lt"], "is given twice"),
        (["lt", "loopformer", "--schedule", "2/3,1/3"], "does not know step sizes"),
        (["lt", "--windows", "0"], "--windows: 0 must be a whole number from 1"),
        (["loopformer", "--seq-len", "41"], "more than the 40 positions"),
        (["nowhere"], "is no folder"),
    ],
)
def test_what_cannot_be_analysed_is_an_error(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    given = [
        str(checkpoints / word) if word[0] != "-" and "/" not in word and not word.isdigit() else word
        for word in arguments
    ]
    assert main(["analyze", *given]) == 2
    assert text in capsys.readouterr().err


def test_models_of_other_tokenizers_do_not_compare(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train_tokenizer(["a b c " * 40], 257)
    tiny_model("lt", vocab_size=len(other)).save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    assert main(["analyze", str(checkpoints / "lt"), str(tmp_path / "other"), *OPTIONS]) == 2
    assert "have different tokenizers, and measures over other tokens do not compare" in capsys.readouterr().err
