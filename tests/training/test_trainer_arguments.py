"""What a LoopTrainer is given is checked before anything is written."""

import warnings

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from loopformers import ConfigError, DataError
from loopformers.errors import ObjectiveWarning
from loopformers.testing import tiny_model
from loopformers.training.optimizers import MuonAdamW
from loopformers.training.trainer import LoopTrainer, training_arguments
from loopformers.training.trainer_arguments import collate_windows

IDS = torch.arange(3, 14)
WINDOW = {"input_ids": IDS, "labels": IDS}


def arguments(folder, **overrides):
    return training_arguments(folder, **{"num_steps": 1, "batch_size": 2, **overrides})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_steps": "7"}, "num_steps='7' must be a whole number"),
        ({"num_steps": 2.5}, "num_steps=2.5 must be a whole number"),
        ({"num_steps": None}, "num_steps=None must be a whole number"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"lerning_rate": 1e-3}, "argument='lerning_rate' is not known; did you mean 'learning_rate'"),
        ({"learning_rate": 1e-3}, "learning_rate=0.001 would have no effect: .*give LoopTrainer optimizer_settings"),
        ({"warmup_steps": 5}, "warmup_steps=5 would have no effect: .*give LoopTrainer lr_schedule"),
    ],
)
def test_arguments_that_are_wrong_or_idle_are_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        arguments(tmp_path, **overrides)


def test_an_output_folder_must_be_a_path():
    with pytest.raises(ConfigError, match="output_dir=None must be a path"):
        arguments(None)


@pytest.mark.parametrize("idle", [{"learning_rate": 1e-2}, {"weight_decay": 0.3}, {"lr_scheduler_type": "cosine"}])
def test_idle_fields_of_arguments_made_by_hand_are_refused(tmp_path, idle):
    own = {"report_to": [], "use_cpu": True, "max_steps": 1}
    LoopTrainer(tiny_model("lt"), TrainingArguments(str(tmp_path), **own), [WINDOW])
    with pytest.raises(ConfigError, match="would have no effect"):
        LoopTrainer(tiny_model("lt"), TrainingArguments(str(tmp_path), **own, **idle), [WINDOW])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"model": None}, "a NoneType has no loops to train"),
        ({"model": nn.Linear(2, 3)}, "a Linear has no loops to train"),
        ({"args": {"max_steps": 3}}, "must be TrainingArguments"),
        ({"law": "uniform"}, "law='uniform' must be an object with a method 'plan'"),
        ({"lr_schedule": "cosine"}, "lr_schedule='cosine' must be an object with a method 'build'"),
        ({"optimizer_settings": {"lr": 1}}, "optimizer_settings=.* must be an object with a method 'build'"),
        ({"num_grad_loops": 0}, "num_grad_loops=0 must be a whole number"),
    ],
)
def test_parts_of_another_type_are_refused_before_anything_is_written(tmp_path, part, message):
    folder = tmp_path / "run"
    given = {"model": tiny_model("lt"), "args": arguments(folder), "train_dataset": [WINDOW], **part}
    with pytest.raises(ConfigError, match=message):
        LoopTrainer(**given)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "train_dataset=None must hold windows"),
        ("abc", "train_dataset='abc' must hold windows"),
        ([], "holds no window"),
        ([{"input_ids": IDS}], r"windows of \['input_ids'\]; each must have input_ids and labels"),
        ([IDS], "windows of 'Tensor'"),
    ],
)
def test_data_without_targets_are_refused(tmp_path, dataset, message):
    with pytest.raises(DataError, match=message):
        LoopTrainer(tiny_model("lt"), arguments(tmp_path), dataset, optimizer_settings=MuonAdamW())


def test_windows_of_unequal_length_are_refused_by_their_lengths():
    shorter = {name: values[:7] for name, values in WINDOW.items()}
    with pytest.raises(DataError, match="windows of 7 to 11 tokens"):
        collate_windows([WINDOW, shorter])
    assert collate_windows([WINDOW, WINDOW])["input_ids"].shape == (2, 11)


@pytest.mark.parametrize("preset", ["lt", "loopformer"])
def test_a_step_without_a_target_changes_nothing_and_is_told(tmp_path, preset):
    """trl#6668: a loss of 0.0 and no word. NVIDIA-NeMo/Automodel#3797: 0/0, and NaN in every weight."""
    model = tiny_model(preset)
    masked = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        LoopTrainer(model, arguments(tmp_path), [masked, masked]).train()
    assert next(str(w.message) for w in told if w.category is ObjectiveWarning).startswith("step 1 had no target")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
