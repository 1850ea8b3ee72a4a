"""Hostile input of every kind, through the real entry point: one line on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopformers.cli.main import main

MANY = "9" * 5000
DEEP = '{"a":' * 3000 + "1" + "}" * 3000
MOST_SECONDS = 20

ARGUMENTS: dict[str, list[str]] = {
    "no such command": ["genrate"],
    "no such option": ["info", "flt", "--nosuch"],
    "option without value": ["generate", "MODEL", "--prompt"],
    "nothing to evaluate": ["evaluate"],
    "escape codes in a command": ["\x1b[2J"],
    "bytes that are no text": ["info", "a\udcff"],
    "a prompt that is no text": ["generate", "MODEL", "--prompt", "a\udcff"],
    "empty model": ["generate", "", "--prompt", "a"],
    "a model that is a file": ["generate", "FILE", "--prompt", "a"],
    "a model with NUL": ["generate", "a\0b", "--prompt", "a"],
    "a long name": ["generate", "x" * 5000, "--prompt", "a"],
    "a URL": ["generate", "http://localhost/model", "--prompt", "a"],
    "no tokens": ["generate", "MODEL", "--prompt", ""],
    "efficiency 1e-300": ["plan", "flt-small", "--efficiency", "1e-300", "--no-data"],
    "peak 1e-300": ["plan", "flt-small", "--efficiency", "0.5", "--peak-tflops", "1e-300", "--no-data"],
    "peak 1e300": ["plan", "flt-small", "--efficiency", "0.5", "--peak-tflops", "1e300", "--no-data"],
    "temperature 0": ["generate", "MODEL", "--prompt", "a", "--temperature", "0"],
    "temperature tiny": ["generate", "MODEL", "--prompt", "a", "--temperature", "1e-45"],
    "temperature inf": ["generate", "MODEL", "--prompt", "a", "--temperature", "inf"],
    "temperature 1e400": ["generate", "MODEL", "--prompt", "a", "--temperature", "1e400"],
    "top-p 2": ["generate", "MODEL", "--prompt", "a", "--top-p", "2"],
    "top-p nan": ["generate", "MODEL", "--prompt", "a", "--top-p", "nan"],
    "top-k of many digits": ["generate", "MODEL", "--prompt", "a", "--top-k", MANY],
    "seed beyond 64 bits": ["generate", "MODEL", "--prompt", "a", "--seed", "18446744073709551616"],
    "seed of many digits": ["generate", "MODEL", "--prompt", "a", "--seed", MANY],
    "seed with underscore": ["generate", "MODEL", "--prompt", "a", "--seed", "1_0"],
    "seed in other digits": ["generate", "MODEL", "--prompt", "a", "--seed", "\u0663"],
    "a million beams": ["generate", "MODEL", "--prompt", "a", "--num-beams", "1000000"],
    "new tokens -1": ["generate", "MODEL", "--prompt", "a", "--max-new-tokens", "-1"],
    "new tokens 1e3": ["generate", "MODEL", "--prompt", "a", "--max-new-tokens", "1e3"],
    "exit inf": ["generate", "MODEL", "--prompt", "a", "--exit", "kl:inf"],
    "exit 1e400": ["generate", "MODEL", "--prompt", "a", "--exit", "entropy:1e400"],
    "exit nan": ["generate", "MODEL", "--prompt", "a", "--exit", "state:nan"],
    "exit of many digits": ["generate", "MODEL", "--prompt", "a", "--exit", f"argmax:{MANY}"],
    "average inf": ["generate", "MODEL", "--prompt", "a", "--exit", "kl", "--average-loops", "inf"],
    "two budgets": ["generate", "MODEL", "--prompt", "a", "--num-loops", "1", "--schedule", "uniform:1"],
    "loops 0": ["generate", "MODEL", "--prompt", "a", "--num-loops", "0"],
    "loops empty": ["generate", "MODEL", "--prompt", "a", "--num-loops", ""],
    "schedule of letters": ["generate", "MODEL", "--prompt", "a", "--schedule", "quick"],
    "no tokenizer": ["generate", "MODEL", "--prompt", "a", "--tokenizer", "nowhere"],
    "info seq-len": ["info", "flt", "--seq-len", MANY[:400]],
    "info no assignment": ["info", "flt", "--set", "hidden_size"],
    "info unknown field": ["info", "flt", "--set", "hidden=3"],
    "info list": ["info", "flt", "--set", "hidden_size=[1]"],
    "info inf": ["info", "flt", "--set", "hidden_size=Infinity"],
    "budget 0": ["evaluate", "schedules", "MODEL", "--budget", "0"],
    "budget beyond the grid": ["evaluate", "schedules", "MODEL", "--budget", "99"],
    "windows beyond int64": ["evaluate", "budget", "MODEL", "--windows", "99999999999999999999"],
    "batch size 0": ["evaluate", "budget", "MODEL", "--batch-size", "0"],
    "split of letters": ["evaluate", "budget", "MODEL", "--split", "\x1b[31mred"],
    "data nowhere": ["evaluate", "budget", "MODEL", "--data", "./nowhere.txt"],
    "model twice": ["evaluate", "budget", "MODEL", "MODEL"],
    "output is a file": ["evaluate", "budget", "MODEL", "--output-dir", "FILE"],
    "context beyond int64": ["evaluate", "perplexity", "MODEL", "--data", "FILE", "--context", "1" + "0" * 20],
    "stride 0": ["evaluate", "perplexity", "MODEL", "--data", "FILE", "--stride", "0"],
    "no such gguf": ["evaluate", "perplexity", "nowhere.gguf", "--data", "FILE"],
    "a gguf that is none": ["evaluate", "perplexity", "BAD.gguf", "--data", "FILE"],
    "a gguf of 2^60 entries": ["evaluate", "perplexity", "BOMB.gguf", "--data", "FILE"],
    "results nowhere": ["evaluate", "table", "nowhere.json"],
    "results that are text": ["evaluate", "table", "FILE"],
    "baseline -1": ["evaluate", "table", "FILE", "--baseline", "-1"],
    "three models": ["analyze", "MODEL", "b", "c"],
    "convert nowhere": ["convert", "nowhere", "OUT"],
    "convert text": ["convert", "FILE", "OUT"],
    "convert onto something": ["convert", "MODEL", "MODEL"],
    "convert case nowhere": ["convert", "MODEL", "OUT", "--case", "nowhere.json"],
    "convert case deep": ["convert", "MODEL", "OUT", "--case", "DEEP.json"],
    "convert case a folder": ["convert", "MODEL", "OUT", "--case", "MODEL"],
    "convert loops": ["convert", "MODEL", "OUT", "--num-loops", MANY],
    "jobs 0": ["quickstart", "--jobs", "0"],
    "quickstart seed": ["quickstart", "--seed", "-1"],
    "study seeds": ["study", "stability", "--seeds", "a,b"],
    "study grid nowhere": ["study", "stability", "--config", "nowhere.yaml", "--list"],
    "plan nothing": ["plan"],
    "plan efficiency": ["plan", "quickstart-flt", "--efficiency", "nan"],
    "plan processes": ["plan", "quickstart-flt", "--processes", MANY, "--no-time"],
    "train nothing": ["train"],
    "train nowhere": ["train", "--config", "nowhere.yaml"],
    "train text": ["train", "--config", "FILE"],
    "data nothing": ["data"],
    "data info seq-len": ["data", "info", "bundled", "--seq-len", "0"],
}
"""What is typed. MODEL is a good checkpoint, FILE some text; OUT is nothing yet."""


def rewrite(name: str, content: str | bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

    return damage


def fields(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(content | changes), encoding="utf-8")

    return damage


def weights(change: Callable[[torch.Tensor], torch.Tensor], ending: str = "q_proj.weight") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in sorted(tensors) if name.endswith(ending))
        save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def index(content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")

    return damage


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "configuration torn": rewrite("config.json", '{"model_type": "loopf'),
    "configuration a list": rewrite("config.json", "[]"),
    "configuration deep": rewrite("config.json", DEEP),
    "configuration not UTF-8": rewrite("config.json", b'{"a": "\xff"}'),
    "configuration of NUL": rewrite("config.json", b"\0" * 99),
    "another model": fields(model_type="gpt2"),
    "model type a list": fields(model_type=["loopformers"]),
    "loops a text": fields(num_loops="many"),
    "loops a huge float": fields(num_loops=1e30),
    "loops infinite": fields(num_loops=float("inf")),
    "negative width": fields(hidden_size=-32),
    "preset of nothing": fields(stream="nothing"),
    "a stream of another type": fields(stream=["state"]),
    "labels of another type": fields(id2label="x"),
    "a dtype that is none": fields(dtype="float7"),
    "quantised by a text": fields(quantization_config="x"),
    "weights empty": rewrite("model.safetensors", b""),
    "weights torn": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:999]),
    "a header of gigabytes": rewrite("model.safetensors", struct.pack("<Q", 2**36) + b"{}"),
    "weights of another shape": weights(lambda w: w[:-1].contiguous()),
    "index torn": index("{"),
    "index empty": index("{}"),
    "index a list": index('{"weight_map": ["a.safetensors"]}'),
    "index elsewhere": index('{"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}}'),
    "banned token beyond the vocabulary": rewrite("generation_config.json", '{"bad_words_ids": [[1000000000]]}'),
    "time limit in words": rewrite("generation_config.json", '{"max_time": "x"}'),
    "suppressed token -5": rewrite("generation_config.json", '{"begin_suppress_tokens": -5}'),
    "decoding that is gone": rewrite("generation_config.json", '{"dola_layers": "high"}'),
    "stop string 5": rewrite("generation_config.json", '{"stop_strings": [5]}'),
    "schedule torn": rewrite("generation_config.json", "{"),
    "schedule deep": rewrite("generation_config.json", DEEP),
    "schedule a number": rewrite("generation_config.json", '{"schedule": 5}'),
    "schedule for others": rewrite("generation_config.json", '{"schedule": "2/3,1/3"}'),
    "tokenizer gone": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "tokenizer torn": rewrite("tokenizer.json", '{"version'),
    "weights not finite": weights(lambda w: w.fill_(float("nan"))),
    "states overflow": weights(lambda w: w.fill_(1e38), "down_proj.weight"),
}
"""What is done to a good checkpoint."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "FILE").write_text("Some text. " * 9, encoding="utf-8")
    (folder / "BAD.gguf").write_text("Some text.", encoding="utf-8")
    (folder / "BOMB.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60))
    (folder / "DEEP.json").write_text(DEEP, encoding="utf-8")
    return folder


def ends_in_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    start = time.perf_counter()
    code = main(argv)
    seconds = time.perf_counter() - start
    said = capsys.readouterr().err
    assert code == 2, said
    assert seconds < MOST_SECONDS
    assert "Traceback" not in said
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    assert said[:-1].isprintable()
    assert len(said) < 3000
    return said


@pytest.fixture(autouse=True)
def elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("LOOPFORMERS_DEBUG", raising=False)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_hostile_arguments_end_in_one_line_that_blames_the_user(
    name: str, checkpoints: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(checkpoints / "lt") if argument == "MODEL" else argument for argument in ARGUMENTS[name]]
    before = sorted(os.listdir(place))
    said = ends_in_one_line(argv, capsys)
    assert "unexpected" not in said
    assert sorted(os.listdir(place)) == before


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_ends_in_one_line(
    name: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(checkpoints / "lt", tmp_path / "model"))
    DAMAGE[name](folder)
    ends_in_one_line(["generate", str(folder), "--prompt", "It was", "--max-new-tokens", "2", "--json"], capsys)


def test_a_generation_setting_that_fails_while_decoding_is_named(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(checkpoints / "lt", tmp_path / "model"))
    DAMAGE["banned token beyond the vocabulary"](folder)
    said = ends_in_one_line(["generate", str(folder), "--prompt", "It was"], capsys)
    assert "sets bad_words_ids" in said
    assert "mend or delete generation_config.json" in said


@pytest.mark.parametrize("content", [b"a\xff", b"\x80", "\ud800".encode("utf-8", "surrogatepass")])
def test_a_prompt_from_stdin_that_is_not_utf_8_is_refused_with_its_place(
    content: bytes, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))
    said = ends_in_one_line(["generate", str(checkpoints / "lt"), "--prompt", "-"], capsys)
    assert f"--prompt -: stdin is not UTF-8 (byte {int(content[0] == ord('a'))}" in said


def test_a_prompt_from_a_closed_stdin_is_refused(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    said = ends_in_one_line(["generate", str(checkpoints / "lt"), "--prompt", "-"], capsys)
    assert "--prompt - reads stdin, which is closed" in said


def test_a_prompt_from_stdin_is_utf_8_in_any_locale(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("café".encode()), encoding="ascii"))
    argv = ["generate", str(checkpoints / "lt"), "--prompt", "-", "--max-new-tokens", "1", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "café"
