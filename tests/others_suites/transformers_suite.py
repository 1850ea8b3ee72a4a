"""transformers' own tests of what a model must do, run against our models; see `sources` for where they come from."""

from __future__ import annotations

import importlib
import unittest
from typing import ClassVar

import pytest
import torch
from transformers.testing_utils import torch_device

from loopformers import LoopConfig, LoopedForCausalLM, LoopedModel
from tests.others_suites.sources import SourceMissingError, open_tests

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

STAND_INS = {  # modules that the source distribution leaves out
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "return_dict": False,
            "output_hidden_states": True,
            "output_attentions": True,
            "dtype": "float16",
            "chunk_size_feed_forward": 5,
            "architectures": ["LoopedForCausalLM"],
            "id2label": {0: "label"},
            "label2id": {"label": "0"},
            "problem_type": "regression",
        }
    },
}
try:
    theirs = open_tests("transformers", stand_ins=STAND_INS)
except SourceMissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

common = importlib.import_module(f"{theirs}.test_modeling_common")
configuration = importlib.import_module(f"{theirs}.test_configuration_common")

# The tables by which their tests tell a trunk from a model with a loss.
common.MODEL_MAPPING_NAMES["loopformers"] = "LoopedModel"
common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["loopformers"] = "LoopedForCausalLM"

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_loops": 3, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip

SYSTEMS = {
    "lt": {"name": "lt"},
    "flt": {"name": "flt"},
    "loopformer": {"name": "loopformer"},
    "elastic-flt, prelude, coda, tied": {
        "name": "elastic-flt",
        "num_prelude_layers": 1,
        "num_coda_layers": 1,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    },
}


class ModelTester:
    """What transformers' tests ask of the model under test: its configuration, inputs and counts."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, parent, fields):
        config = self.config = LoopConfig.from_preset(**(SIZES | fields))
        self.parent = parent
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        # They count one attention matrix a layer and one hidden state a layer; ours come with each application, and each loop.
        self.num_hidden_layers = config.slot_layout.num_slots(config.num_loops)
        self.expected_num_hidden_layers = config.num_loops + 1

    def get_config(self):
        return LoopConfig.from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(1, self.vocab_size, (self.batch_size, self.seq_length), device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class LoopedModelTests(common.ModelTesterMixin):
    all_model_classes = (LoopedModel, LoopedForCausalLM)
    fields: ClassVar[dict]

    EXCLUSIONS: ClassVar[dict] = {
        "test_generation_tester_mixin_inheritance": "the source distribution leaves the generation tests out",
    }

    def setUp(self):
        self.model_tester = ModelTester(self, self.fields)
        self.config_tester = configuration.ConfigTester(self, config_class=LoopConfig, **SIZES)

    def test_num_layers_is_small(self):
        self.model_tester.num_hidden_layers = self.model_tester.config.num_hidden_layers  # not applications
        super().test_num_layers_is_small()

    def test_config(self):
        self.config_tester.run_common_tests()


for name, fields in SYSTEMS.items():
    title = "Test" + "".join(part.capitalize() for part in name.replace(",", "").replace("-", " ").split())
    globals()[title] = type(title, (LoopedModelTests, unittest.TestCase), {"fields": fields, "__module__": __name__})
