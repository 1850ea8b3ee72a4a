"""What bad input gets: our own type, and a text that names the value, the rule and the remedy."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from loopformers import (
    CacheError,
    CheckpointError,
    ConfigError,
    DataError,
    LoopConfig,
    LoopedForCausalLM,
    LoopformersError,
    MissingExtraError,
    NonFiniteError,
    Schedule,
    from_official,
)
from loopformers.analysis import record_loops
from loopformers.errors import unknown_name
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.evaluation.perplexity import context_length
from loopformers.generation import parse_exit_rule
from loopformers.testing import tiny_model


def tokens(batch=2, length=5):
    return torch.randint(61, (batch, length))


def test_every_error_is_ours_and_is_the_built_in_one_that_callers_expect():
    expected = {
        ConfigError: ValueError,
        CheckpointError: ValueError,
        CacheError: RuntimeError,
        DataError: ValueError,
        NonFiniteError: ArithmeticError,
        MissingExtraError: ImportError,
    }
    for ours, built_in in expected.items():
        assert issubclass(ours, LoopformersError)
        assert issubclass(ours, built_in)


def test_an_unknown_name_suggests_a_near_one_or_lists_all():
    assert unknown_name("preset", "ftl", ["flt", "lt"]) == (
        "preset='ftl' is not known; did you mean 'flt'? Choose one of: flt, lt"
    )
    assert unknown_name("preset", "zzz", ["flt"]) == "preset='zzz' is not known; choose one of: flt"


def forward(preset, **arguments):
    return lambda: tiny_model(preset)(tokens(), **arguments)


def on_a_live_cache(first, then):
    def run():
        model = tiny_model("loopformer")
        cache = model.new_cache()
        model(tokens(), past_key_values=cache, **first)
        model(tokens(length=1), past_key_values=cache, **then)

    return run


BAD = {
    "preset": (lambda: LoopConfig.from_preset("fltt"), ConfigError, "preset='fltt'.*did you mean 'flt'"),
    "field": (lambda: LoopConfig(hidden_dim=3), ConfigError, "field='hidden_dim'.*did you mean 'hidden_size'"),
    "schedule": (forward("loopformer", schedule="corse-first:2"), ConfigError, "schedule='corse-first:2'.*'coarse-first'"),
    "count of a schedule": (forward("loopformer", schedule="uniform:x"), ConfigError, "'x' is not a number.*uniform:4"),
    "sum": (forward("loopformer", schedule="1/2,1/4"), ConfigError, "sum to 0.75, and must sum to 1"),
    "sum of floats": (forward("loopformer", schedule=[0.5, 0.6]), ConfigError, r"\[0.5, 0.6\] sum to 1.1, and must"),
    "sum of integers": (lambda: Schedule((2, 1), 4), ConfigError, "sum to 3/4 and must sum to 1.*add up to 4"),
    "negative step": (forward("loopformer", schedule=[1.5, -0.5]), ConfigError, "must all be positive"),
    "word": (forward("loopformer", schedule="1/2,half"), ConfigError, "the step size 'half', which is not a number"),
    "too many steps": (
        forward("loopformer", schedule="coarse-first:9"), ConfigError, "num_loops=9 does not fit a grid of 1/3.*at most 3"
    ),
    "no loops": (forward("flt", num_loops=0), ConfigError, "num_loops=0 must be .* at least 1; give the number"),
    "contradiction": (forward("loopformer", num_loops=2, schedule="uniform:3"), ConfigError, "contradict.*give one"),
    "unequal steps": (forward("flt", schedule="3/4,1/4"), ConfigError, "unequal steps.*give num_loops=2 instead"),
    "prompt": (
        lambda: tiny_model("loopformer")(tokens(1, 41)),
        ConfigError,
        "position 40 is beyond the 40 learned positions.*shorten the input to 40 tokens.*rotary",
    ),
    "position": (
        lambda: tiny_model("base")(tokens(1, 2), position_ids=torch.tensor([[3, 99]])), ConfigError, "position 99 is beyond"
    ),
    "empty prompt": (lambda: tiny_model("flt")(tokens(1, 0)), ConfigError, "0 tokens.*at least one token"),
    "no input": (lambda: tiny_model("flt")(), ConfigError, "exactly one of input_ids and inputs_embeds"),
    "mask": (
        forward("flt", attention_mask=torch.ones(2, 4)), ConfigError, r"shape \(2, 4\) must be \(2, 5\).*1 for text and 0"
    ),
    "two labels": (forward("flt", labels=tokens(), targets=tokens()), ConfigError, "labels .* or targets .*not both"),
    "short run": (forward("flt", short_schedule="uniform:2"), ConfigError, "short_schedule has no meaning.*give schedule"),
    "short objective": (
        lambda: tiny_model("flt").train()(tokens(), labels=tokens(), short_schedule="uniform:2"),
        ConfigError,
        "objective='last_loop' trains no short trajectory; leave short_schedule out",
    ),
    "cache of another schedule": (
        on_a_live_cache({"schedule": "coarse-first:2"}, {"num_loops": 2}),
        CacheError,
        r"schedule='1/2,1/2' on a cache that holds 5 tokens of schedule '2/3,1/3'.*model\.new_cache\(\)",
    ),
    "cache of another budget": (on_a_live_cache({}, {"num_loops": 2}), CacheError, "'1/2,1/2'.*'1/3,1/3,1/3'"),
    "a preset that is no name": (lambda: LoopConfig.from_preset(["flt"]), ConfigError, r"preset=\['flt'\] is not known"),
    "a configuration of another family": (
        lambda: LoopedForCausalLM(GPT2Config()), ConfigError, "^config=GPT2Config.*must be a LoopConfig[^\n]*$"
    ),
    "no step sizes": (lambda: Schedule.explicit(None), ConfigError, "step sizes None must be numbers"),
    "a grid of text": (
        lambda: Schedule.parse("coarse-first:2", num_loops=None, grid="3"), ConfigError, "grid='3' must be a whole number"
    ),
    "no rule": (lambda: parse_exit_rule(None), ConfigError, "exit rule=None is not known"),
    "no checkpoint": (lambda: from_official(None, None), ConfigError, "a NoneType and a NoneType are no checkpoint"),
    "no model to record": (lambda: record_loops(None).__enter__(), ConfigError, "a NoneType has no loops to record"),
    "a bound of text": (
        lambda: record_loops(tiny_model("flt"), max_bytes="x").__enter__(), ConfigError, "max_bytes='x' must be a whole"
    ),
    "ids without values": (lambda: tiny_model("flt")(tokens().to("meta")), ConfigError, "on the meta device and hold no tokens"),
    "a long short run": (
        lambda: tiny_model("loopformer").train()(tokens(), labels=tokens(), short_schedule="uniform:4"),
        ConfigError,
        "short_schedule has 4 loops and the long trajectory 3",
    ),
    "no windows": (lambda: evaluate_budgets(tiny_model("flt"), None, [1]), DataError, "None holds no windows"),
    "no window": (lambda: evaluate_budgets(tiny_model("flt"), [{"a": 1}], [1]), DataError, "is no window; give a mapping"),
    "a context of -1": (lambda: context_length(tiny_model("flt"), -1), ConfigError, "context=-1 must be a whole number"),
    "cache of another class": (forward("flt", past_key_values=[]), CacheError, "a list has one row for each layer.*new_cache"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_value_the_rule_and_the_remedy(case):
    run, error, match = BAD[case]
    with pytest.raises(error, match=match):
        run()


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    tiny_model("flt").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kept", [0, 5, 500, -8])
def test_truncated_weights(kept, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"no readable checkpoint, perhaps missing or truncated.*save_pretrained"):
        LoopedForCausalLM.from_pretrained(folder)


def test_truncated_weights_through_auto_classes(folder):
    from transformers import AutoModelForCausalLM

    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_missing_weights_a_missing_folder_and_a_broken_configuration(folder):
    with pytest.raises(CheckpointError, match="nowhere is no readable checkpoint"):
        LoopedForCausalLM.from_pretrained(folder / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no file named model\.safetensors"):
        LoopedForCausalLM.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not readable JSON"):
        LoopedForCausalLM.from_pretrained(folder)


def test_weights_of_another_architecture(folder):
    save_file({"encoder.weight": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"none of the model's layers, but encoder\.weight.*loopformers convert"):
        LoopedForCausalLM.from_pretrained(folder)


def test_a_configuration_of_another_architecture(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 24}))
    with pytest.raises(CheckpointError, match="model_type='gpt2' is another architecture's"):
        LoopedForCausalLM.from_pretrained(folder)


def test_weights_of_another_shape(folder):
    with pytest.raises(
        CheckpointError, match=r"down_proj\.weight of shape \(24, 52\), and its configuration asks for \(24, 60\)"
    ):
        LoopedForCausalLM.from_pretrained(folder, intermediate_size=60)
    grown = LoopedForCausalLM.from_pretrained(folder, intermediate_size=60, ignore_mismatched_sizes=True)
    assert not grown.model.layers[0].mlp.down_proj.weight.any()
    stored = load_file(folder / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(grown.model.layers[1].self_attn.q_proj.weight, stored)


def test_a_pickled_checkpoint_is_never_opened(folder):
    """Fault 27."""
    torch.save(tiny_model("flt").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LoopedForCausalLM.from_pretrained(folder)
