"""What a LoopTrainer may be given: transformers' arguments with this package's defaults, and a check of each part."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments, default_data_collator

from loopformers.errors import ConfigError, DataError, check_count, shorten, unknown_name
from loopformers.limits import MAX_SEED
from loopformers.model.trunk import LoopedModel
from loopformers.training.launcher import world_size

__all__ = ["check_dataset", "check_parts", "collate_windows", "training_arguments"]

_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
_IDLE = {
    **dict.fromkeys(_OPTIMIZER, "optimizer_settings builds the optimiser; give LoopTrainer optimizer_settings"),
    **dict.fromkeys(_SCHEDULE, "lr_schedule multiplies the rates; give LoopTrainer lr_schedule"),
}
"""Fields of TrainingArguments that a LoopTrainer does not read, and what it reads instead."""


def training_arguments(
    output_dir: str | os.PathLike[str],
    *,
    num_steps: int,
    batch_size: int,
    seed: int = 0,
    save_steps: int | None = None,
    **overrides: Any,
) -> TrainingArguments:
    """Return `TrainingArguments` with this package's defaults: clip at 1, keep two checkpoints, report nowhere else.

    Args:
        output_dir: Folder of the run.
        num_steps: Updates.
        batch_size: Windows a microbatch and device.
        seed: Of data order and of every random state.
        save_steps: Updates between checkpoints; None: only at the end and on interruption.
        overrides: Any other field of `TrainingArguments` that a LoopTrainer reads.

    Raises:
        ConfigError: A number of steps, a batch size or an interval below 1, or a field that is not known or without effect.
    """
    if not isinstance(output_dir, str | os.PathLike):
        raise ConfigError(f"output_dir={shorten(output_dir)} must be a path")
    for name, value in (("num_steps", num_steps), ("batch_size", batch_size), ("save_steps", save_steps)):
        if value is not None or name != "save_steps":
            check_count(name, value)
    check_count("seed", seed, at_least=0, at_most=MAX_SEED)
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(unknown_name("argument", name, known))
        if name in _IDLE:
            raise ConfigError(f"{name}={shorten(value)} would have no effect: {_IDLE[name]}")
    defaults: dict[str, Any] = {
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "seed": seed,
        "data_seed": seed,
        "save_strategy": "steps",
        "save_steps": num_steps if save_steps is None else save_steps,
        "save_total_limit": 2,
        "max_grad_norm": 1.0,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
    }
    if defaults["use_cpu"] and world_size() > 1:
        defaults["ddp_backend"] = "gloo"
    return TrainingArguments(output_dir=os.fspath(output_dir), **{**defaults, **overrides})


def check_parts(model: Any, args: Any, parts: Mapping[str, tuple[Any, str]]) -> None:
    """Check the types of what a trainer is made of, before anything is written.

    Args:
        model: Must hold a looped model of ours.
        args: Must be TrainingArguments, without a field that would have no effect.
        parts: By name, what was given, or None, and the method that it must have.

    Raises:
        ConfigError: One is of another type.
    """
    if not isinstance(model, nn.Module) or not any(isinstance(module, LoopedModel) for module in model.modules()):
        raise ConfigError(
            f"a {type(model).__name__} has no loops to train; give a LoopedForCausalLM, or train it with transformers.Trainer"
        )
    if not isinstance(args, TrainingArguments):
        raise ConfigError(f"args={shorten(args)} must be TrainingArguments, as training_arguments returns them")
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        if field.name in _IDLE and field.default is not dataclasses.MISSING and value != field.default:
            raise ConfigError(f"{field.name}={shorten(value)} would have no effect: {_IDLE[field.name]}")
    for name, (value, method) in parts.items():
        if value is not None and not callable(getattr(value, method, None)):
            raise ConfigError(f"{name}={shorten(value)} must be an object with a method {method!r}, not its name")


def check_dataset(dataset: Any) -> None:
    """Check that there are windows, and that they have targets, where one can be looked at without reading them all.

    Raises:
        DataError: None, or what is no window with `input_ids` and `labels`.
    """
    if dataset is None or isinstance(dataset, str):
        raise DataError(f"train_dataset={shorten(dataset)} must hold windows: input_ids and labels, (seq,) each")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return
    if len(dataset) == 0:
        raise DataError("train_dataset holds no window; give at least one, of at least two tokens")
    if isinstance(dataset, Sequence):  # others may read, or draw, what they return
        first = dataset[0]
        if not isinstance(first, Mapping) or not {"input_ids", "labels"} <= first.keys():
            found = sorted(map(str, first)) if isinstance(first, Mapping) else type(first).__name__
            raise DataError(
                f"train_dataset holds windows of {shorten(found)}; each must have input_ids and labels, (seq,), where labels are "
                "the same tokens, not shifted, and -100 where there is nothing to predict"
            )


def collate_windows(windows: list[Any]) -> dict[str, Any]:
    """Return windows of equal length as a batch.

    Raises:
        DataError: Lengths differ.
    """
    try:
        return dict(default_data_collator(windows))
    except (RuntimeError, ValueError) as error:
        lengths = sorted({len(window["input_ids"]) for window in windows if "input_ids" in window})
        if len(lengths) < 2:
            raise
        raise DataError(
            f"a batch has windows of {lengths[0]} to {lengths[-1]} tokens, and they must be of equal length; pack them "
            "(loopformers.data), or give a data_collator that pads input_ids, attention_mask and labels (-100)"
        ) from error
