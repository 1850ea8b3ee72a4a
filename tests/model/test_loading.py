"""from_pretrained: its arguments, and the checkpoints that it refuses."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from loopformers import CheckpointError, ConfigError, LoopedForCausalLM, LoopedModel
from loopformers.errors import WriteError
from loopformers.testing import tiny_model

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    tiny_model("flt").save_pretrained(tmp_path)
    return tmp_path


def change(folder, **tensors):
    stored = load_file(folder / "model.safetensors")
    save_file(stored | tensors, folder / "model.safetensors", metadata={"format": "pt"})


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"gguf_file": None}, {"use_auth_token": None},
        {"trust_remote_code": True}, {"low_cpu_mem_usage": True}, {"revision": "main"}, {"weights_only": True},
        {"use_safetensors": True}, {"use_safetensors": None}, {"max_memory": {"cpu": "1GiB"}}, {"subfolder": ""},
        {"attn_implementation": "eager"}, {"dtype": "auto"}, {"torch_dtype": torch.float32}, {"tp_plan": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("loader", [AutoModelForCausalLM, LoopedForCausalLM])
def test_arguments_of_transformers_loader_work(loader, arguments, folder):
    model = loader.from_pretrained(folder, **arguments)
    assert torch.equal(model.lm_head.weight, tiny_model("flt").lm_head.weight)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_lops": 3}, "argument='num_lops' is not known; did you mean 'num_loops'"),
        ({"device_mp": "cpu"}, "argument='device_mp' is not known; did you mean 'device_map'"),
        ({"use_safetensors": False}, "use_safetensors=False: a looped model is read only from safetensors"),
        ({"weights_only": False}, "weights_only=False: a looped model is read only from safetensors"),
        ({"gguf_file": "x.gguf"}, "gguf_file='x.gguf': a looped model is read only from safetensors"),
        ({"use_auth_token": "secret"}, "use_auth_token='secret': transformers no longer takes it; give token"),
        ({"dtype": "float7"}, "dtype='float7' must be a floating point type"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating point type"),
        ({"attn_implementation": "eagre"}, "eagre"),
        ({"quantization_config": "x"}, "quantization_config='x' must be an object"),
        ({"quantization_config": {"quant_method": "x"}}, "quant_method='x' is not known"),
        ({"generation_config": {"a": 1}}, "generation_config={'a': 1} must be a GenerationConfig"),
        ({"device_map": "nonsense"}, "cannot be loaded with device_map='nonsense'"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(arguments, match, folder):
    with pytest.raises(ConfigError, match=match):
        LoopedForCausalLM.from_pretrained(folder, **arguments)


def test_a_variant_is_found_and_is_only_a_part_of_a_name(folder):
    model = tiny_model("flt", seed=3)
    model.save_pretrained(folder, variant="other")
    again = LoopedForCausalLM.from_pretrained(folder, variant="other")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    with pytest.raises(CheckpointError, match=r"model\.fp16\.safetensors"):
        LoopedForCausalLM.from_pretrained(folder, variant="fp16")
    with pytest.raises(CheckpointError, match=r"variant='\.\./x' must be a part of a file name"):
        LoopedForCausalLM.from_pretrained(folder, variant="../x")


def test_code_in_a_checkpoint_is_never_run(folder):
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    for loader in (LoopedForCausalLM, AutoModelForCausalLM):
        model = loader.from_pretrained(folder)
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    assert not (folder / "ran").exists()


# -- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool])
def test_weights_that_are_not_floating_point_are_refused_by_name(dtype, folder):
    change(folder, **{WEIGHT: load_file(folder / "model.safetensors")[WEIGHT].to(dtype)})
    with pytest.raises(CheckpointError, match=rf"holds {WEIGHT} as \w+, and weights are floating point numbers"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(dtype, bad, folder):
    tensor = load_file(folder / "model.safetensors")[WEIGHT].to(dtype)
    tensor[3, 2] = bad
    change(folder, **{WEIGHT: tensor})
    for loader, name in ((LoopedForCausalLM, WEIGHT), (LoopedModel, WEIGHT.removeprefix("model."))):
        with pytest.raises(
            CheckpointError, match=f"holds 1 of 1,248 numbers of {name} that are infinite or not a number"
        ):
            loader.from_pretrained(folder)


def test_large_finite_weights_load(folder):
    """Their sum overflows."""
    change(folder, **{WEIGHT: torch.full((52, 24), 3e38)})
    assert LoopedForCausalLM.from_pretrained(folder).get_parameter(WEIGHT).max() > 2e38


@pytest.mark.parametrize("name", ["evil.weight", "model.layers.2.mlp.up_proj.weight", "embed_tokens.weight"])
def test_tensors_without_a_place_are_refused_unless_the_caller_asks_to_be_told(name, folder):
    change(folder, **{name: torch.zeros(61, 24)})
    with pytest.raises(CheckpointError, match=f"no place for, the first {name}"):
        LoopedForCausalLM.from_pretrained(folder)
    model, info = LoopedForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert name in info["unexpected_keys"] or name == "embed_tokens.weight"
    assert isinstance(model, LoopedForCausalLM)


def test_padding_of_a_matrix_that_stays_on_disk_is_refused(folder):
    padded = torch.cat([load_file(folder / "model.safetensors")["lm_head.weight"], torch.zeros(3, 24)])
    change(folder, **{"lm_head.weight": padded})
    arguments = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": str(folder / "offloaded")}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored with 3 rows of padding"):
        LoopedForCausalLM.from_pretrained(folder, **arguments)
    LoopedForCausalLM.from_pretrained(folder).save_pretrained(folder)
    model = LoopedForCausalLM.from_pretrained(folder, **arguments)
    torch.testing.assert_close(model(torch.tensor([[1, 2]])).logits, tiny_model("flt")(torch.tensor([[1, 2]])).logits)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_an_index_that_does_not_map_tensors_to_files_beside_it_is_refused(index, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_weights_are_as_readable_as_the_configuration_beside_them(umask, tmp_path):
    before = os.umask(umask)
    try:
        tiny_model("flt").save_pretrained(tmp_path / "one")
        tiny_model("flt").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    finally:
        os.umask(before)
    files = [*(tmp_path / "one").iterdir(), *(tmp_path / "shards").iterdir()]
    assert len(files) > 6
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}


# -- the generation configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": -3}, {"repetition_penalty": "x"}, {"temperature": "x"}, {"num_beams": -1}, {"top_k": "x"},
        {"top_p": 2}, {"do_sample": "x"}, {"eos_token_id": "x"}, {"pad_token_id": -5}, {"eos_token_id": 10**9},
    ],
)  # fmt: skip
def test_settings_that_generate_cannot_use_are_refused_at_loading(change, folder):
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"generation configuration.*{next(iter(change))}"):
        LoopedForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 5000 + "]" * 5000])
def test_a_generation_configuration_that_is_no_object_is_refused(text, folder):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        LoopedForCausalLM.from_pretrained(folder)


def test_settings_that_generate_can_use_are_kept(folder):
    GenerationConfig(repetition_penalty=1.2, do_sample=True, top_k=7, temperature=0.5).save_pretrained(folder)
    settings = LoopedForCausalLM.from_pretrained(folder).generation_config
    assert (settings.repetition_penalty, settings.top_k, settings.temperature) == (1.2, 7, 0.5)


def test_a_model_is_not_saved_over_a_file(tmp_path):
    """transformers logs a line, saves nothing and returns."""
    (tmp_path / "model").write_text("notes")
    with pytest.raises(WriteError, match="is a file, and a model is saved to a folder"):
        tiny_model("flt").save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "notes"
