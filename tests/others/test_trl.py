"""TRL's trainers on our models: two updates each, and the loss that the model itself gives for the same batch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from loopformers.data.tokenizer import BUNDLED_VOCAB_SIZE, bundled_tokenizer
from loopformers.errors import ObjectiveWarning
from loopformers.testing import tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

TEXTS = Dataset.from_dict({"text": [f"The number {i} comes before {i + 1}." * (1 + i % 3) for i in range(16)]})
PROMPTS = [f"Count {i}:" for i in range(8)]
PAIRS = Dataset.from_dict({"prompt": PROMPTS, "chosen": [f" {i + 1}" for i in range(8)], "rejected": [" no way"] * 8})
LORA = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
WAYS = {
    "plain": {"max_length": 48},
    "packed": {"max_length": 48, "packing": True},
    "padding free": {"max_length": None, "padding_free": True},
    "LoRA": {"max_length": 48, "lora": True},
}


def build(preset, **overrides):
    return tiny_model(preset, vocab_size=BUNDLED_VOCAB_SIZE, max_position_embeddings=256, **overrides)


def options(folder):
    return {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_steps": 1, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("preset", ["flt", "loopformer", "elastic-flt"])
def test_supervised_fine_tuning_has_the_loss_of_the_last_loop(preset, way, tmp_path):
    model = build(preset, objective="last_loop")
    plain = copy.deepcopy(model)
    how = dict(WAYS[way])
    adapter = LoraConfig(**LORA) if how.pop("lora", False) else None
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**options(tmp_path), **how),
        train_dataset=TEXTS,
        processing_class=bundled_tokenizer(),
        peft_config=adapter,
    )
    batches = []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda m, inputs, **others: (batches.append(dict(inputs)), compute(m, inputs, **others))[1]
    weights = [p.clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()

    batch = {name: batches[0][name] for name in ("input_ids", "labels", "position_ids") if name in batches[0]}
    if "attention_mask" in batches[0] and "position_ids" not in batch:
        batch["attention_mask"] = batches[0]["attention_mask"]
    with torch.no_grad():
        assert losses(trainer)[0] == pytest.approx(plain(**batch).loss.item(), rel=1e-4)
    assert len(losses(trainer)) == 2
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(weights, trained, strict=True))


def test_padded_and_padding_free_batches_have_one_loss(tmp_path):
    first = {}
    for way in ("plain", "padding free"):
        trainer = trl.SFTTrainer(
            build("flt"),
            args=trl.SFTConfig(**options(tmp_path / way), **WAYS[way]),
            train_dataset=TEXTS,
            processing_class=bundled_tokenizer(),
        )
        trainer.train()
        first[way] = losses(trainer)
    assert first["plain"] == pytest.approx(first["padding free"], rel=1e-4)


def preference(model, folder):
    arguments = trl.DPOConfig(**options(folder))
    return trl.DPOTrainer(
        model, copy.deepcopy(model), arguments, train_dataset=PAIRS, processing_class=bundled_tokenizer()
    )


def group_relative(model, folder):
    model.save_pretrained(folder / "start")  # TRL opens the reference from where the policy came from
    model = type(model).from_pretrained(folder / "start")
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(completion.count("e")) for completion in completions],
        args=trl.GRPOConfig(**options(folder), num_generations=2, max_completion_length=6, beta=0.1),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=bundled_tokenizer(),
    )


@pytest.mark.parametrize(("trainer", "first"), [(preference, 0.6931472), (group_relative, 0.0)])
@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
def test_preference_and_reward_training_start_where_the_policy_is_its_reference(preset, trainer, first, tmp_path):
    model = build(preset, objective="last_loop")
    trained = trainer(model, tmp_path)
    trained.train()
    assert losses(trained)[0] == pytest.approx(first, abs=1e-4)
    assert len(losses(trained)) == 2


def test_training_that_leaves_the_objective_out_says_so(tmp_path):
    trainer = preference(build("loopformer"), tmp_path)
    with pytest.warns(ObjectiveWarning, match="objective='shortcut_consistency' is not trained"):
        trainer.train()
