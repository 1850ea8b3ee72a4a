"""LoopConfig: the rules it enforces, the sizes it derives, and what survives a round trip."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoConfig

from loopformers import CheckpointError, ConfigError, LoopConfig, Schedule
from loopformers.laws import Fixed, ShortTrajectory
from loopformers.model.presets import PRESETS
from loopformers.testing import tiny_config

ILLEGAL = {
    "field": ({"num_lops": 3}, "field='num_lops' is not known; did you mean 'num_loops'"),
    "injection": ({"injection": "query_al"}, "injection='query_al' is not known; did you mean 'query_all'"),
    "stream": ({"stream": "input"}, "stream='input' is not known; did you mean 'inputs'"),
    "activation": ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new' is not known; did you mean 'gelu'"),
    "conditioning": ({"conditioning": "time_step"}, "conditioning='time_step' is not known; did you mean"),
    "objective": ({"objective": "first_loop"}, "objective='first_loop' is not known; did you mean"),
    "sampler": ({"short_sampler": "unifrom"}, "short_sampler='unifrom' is not known; did you mean 'uniform'"),
    "init": ({"init_scheme": "gpt2"}, "init_scheme='gpt2' is not known; choose one of: flt, loopformer"),
    "no loops": ({"num_loops": 0}, "num_loops=0 must be a whole number of at least 1"),
    "half a loop": ({"num_loops": 2.5}, "num_loops=2.5 must be a whole number"),
    "a true loop": ({"num_loops": True}, "num_loops=True must be a whole number"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number of at least 1"),
    "a text width": ({"hidden_size": "24"}, "hidden_size='24' must be a whole number"),
    "a negative prelude": ({"num_prelude_layers": -1}, "num_prelude_layers=-1 must be a whole number of at least 0"),
    "heads": (
        {"num_attention_heads": 5},
        "hidden_size=24 does not split into num_attention_heads=5 equal heads; the nearest size that does is 25",
    ),
    "key heads": ({"num_key_value_heads": 3}, r"num_key_value_heads=3 must divide .*=4; choose one of \[1, 2, 4\]"),
    "odd heads": ({"num_attention_heads": 8}, "head_dim=3 must be even with rotary positions"),
    "pattern": ({"window_pattern": "SXL"}, "window_pattern='SXL' must be a string of S"),
    "no pattern": ({"window_pattern": ""}, "window_pattern='' must be a string of S"),
    "a number for a pattern": ({"window_pattern": 4}, "window_pattern=4 must be a string of S"),
    "no window": ({"sliding_window": 0}, "sliding_window=0 must be a whole number of at least 1"),
    "no latent": ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be a whole number of at least 1"),
    "soft cap": (
        {"final_logit_softcapping": -1.0},
        "final_logit_softcapping=-1.0 must be a positive number, at most .*, or null",
    ),
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a positive number, at most .*, or null"),
    "time scale": ({"time_scale": 0}, "time_scale=0 must be a positive number"),
    "not a number": ({"rope_theta": float("nan")}, "rope_theta=nan must be a positive number"),
    "a text number": ({"initializer_range": "small"}, "initializer_range='small' must be a positive number"),
    "weight": ({"short_weight": -0.1}, "short_weight=-0.1 must be a number of at least 0"),
    "switch": ({"qk_norm": "yes"}, "qk_norm='yes' must be true or false"),
    "never trains": (
        {"conditioning": "time", "modulation_init": "zero"},
        "modulation_init='zero' with init_scheme='flt' never trains.*use modulation_init='open'",
    ),
    "no shorter run": (
        {"objective": "shortcut_consistency", "num_loops": 1},
        "'shortcut_consistency' with num_loops=1 leaves no shorter trajectory.*use num_loops >= 2",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_each_rule_names_the_value_the_rule_and_the_remedy(case):
    fields, match = ILLEGAL[case]
    with pytest.raises(ConfigError, match=match):
        tiny_config("flt", **fields)


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"preset='loop-former' is not known; did you mean 'loopformer'.*elastic-flt"):
        LoopConfig.from_preset("loop-former")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_legal_at_its_papers_size_and_at_another_width(preset):
    config = LoopConfig.from_preset(preset)
    is_flt = config.init_scheme == "flt"
    assert config.head_dim == (128 if is_flt else 64)
    assert config.intermediate_size == (4 * 384 if is_flt else 5120)
    wider = LoopConfig.from_preset(preset, hidden_size=256)
    assert (wider.num_attention_heads, wider.intermediate_size) == ((2, 1024) if is_flt else (4, 640))
    assert LoopConfig.from_preset(preset, num_attention_heads=1).num_attention_heads == 1


def test_sizes_left_out_are_derived_and_stored():
    config = LoopConfig(hidden_size=40, max_position_embeddings=30, window_pattern="SSL", num_hidden_layers=4)
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (160, 1, 1)
    assert (config.head_dim, config.sliding_window) == (40, 7)
    assert config.padded_vocab_size == 2048
    assert LoopConfig(vocab_size=61, pad_vocab_size_multiple=64).padded_vocab_size == 64
    assert LoopConfig(vocab_size=64, pad_vocab_size_multiple=64).padded_vocab_size == 64


def test_windows_follow_the_pattern_over_all_stages_and_the_last_layer_sees_everything():
    config = tiny_config(
        "flt", window_pattern="SSSL", sliding_window=5, num_prelude_layers=1, num_hidden_layers=4, num_coda_layers=2
    )
    windows = [config.window("prelude", 0), *(config.window("core", i) for i in range(4)), config.window("coda", 0)]
    assert windows == [5, 5, 5, None, 5, 5]
    assert config.window("coda", 1) is None
    assert [tiny_config("flt", window_pattern="S").window("core", i) for i in range(2)] == [10, None]


def test_runs_resolve_to_schedules_and_unequal_steps_need_a_model_that_knows_time():
    looped, elastic = tiny_config("flt", num_loops=6), tiny_config("loopformer", num_loops=6)
    assert looped.resolve_schedule() == Schedule.uniform(6)
    assert looped.resolve_schedule(9) == looped.resolve_schedule(schedule="uniform:9") == Schedule.uniform(9)
    assert elastic.resolve_schedule(schedule="coarse-first:3") == Schedule.coarse_first(3, grid=6)
    assert elastic.resolve_schedule(schedule=[0.5, 0.25, 0.25]) == Schedule((2, 1, 1), 4)
    for config in (looped, tiny_config("tmlt")):
        with pytest.raises(ConfigError, match=r"unequal steps.*does not know.*num_loops=2 instead"):
            config.resolve_schedule(schedule="2/3,1/3")
    with pytest.raises(ConfigError, match="contradict each other"):
        elastic.resolve_schedule(2, "coarse-first:3")


def test_the_law_follows_the_objective_and_the_conditioning():
    assert tiny_config("flt", num_loops=6).law == Fixed(6)
    assert tiny_config("loopformer", num_loops=6).law == ShortTrajectory(6, "sequential")
    assert tiny_config("tmlt-exit", num_loops=6).law == ShortTrajectory(6, "sequential", passes_only=True)
    assert tiny_config("elastic-flt", num_loops=6, short_sampler="uniform").law == ShortTrajectory(6, "uniform")


# -- round trips -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_field_survives_a_round_trip(preset, tmp_path):
    config = tiny_config(preset, rms_norm_eps=1e-5, eos_token_id=[3, 4], loop_seed=9)
    config.save_pretrained(tmp_path)
    for again in (LoopConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert isinstance(again, LoopConfig)
        for name in LoopConfig.own_fields():
            assert getattr(again, name) == getattr(config, name), name


def test_overrides_of_a_stored_configuration_are_checked(tmp_path):
    tiny_config("loopformer").save_pretrained(tmp_path)
    assert LoopConfig.from_pretrained(tmp_path, num_loops=4).num_loops == 4
    with pytest.raises(ConfigError, match="num_loops=0"):
        LoopConfig.from_pretrained(tmp_path, num_loops=0)
    with pytest.raises(ConfigError, match="field='num_lops' is not known; did you mean 'num_loops'"):
        LoopConfig.from_pretrained(tmp_path, num_lops=4)
    with pytest.raises(ConfigError, match="num_key_value_heads=3 must divide"):
        AutoConfig.from_pretrained(tmp_path, num_key_value_heads=3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"num_lops": 3}, ConfigError, "field='num_lops' is not known; did you mean 'num_loops'"),
        ({"num_loops": -3}, ConfigError, "num_loops=-3"),
        ({"injection": "all"}, ConfigError, "injection='all' is not known"),
        ({"model_type": "llama"}, CheckpointError, "model_type='llama' is another architecture.*loopformers convert"),
    ],
)
def test_an_edited_configuration_is_refused(change, error, match, tmp_path):
    tiny_config("flt").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=match):
        LoopConfig.from_pretrained(tmp_path)


def test_a_configuration_changed_in_place_is_checked_when_a_model_is_built():
    from loopformers import LoopedForCausalLM

    config = tiny_config("flt")
    config.num_key_value_heads = 3
    with pytest.raises(ConfigError, match="num_key_value_heads=3 must divide"):
        LoopedForCausalLM(config)


# -- what other tools add --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("unsloth_version", "2026.1"), ("batch_norm_eps", 1e-3), ("adapter_plan", {"a": [1, None]}), ("_tool_note", True)],
)
def test_what_other_tools_set_on_a_configuration_survives_a_round_trip(name, value, tmp_path):
    config = tiny_config("flt")
    setattr(config, name, value)
    config.save_pretrained(tmp_path)
    for again in (LoopConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path), copy.deepcopy(config)):
        assert getattr(again, name) == value
        assert again.to_dict() | {"_name_or_path": ""} == config.to_dict()
    again.save_pretrained(tmp_path)
    assert getattr(LoopConfig.from_pretrained(tmp_path, num_loops=5), name) == value
    assert getattr(LoopConfig(**config.to_dict()), name) == value
    with pytest.raises(ConfigError, match=f"field='{name}' is not known"):
        LoopConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_name_or_path", "somewhere"), ("torch_dtype", "bfloat16"), ("dtype", "float16"), ("pad_token_id", 7),
        ("use_cache", False), ("architectures", ["LoopedForCausalLM"]), ("auto_map", {"AutoConfig": "a.B"}),
        ("id2label", {0: "no", 1: "yes"}), ("problem_type", "regression"), ("output_hidden_states", True),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ],
)  # fmt: skip
def test_what_transformers_sets_on_a_configuration_survives_a_round_trip(name, value, tmp_path):
    config = tiny_config("loopformer")
    setattr(config, name, value)
    config.save_pretrained(tmp_path)
    again = LoopConfig.from_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert "extra_fields" not in stored
    if name not in ("_name_or_path", "dtype", "torch_dtype"):
        assert getattr(again, name) == value
    if "dtype" in name:
        assert again.dtype == getattr(torch, value)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("tool", object(), "config.tool=<object .* cannot be stored in config.json"),
        ("tool", {1, 2}, r"config.tool=\{1, 2\} cannot be stored"),
        ("law", 3, "config.law has been set, and it hides a part of the configuration"),
        ("num_loops", -3, "num_loops=-3"),
        ("eos_token_id", 61, "eos_token_id=61 must be a token from 0 to 60"),
        ("id2label", "x", "id2label='x' must be an object"),
    ],
)
def test_a_configuration_that_could_not_be_read_again_is_refused_before_anything_is_written(
    name, value, match, tmp_path
):
    from loopformers.testing import tiny_model

    model = tiny_model("flt")
    model.config.__dict__[name] = value
    for save in (model.config.save_pretrained, model.save_pretrained):
        with pytest.raises(ConfigError, match=match):
            save(tmp_path / "out")
        assert not (tmp_path / "out").exists()


HOSTILE = {
    "stream in a list": {"stream": ["state"]},
    "dtype": {"dtype": "float7"},
    "old dtype": {"torch_dtype": "int8"},
    "text token": {"eos_token_id": "x"},
    "negative token": {"pad_token_id": -5},
    "far token": {"bos_token_id": 10**9},
    "a text among tokens": {"eos_token_id": [1, "x"]},
    "labels": {"id2label": "x"},
    "label numbers": {"id2label": {"x": "y"}},
    "attention": {"attn_implementation": "nonsense"},
    "attention from the hub": {"attn_implementation": "someone/kernel"},
    "attention in a list": {"attn_implementation": ["sdpa"]},
    "quantisation text": {"quantization_config": "x"},
    "quantisation list": {"quantization_config": [1]},
    "quantisation method": {"quantization_config": {"quant_method": "nonsense"}},
    "no quantisation method": {"quantization_config": {}},
    "seed": {"loop_seed": "x"},
    "epsilon": {"rms_norm_eps": 1e308},
    "base": {"rope_theta": 1e308},
    "many loops": {"num_loops": 1e30},
    "pattern in a list": {"window_pattern": ["S"]},
    "long pattern": {"window_pattern": "L" * 10**6},
    "extras": {"extra_fields": "num_loops"},
    "extras that hide a method": {"extra_fields": ["check"], "check": 3},
    "extras that hide the class": {"extra_fields": ["__class__"], "__class__": 3},
    "a switch": {"return_dict": "yes"},
    "an encoder": {"is_encoder_decoder": True},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_field_of_the_wrong_kind_is_refused_in_a_short_text(case, tmp_path):
    from loopformers import LoopedForCausalLM

    tiny_config("flt").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | HOSTILE[case]
    file.write_text(json.dumps(fields))

    def build():
        LoopedForCausalLM(LoopConfig.from_pretrained(tmp_path))
        LoopedForCausalLM(LoopConfig(**fields))  # older transformers ignore the attention function of a file

    with pytest.raises((ConfigError, CheckpointError)) as caught:
        build()
    assert next(iter(HOSTILE[case])) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["[]", "{", "", "[" * 5000 + "]" * 5000])
def test_a_config_json_that_is_no_object_is_refused_by_its_path(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LoopConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "argument", [{"device_map": "auto"}, {"gguf_file": None}, {"use_auth_token": None}, {"variant": "x"}]
)
def test_arguments_of_the_loader_say_nothing_to_a_configuration(argument, tmp_path):
    tiny_config("flt").save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, **argument).to_dict() == tiny_config("flt").to_dict() | {
        "_name_or_path": str(tmp_path), "architectures": None,
    }  # fmt: skip
