from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loopformers.cli.main import main
from loopformers.data.tokenizer import bundled_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "days.txt"
    file.write_text("".join(f"On day {n} the sea was calm.\n" for n in range(20)), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    tokenizer = bundled_tokenizer()
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=24,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=40,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def perplexity(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", "perplexity", *arguments, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_our_models_and_others_stand_on_one_text(
    checkpoints: Path, llama: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = str(checkpoints / "elastic-flt")
    options = ["--data", text, "--context", "16", "--stride", "8"]
    record = perplexity(capsys, ours, llama, *options, "--num-loops", "1,3")
    elastic, outside = record["models"]
    assert [budget["num_loops"] for budget in elastic["budgets"]] == [1, 3]
    assert [budget["num_loops"] for budget in outside["budgets"]] == [None]
    assert record["text_bytes"] == len(Path(text).read_bytes())
    for model in record["models"]:
        assert (model["context"], model["stride"]) == (16, 8)
        for budget in model["budgets"]:
            assert budget["num_targets"] == model["num_tokens"] - 1
    again = perplexity(capsys, ours, llama, *options, "--num-loops", "1,3", "--batch-size", "4")
    assert again["models"][0]["budgets"][1]["loss"] == pytest.approx(elastic["budgets"][1]["loss"], rel=1e-6)
    trained = perplexity(capsys, ours, "--data", text)
    assert (trained["models"][0]["context"], trained["models"][0]["stride"]) == (40, 20)
    assert trained["models"][0]["budgets"][0]["num_loops"] == 3


def test_the_table_says_what_was_read_and_how(llama: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "perplexity", llama, "--data", text]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("per token", "per byte", "one stream", "40 tokens every 20", "SHA-256"):
        assert words in out
    assert "loops" not in out


def test_bad_input_is_refused(
    checkpoints: Path, llama: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in (
        ([llama, "--data", text, "--num-loops", "2"], "has no loops"),
        ([llama, "--data", text, "--context", "41"], "more than the 40 positions"),
        ([str(checkpoints / "loopformer"), "--data", text, "--context", "41"], "more than the 40 positions"),
        ([str(checkpoints / "lt"), "--data", text, "--schedule", "1/2,1/4,1/4"], "unequal steps"),
        ([str(checkpoints / "lt"), "--data", text, "--context", "8", "--stride", "8"], "a stride of 8"),
        ([str(checkpoints / "lt"), "--data", text, "--stride", "0"], "--stride: 0 must be"),
        ([str(checkpoints / "lt"), "--data", text, "--batch-size", "0"], "--batch-size: 0 must be"),
        ([str(checkpoints / "lt"), "--data", str(tmp_path / "empty.txt")], "holds no text"),
        ([str(checkpoints / "lt"), "--data", str(tmp_path / "none.txt")], "no file or folder"),
        ([str(checkpoints / "lt")], "WikiText-2"),
        ([llama, llama, "--data", text], "is given twice"),
    ):
        assert main(["evaluate", "perplexity", *arguments]) == 2
        assert message in capsys.readouterr().err
