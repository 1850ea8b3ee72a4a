"""Losses that are not the model's own: label smoothing, and trainers that take the labels or the states for themselves."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from loopformers import ConfigError
from loopformers.errors import ObjectiveWarning
from loopformers.testing import tiny_model
from loopformers.training.step_log import StepLog
from loopformers.training.trainer import LoopTrainer, training_arguments

IDS = torch.randint(61, (6, 11), generator=torch.Generator().manual_seed(2))
WINDOWS = [{"input_ids": row, "labels": row} for row in IDS]


def smoothed(logits, share, labels=IDS):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=share)


def their_arguments(folder, **options):
    return TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=6, report_to=[], use_cpu=True, save_strategy="no", **options
    )


# -- label smoothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 7])
def test_smoothing_applies_to_each_cross_entropy_of_the_objective(chunk):
    model = tiny_model("loopformer", short_weight=0.3, consistency_weight=0.7).double()
    long, short = (smoothed(model(IDS, num_loops=loops).logits, 0.2) for loops in (3, 2))
    model.train().loss_chunk_tokens = chunk
    plain = model(IDS, labels=IDS, short_schedule="uniform:2")
    output = model(IDS, labels=IDS, short_schedule="uniform:2", smoothing=0.2)
    torch.testing.assert_close(output.loss_parts["cross_entropy"], long)
    torch.testing.assert_close(output.loss_parts["short_cross_entropy"], short)
    torch.testing.assert_close(output.loss_parts["consistency"], plain.loss_parts["consistency"])
    torch.testing.assert_close(output.loss, long + 0.3 * short + 0.7 * plain.loss_parts["consistency"])


def test_no_smoothing_moves_no_bit():
    model = tiny_model("flt", objective="every_loop").train()
    assert torch.equal(model(IDS, labels=IDS, smoothing=0.0).loss, model(IDS, labels=IDS).loss)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), True, "0.1"])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ConfigError, match=r"smoothing=.* must be a number from 0 to below 1"):
        tiny_model("flt").train()(IDS, labels=IDS, smoothing=share)


def test_smoothing_without_labels_in_training_mode_is_refused():
    for model, labels in ((tiny_model("flt").train(), None), (tiny_model("flt"), IDS)):
        with pytest.raises(ConfigError, match="smoothing has no meaning without labels in training mode"):
            model(IDS, labels=labels, smoothing=0.1)


def test_loop_trainer_smooths_inside_the_objective(tmp_path):
    model = tiny_model("flt", objective="every_loop")
    expected = model.train()(IDS, labels=IDS, smoothing=0.1).loss.item()
    arguments = training_arguments(tmp_path, num_steps=1, batch_size=6, label_smoothing_factor=0.1)
    trainer = LoopTrainer(model, arguments, WINDOWS)
    trainer.train()
    (record,) = StepLog(tmp_path / "metrics.jsonl").read()
    assert record["loss"] == pytest.approx(expected, rel=1e-5)
    batch = {"input_ids": IDS, "labels": IDS}
    assert torch.equal(trainer.compute_loss(model.eval(), dict(batch)), model(**batch).loss)


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_loop_trainer_refuses_a_share_outside_its_range_before_it_makes_a_folder(tmp_path, share):
    arguments = training_arguments(tmp_path / "run", num_steps=1, batch_size=6, label_smoothing_factor=share)
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=.* must be a number from 0 to below 1"):
        LoopTrainer(tiny_model("flt"), arguments, WINDOWS)


def test_loop_trainer_refuses_a_loss_function_of_ones_own(tmp_path):
    arguments = training_arguments(tmp_path / "run", num_steps=1, batch_size=6)
    with pytest.raises(ConfigError, match="compute_loss_func would replace the model's objective"):
        LoopTrainer(tiny_model("flt"), arguments, WINDOWS, compute_loss_func=lambda *_, **__: 0.0)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT asks so
@pytest.mark.parametrize("wrap", [False, True])
def test_transformers_trainer_smooths_the_next_token(tmp_path, wrap):
    model = tiny_model("flt", objective="last_loop")
    expected = smoothed(model(IDS).logits, 0.1).item()
    model.train()
    if wrap:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = Trainer(model, their_arguments(tmp_path, label_smoothing_factor=0.1), train_dataset=WINDOWS)
    loss = trainer.compute_loss(model, {"input_ids": IDS, "labels": IDS})
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("taken", ["smoothing", "function"])
def test_transformers_trainer_cannot_take_the_labels_from_an_objective(tmp_path, taken):
    model = tiny_model("loopformer")
    options = {"label_smoothing_factor": 0.1} if taken == "smoothing" else {}
    function = None if taken == "smoothing" else lambda output, labels, num_items_in_batch=None: output.logits.mean()
    trainer = Trainer(model, their_arguments(tmp_path, **options), train_dataset=WINDOWS, compute_loss_func=function)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=r"objective='shortcut_consistency' would not be trained; use LoopTrainer"):
        trainer.train()
    assert all(map(torch.equal, before, model.parameters()))


# -- losses outside the model -------------------------------------------------------------------------------------


def from_logits(model):
    return model(IDS).logits.square().mean()


def from_states(model):
    return model.model(IDS).last_hidden_state.square().mean()


def from_loop_states(model):
    return model(IDS, output_hidden_states=True).logits.log_softmax(-1)[..., 0].mean()


@pytest.mark.parametrize("loss", [from_logits, from_states, from_loop_states])
def test_a_loss_outside_the_model_warns_once_of_the_objective_that_it_does_not_train(loss):
    model = tiny_model("loopformer").train()
    with pytest.warns(ObjectiveWarning, match="objective='shortcut_consistency' is not trained") as seen:
        loss(model).backward()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model).backward()


def innocent_forward(model):
    model(IDS)


def innocent_without_gradients(model):
    with torch.no_grad():
        model(IDS, labels=IDS)


def innocent_objective(model):
    model(IDS, labels=IDS).loss.backward()


def innocent_evaluation(model):
    model.eval()(IDS).logits.mean().backward()


def innocent_last_loop(model):
    model.config.objective = "last_loop"
    model(IDS).logits.mean().backward()


@pytest.mark.parametrize(
    "use",
    [innocent_forward, innocent_without_gradients, innocent_objective, innocent_evaluation, innocent_last_loop],
)
def test_what_trains_no_other_loss_gives_no_warning(use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(tiny_model("loopformer").train())
