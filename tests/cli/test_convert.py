from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loopformers import LoopedForCausalLM
from loopformers.cli.main import main
from loopformers.data.tokenizer import BUNDLED_TOKENIZER_DIR
from loopformers.nn import conditioning
from tests.parity.embeddings import goldens_embedding

PARITY = Path(__file__).parents[1] / "parity"


def official_weights(case_name: str) -> dict[str, torch.Tensor]:
    golden = load_file(PARITY / f"{case_name}.safetensors")
    return {name.removeprefix("weights."): tensor for name, tensor in golden.items() if name.startswith("weights.")}


@pytest.fixture
def loopformer_file(tmp_path: Path) -> Path:
    """A `ckpt.pt` as the released code writes it, without the number of loops."""
    case = json.loads((PARITY / "lf_loopformer.json").read_text())
    arguments = {name: case[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": official_weights("lf_loopformer"), "model_args": arguments, "iter_num": 7}, path)
    return path


@pytest.fixture
def case_file(tmp_path: Path) -> Path:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"kind": "loopformer"}))
    return path


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def test_a_checkpoint_becomes_a_folder_that_computes_what_the_official_code_did(
    loopformer_file: Path,
    case_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    arguments = [loopformer_file, out, "--case", case_file, "--num-loops", 8, "--tokenizer", BUNDLED_TOKENIZER_DIR]
    assert convert(*arguments, "--json") == 0
    output = capsys.readouterr()
    record: dict[str, Any] = json.loads(output.out)
    assert output.err == ""
    assert record["num_loops"] == 8
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(record["files"])
    model = LoopedForCausalLM.from_pretrained(out).double().eval()
    assert record["num_parameters"] == sum(p.numel() for p in model.parameters())
    golden = load_file(PARITY / "lf_loopformer.safetensors")
    monkeypatch.setattr(conditioning, "frequency_embedding", goldens_embedding)
    torch.testing.assert_close(model(golden["input_ids"]).logits, golden["logits.uniform_full"], rtol=1e-9, atol=1e-9)


def test_flt_folders_are_told_by_their_meta_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "d2"
    source.mkdir()
    torch.save(official_weights("flt_FLT"), source / "model_000100.pt")
    case = json.loads((PARITY / "flt_FLT.json").read_text())
    (source / "meta_000100.json").write_text(json.dumps({"model_config": {**case, "K": 3}}))
    assert convert(source, tmp_path / "out") == 0
    output = capsys.readouterr()
    assert output.out == f"Converted {source} to {tmp_path / 'out'}\n"
    assert "2 layers looped 3 times" in output.err
    assert LoopedForCausalLM.from_pretrained(tmp_path / "out").config.num_loops == 3


def test_an_existing_folder_is_replaced_only_on_demand(
    loopformer_file: Path, case_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    arguments = [loopformer_file, out, "--case", case_file, "--num-loops", 8]
    assert convert(*arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ["precious"]
    assert convert(*arguments, "--overwrite") == 2
    assert "is no model's folder (it has no config.json), and is not replaced" in capsys.readouterr().err
    (out / "precious").unlink()
    out.rmdir()
    assert convert(*arguments) == convert(*arguments, "--overwrite") == 0
    (out / "notes").mkdir()
    assert convert(*arguments, "--overwrite") == 2
    assert "holds 'notes', which no conversion writes" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [case_file, loopformer_file, out]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "case.json does not exist; give --case a file with one JSON object"),
        ("{", "case.json is not readable JSON"),
        ("[1]", "case.json contains a value of type list but must contain an object; give --case a file"),
        ('{"kind": "loopformer"}', "does not say how many loops it was trained with"),
        ('{"kind": "loopfrmer"}', "did you mean 'loopformer'?"),
    ],
)
def test_a_bad_case_is_refused_and_nothing_is_written(
    loopformer_file: Path, tmp_path: Path, content: str | None, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tmp_path / "case.json"
    if content is not None:
        case.write_text(content)
    before = sorted(tmp_path.iterdir())
    assert convert(loopformer_file, tmp_path / "out", "--case", case, "--json") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in output.err
    assert sorted(tmp_path.iterdir()) == before


def test_no_loops_are_refused(loopformer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(loopformer_file, tmp_path / "out", "--num-loops", 0) == 2
    assert "--num-loops: 0 must be a whole number from 1" in capsys.readouterr().err


def test_a_truncated_checkpoint_is_refused(
    tmp_path: Path, loopformer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loopformer_file.write_bytes(loopformer_file.read_bytes()[:3000])
    assert convert(loopformer_file, tmp_path / "out", "--num-loops", 8) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()
