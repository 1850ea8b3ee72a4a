"""PEFT's own tests of decoder models, run against our models; see `sources` for where they come from.

Folders of ours stand in for the models that PEFT's tests download, under the same names. By default a few adapters run, one
of each kind; `EVERY_ADAPTER=1` runs all of PEFT's. `PEFT_MODELS=llama` runs a Llama of the same size, which shows what PEFT's
tests give for a model that PEFT knows.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForCausalLM

from loopformers.data.tokenizer import BUNDLED_VOCAB_SIZE, bundled_tokenizer
from loopformers.testing import tiny_model
from tests.others_suites.sources import SourceMissingError, open_tests

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

MODELS = os.environ.get("PEFT_MODELS", "flt loopformer").split()
SIZES = {
    "vocab_size": BUNDLED_VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 160,
}  # fmt: skip
NAMED = (
    "hf-internal-testing/tiny-random-MistralForCausalLM",
    "peft-internal-testing/tiny-dummy-qwen2",
    "peft-internal-testing/tiny-random-OPTForCausalLM",
    "trl-internal-testing/tiny-Qwen3ForCausalLM",
    "trl-internal-testing/tiny-random-LlamaForCausalLM",
)
"""What tests of one model call it."""
ADAPTERS = (
    "LoraConfig",
    "IA3Config",
    "OFTConfig",
    "BOFTConfig",
    "VeraConfig",
    "PromptTuningConfig",
    "PrefixTuningConfig",
)

diffusers = ModuleType("diffusers")  # their tests of images need it
diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
try:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "diffusers", diffusers)
        theirs = importlib.import_module(f"{(package := open_tests('peft'))}.test_decoder_models")
except SourceMissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

theirs.PEFT_DECODER_MODELS_TO_TEST[:] = theirs.SMALL_GRID_MODELS[:] = MODELS
if not os.environ.get("EVERY_ADAPTER"):
    theirs.ALL_CONFIGS[:] = [(kind, options) for kind, options in theirs.ALL_CONFIGS if kind.__name__ in ADAPTERS]
for kind, options in theirs.ALL_CONFIGS:  # which modules to adapt is not something that PEFT knows of our models
    if "target_modules" in kind.__dataclass_fields__ and kind.__name__ != "ShadowConfig":
        options["target_modules"] = ["q_proj", "v_proj"]
    if "feedforward_modules" in options:
        options |= {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
for module in (theirs, sys.modules[f"{package}.testing_common"]):
    module.hub_online_once = lambda name: nullcontext()  # it goes online for a name that it has not seen


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a model for each name that their tests use."""
    folder = tmp_path_factory.mktemp("models")
    for name in (*MODELS, *NAMED):
        if "llama" in MODELS:
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**SIZES))
        else:
            model = tiny_model("loopformer" if name == "loopformer" else "flt", **SIZES)
        model.save_pretrained(folder / name)
        bundled_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def in_their_place(models, monkeypatch):
    quotes = DatasetDict(train=Dataset.from_dict({"quote": [f"{i} is {i + 1} less one." for i in range(20)]}))
    monkeypatch.setattr(theirs, "load_dataset_english_quotes", lambda: quotes)
    monkeypatch.chdir(models)


class TestDecoderModels(theirs.TestDecoderModels):
    EXCLUSIONS: ClassVar = {
        "test_prompt_tuning_trust_remote_code": "reads the embedding at OPT's place, model.decoder.embed_tokens",
        "test_generate_adalora_no_dropout": "names no target modules, and PEFT has a default for its own list of models only",
        "test_prompt_tuning_prepare_inputs_for_generation_4d_attention_mask": "is about Gemma 3's masks",
        "test_lora_embed_scale_is_applied*": "is about Gemma 3's scaled embedding",
        "test_prefix_tuning_gemma4_*": "is about layers of Gemma 4 that differ in their head size",
        "test_merge_layers*BeftConfig*": "merges into a bias, and our layers have none; PEFT skips Llama for the same reason",
        "test_training_decoders_gradient_checkpointing?True-ShadowConfig*": (
            "hands states from layer to layer around their arguments, which reentrant checkpointing of a whole loop loses; "
            "use_reentrant=False, our default, passes"
        ),
        "test_lora_conversion*GraloraConfig*loopformer*": "asks a conversion that rounds for an error that random weights pass",
    }
