"""transformers' Trainer, unmodified, and PEFT's adapters train our models."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from loopformers import LoopedForCausalLM
from loopformers.testing import tiny_model

# PEFT still asks a newer transformers by its older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
"""The argument's name in this transformers."""


def arguments(folder, **settings):
    given = {"report_to": [], "save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False, "seed": 5}
    return TrainingArguments(folder, **{**given, "disable_tqdm": True, "logging_steps": 1, **settings})


def counting(num_rows=24, length=9):
    """Rows that count upwards: a next token that can be learned."""
    starts = torch.arange(num_rows)[:, None] * 7
    rows = (starts + torch.arange(length)) % 61
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


@pytest.mark.parametrize("preset", ["lt", "flt", "loopformer", "elastic-flt"])
def test_the_trainer_trains_and_evaluates_unmodified(preset, tmp_path):
    torch.manual_seed(0)
    model = tiny_model(preset, randomize=False)
    rows = counting()
    settings = {"max_steps": 25, "learning_rate": 0.02, "per_device_train_batch_size": 6, "eval_strategy": "steps"}
    settings |= {"eval_steps": 25, "per_device_eval_batch_size": 5, "lr_scheduler_type": "constant"}
    trainer = Trainer(model, arguments(tmp_path, **settings), train_dataset=rows, eval_dataset=rows[:7])
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 25
    ids = torch.stack([row["input_ids"] for row in rows[:7]])
    # older Trainers divide by the first tokens of rows too, which nothing predicts
    share = 7 * 8 / float(trainer._get_num_items_in_batch([{"labels": ids}], "cpu"))
    terms = 1.1 if model.config.objective == "shortcut_consistency" else 1  # a tenth of another cross entropy
    assert losses[0] == pytest.approx(share * terms * math.log(61), rel=0.02)
    assert losses[-1] < 0.5 * losses[0]
    evaluated = next(record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record)
    with torch.no_grad():
        assert evaluated == pytest.approx(share * float(model.eval()(ids, labels=ids).loss), rel=1e-5)
    predictions = trainer.predict(rows[:7]).predictions
    assert predictions.shape == (7, 9, 61)


@pytest.mark.parametrize(
    ("preset", "objective"),
    [("flt", "last_loop"), ("lt", "every_loop"), ("loopformer", "last_third"), ("loopformer", "shortcut_consistency")],
)
def test_accumulated_microbatches_with_uneven_masks_equal_one_large_batch(preset, objective, tmp_path):
    """A mean of means would differ; sums divided by the step's count do not."""
    rows = counting(num_rows=6)
    for i, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][2 + i :] = -100
    weights = []
    for batch_size, accumulated in ((6, 1), (2, 3), (3, 2)):
        # of two loops the only short trajectory is one loop, so that every microbatch draws the same
        model = tiny_model(preset, objective=objective, num_loops=2).double()
        settings = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulated}
        settings |= {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
        Trainer(model, arguments(tmp_path, **settings), train_dataset=rows).train()
        weights.append(model.state_dict())
    start = tiny_model(preset, objective=objective, num_loops=2).double().state_dict()
    for name, expected in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-9, atol=1e-11)
    assert any(not torch.equal(start[name], weights[0][name]) for name in start)


def test_the_trainer_checkpoints_activations_on_request(tmp_path):
    weights = []
    for checkpointed in (False, True):
        model = tiny_model("elastic-flt").double()
        settings = {"max_steps": 3, CHECKPOINTING: checkpointed, "per_device_train_batch_size": 4}
        Trainer(model, arguments(tmp_path, **settings), train_dataset=counting()).train()
        weights.append(model.state_dict())
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-9, atol=1e-11)


# -- adapters --------------------------------------------------------------------------------------------------

LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}


def adapted(preset):
    torch.manual_seed(0)
    return get_peft_model(tiny_model(preset), LoraConfig(**LORA))


def train(model, steps=20):
    ids = torch.stack([row["input_ids"] for row in counting(8)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_a_lora_adapter_attaches_trains_saves_and_loads(preset, tmp_path):
    model = adapted(preset)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses = train(model)
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    ids = torch.arange(10)[None]
    logits = model(ids, num_loops=2).logits
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    again = PeftModel.from_pretrained(tiny_model(preset), tmp_path / "adapter").eval()
    assert torch.equal(again(ids, num_loops=2).logits, logits)
    assert not torch.equal(tiny_model(preset)(ids, num_loops=2).logits, logits)
    generated = again.generate(input_ids=ids, max_new_tokens=3, do_sample=False, num_loops=2)
    assert generated.shape == (1, 13)
    merged = again.merge_and_unload()
    assert isinstance(merged, LoopedForCausalLM)
    torch.testing.assert_close(merged(ids, num_loops=2).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_adapters_get_equal_gradients_under_activation_checkpointing(preset, use_reentrant, checkpoint_activations):
    model = adapted(preset).double()
    train(model, steps=2)  # an adapter starts at zero, and so do half of its gradients
    ids = torch.arange(20).view(2, 10)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_activations(model.base_model.model, use_reentrant=use_reentrant)
        model.train().zero_grad()
        model.base_model.model.set_draw(4)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, expected in gradients[0].items():
        assert expected.any(), name
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-12, atol=1e-14)
