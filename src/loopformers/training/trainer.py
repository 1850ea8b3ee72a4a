"""LoopTrainer: `transformers.Trainer` with what a looped model needs recorded, checked and resumed exactly."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from loopformers.errors import CheckpointError, ConfigError, NonFiniteError
from loopformers.laws import Law, LoopPlan
from loopformers.objectives.contract import IGNORE
from loopformers.training.callbacks import LoopDrawCallback, StopCallback
from loopformers.training.checkpoints import check_complete, last_complete_checkpoint, mark_complete
from loopformers.training.lr_schedules import ConstantThenLinear, LearningRateSchedule
from loopformers.training.optimizers import MuonAdamW, OptimizerSettings
from loopformers.training.progress import ProgressListener, TrainingProgress
from loopformers.training.step_log import METRICS_FILE, StepLog

__all__ = ["LoopTrainer", "training_arguments"]


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
        overrides: Any other field of `TrainingArguments`.

    Raises:
        ConfigError: A number of steps, a batch size or an interval below 1.
    """
    for name, value in (("num_steps", num_steps), ("batch_size", batch_size), ("save_steps", save_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
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
    }
    return TrainingArguments(output_dir=os.fspath(output_dir), **{**defaults, **overrides})


class LoopTrainer(Trainer):
    """Trains a `LoopedForCausalLM`, records every update, and resumes bit for bit.

    On top of `transformers.Trainer`:

    - each update appends a record to `metrics.jsonl`: `step` (updates done), `loss`, `loss_parts`, `gradient_norm`
      (global L2, before clipping), `residual_norms` (by loop, mean over the step's microbatches), `learning_rates` (by
      group, of this update), `tokens_seen` and `flops` (forward and backward, every loop and both trajectories), both
      from the start of the run and over all ranks;
    - a loss or gradient that is not finite raises NonFiniteError before the update: the weights stay as they were;
    - Ctrl-C ends after the running update, saves a checkpoint and raises KeyboardInterrupt; a second one ends at once;
    - a resumed run continues from the last *complete* checkpoint and repeats no record.

    Args:
        model: The model.
        args: As `training_arguments` returns.
        train_dataset: Windows with `input_ids` and `labels`, (seq,) each.
        optimizer_settings: Builds the optimiser.
        lr_schedule: Multiplier of each group's rate.
        law: Draws what each microbatch runs, from (seed, step, microbatch) with the configuration's `loop_seed`; the model
            is then given its trajectories and draws nothing. None: the model draws from its own law.
        num_grad_loops: Last loops that gradients flow through; None: all.
        checkpoint_files: Texts by file name that every checkpoint holds beside the model, such as the recipe.
        on_progress: Called after each update on the main process.
        stop_requested: Asked after each update; True acts as Ctrl-C does, for workers that share a terminal.
        callbacks: Further callbacks.
        kwargs: Passed to `transformers.Trainer`.

    Raises:
        ConfigError: `save_total_limit` is 1.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        train_dataset: Any,
        *,
        optimizer_settings: OptimizerSettings | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        law: Law | None = None,
        num_grad_loops: int | None = None,
        checkpoint_files: Mapping[str, str] | None = None,
        on_progress: ProgressListener | None = None,
        stop_requested: Callable[[], bool] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ) -> None:
        if args.save_total_limit == 1:
            raise ConfigError(
                "save_total_limit=1 leaves no complete checkpoint while the next one is being written; use 2 or more"
            )
        self.optimizer_settings = optimizer_settings or MuonAdamW()
        self.lr_schedule = lr_schedule or ConstantThenLinear()
        self.law = law
        self.num_grad_loops = num_grad_loops
        self.checkpoint_files = dict(checkpoint_files or {})
        self.metrics = StepLog(Path(args.output_dir) / METRICS_FILE)
        self._interrupted = False
        self._stop = StopCallback(
            lambda: self._on_any_rank(self._interrupted or bool(stop_requested and stop_requested()))
        )
        self._draw = LoopDrawCallback()
        self._record = _StepRecord(self, on_progress)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            # The record is written first, the stop is decided last: whatever others do on a step's end is in between.
            callbacks=[self._draw, self._record, *callbacks, self._stop],
            **kwargs,
        )
        self.remove_callback(PrinterCallback)
        self._reports_residual_norms = "output_residual_norms" in inspect.signature(model.forward).parameters

    # -- optimisation ------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimiser of `optimizer_settings`, unless one was given."""
        if self.optimizer is None:
            self.optimizer = self.optimizer_settings.build(self.model if model is None else model)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Build the scheduler of `lr_schedule`, unless one was given."""
        if self.lr_scheduler is None:
            self.lr_scheduler = self.lr_schedule.build(optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch the microbatches of a step and count their targets.

        The first label of a window is no target. Older versions of transformers count it, which scales the loss by
        (seq - 1) / seq.
        """
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if num_items is None or self.args.n_gpu > 1 or not all("labels" in sample for sample in samples):
            return samples, num_items
        count = torch.stack([(sample["labels"][..., 1:] != IGNORE).sum() for sample in samples]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return samples, count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the objective, and keep its parts and the residual norms."""
        if model.training and self._reports_residual_norms:
            inputs = {**inputs, "output_residual_norms": True}
        if model.training and self.law is not None:
            plan = self._plan()
            inputs = {**inputs, "schedule": plan.long}
            if plan.short is not None:
                inputs["short_schedule"] = plan.short
        if model.training and self.num_grad_loops is not None:
            inputs = {**inputs, "num_grad_loops": self.num_grad_loops}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            self._record.add_outputs(outputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of one microbatch; after the last of a step, check that all is finite.

        Raises:
            NonFiniteError: The loss or the gradient is not finite.
        """
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._record.add_microbatch(loss, inputs["input_ids"].shape)
        if self.accelerator.sync_gradients:
            self._record.gradient_norm = self._checked_gradient_norm(model)
            self._record.learning_rates = {
                str(group.get("name", index)): float(group["lr"])
                for index, group in enumerate(self.optimizer.param_groups)
            }
        return loss

    def _checked_gradient_norm(self, model: nn.Module) -> float:
        """Return the global gradient norm before clipping, or raise NonFiniteError with the weights untouched."""
        loss = self._record.loss
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm_value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:  # float16: gradients are scaled, and the scaler skips updates that overflow
            return norm_value / float(scaler.get_scale())
        if math.isfinite(loss) and math.isfinite(norm_value):
            return norm_value
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        bad = [n for n, gradient in named if not bool(torch.isfinite(gradient).all())]
        where = (
            f"the first of {len(bad)} parameters with such a gradient is {bad[0]!r}"
            if bad
            else "no gradient is affected"
        )
        step = self.state.global_step
        model.zero_grad()
        raise NonFiniteError(
            f"step {step + 1}: loss={loss:.6g}, gradient norm={norm_value:.6g}; {where}. The update was not made: the "
            f"weights are those after step {step}. Lower the learning rate, or look at metrics.jsonl for where it began"
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Operations of one microbatch, forward and backward: every loop and both trajectories of the objective."""
        return self._flops(inputs["input_ids"].shape)

    def _plan(self) -> LoopPlan:
        """What the running microbatch runs: the same on every rank, and after every resume."""
        config = self.accelerator.unwrap_model(self.model).config
        law: Law = self.law or config.law
        return law.plan(seed=config.loop_seed, step=self.state.global_step, microbatch=self._draw.microbatch)

    def _flops(self, shape: torch.Size) -> float:
        config = self.accelerator.unwrap_model(self.model).config
        plan = self._plan()
        return float(
            config.training_flops(
                batch_size=shape[0], seq_len=shape[1], num_loops=plan.long.num_loops, short=plan.short
            )
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Report what transformers would, with this trainer's record of the last update instead of its own figures."""
        super().log({**logs, **self._record.scalars()}, *args, **kwargs)

    # -- stopping and resuming ---------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | Literal["auto"] | None = None, **kwargs: Any
    ) -> Any:
        """Train to the end.

        Args:
            resume_from_checkpoint: None or False: start, in a folder that holds no run yet. True: continue from the
                last complete checkpoint. "auto": the same, or start anew where there is none. Or a checkpoint's folder.
            kwargs: Passed to `transformers.Trainer.train`.

        Raises:
            CheckpointError: Nothing complete to continue from.
            ConfigError: A fresh start in a folder that holds a run.
            NonFiniteError: Training diverged.
            KeyboardInterrupt: Ctrl-C or `stop_requested`, after a checkpoint was saved.
        """
        checkpoint = self._resolve(resume_from_checkpoint)
        done = 0 if checkpoint is None else check_complete(checkpoint)
        if self.is_world_process_zero():
            self._record.continue_from(self.metrics.truncate(done))
        if checkpoint is not None and done >= self.args.max_steps > 0:
            # transformers would make one more update before it notices that the run is over.
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            return TrainOutput(done, math.nan, {})
        self._interrupted = self._stop.stopped = False
        with self._delayed_interrupt():
            result = super().train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint), **kwargs)
        if self._stop.stopped:
            raise KeyboardInterrupt(f"stopped after step {self.state.global_step}; a checkpoint was saved")
        return result

    def _resolve(self, resume: str | os.PathLike[str] | bool | None) -> Path | None:
        folder = self.args.output_dir
        if resume is None or resume is False:
            if self.metrics.read() or last_complete_checkpoint(folder) is not None:
                raise ConfigError(
                    f"output_dir={folder!r} holds a run already; continue it with resume_from_checkpoint=True, or "
                    "choose another folder"
                )
            return None
        if resume is True or resume == "auto":
            checkpoint = last_complete_checkpoint(folder)
            if checkpoint is None and resume is True:
                raise CheckpointError(
                    f"output_dir={folder!r} holds no complete checkpoint to continue from; start anew"
                )
            return checkpoint
        check_complete(resume)
        return Path(resume)

    @contextlib.contextmanager
    def _delayed_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C into a request to stop: an update that is cut in half can't be resumed."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return

        def request_stop(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, previous)

        def request_stop_softly(number: int, frame: FrameType | None) -> None:
            self._interrupted = True

        previous = signal.getsignal(signal.SIGINT)
        if previous is signal.SIG_IGN:  # a worker whose parent decides
            yield
            return
        signal.signal(signal.SIGINT, request_stop)
        # A launcher answers Ctrl-C with SIGTERM to its processes, and kills after a while those that stay.
        launched = "LOCAL_RANK" in os.environ
        terminate = signal.signal(signal.SIGTERM, request_stop_softly) if launched else None
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            if launched:
                signal.signal(signal.SIGTERM, terminate)

    def _on_any_rank(self, stop: bool) -> bool:
        """Whether any rank wants to stop: all stop after the same update, whichever got the signal."""
        if self.args.world_size == 1:
            return stop
        return bool(self.accelerator.gather(torch.tensor([stop], device=self.args.device)).any())

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # Two checkpoints within a second make some versions doubt the file system, and order them by step: rightly.
            warnings.filterwarnings("ignore", message="mtime may not be reliable")
            super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            step = self.state.global_step
            checkpoint = Path(self.args.output_dir) / f"checkpoint-{step}"
            for name, text in self.checkpoint_files.items():
                (checkpoint / name).write_text(text, encoding="utf-8")
            mark_complete(checkpoint, step)


class _StepRecord(TrainerCallback):
    """Collects what one update did and writes it when the update is made."""

    def __init__(self, trainer: LoopTrainer, on_progress: ProgressListener | None) -> None:
        self.trainer = trainer
        self.on_progress = on_progress
        self.tokens_seen: int = 0
        self.flops: float = 0.0
        self.gradient_norm: float = math.nan
        self.learning_rates: dict[str, float] = {}
        self.last: dict[str, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._losses: list[Tensor] = []
        self._parts: list[Mapping[str, Tensor]] = []
        self._residual_norms: list[Tensor] = []

    def continue_from(self, records: list[dict[str, Any]]) -> None:
        """Take over the totals of the last record."""
        last = records[-1] if records else {"tokens_seen": 0, "flops": 0.0}
        self.tokens_seen, self.flops = int(last["tokens_seen"]), float(last["flops"])

    def add_outputs(self, outputs: Any) -> None:
        """Keep what the forward reports; detached, read once the update is made."""
        if getattr(outputs, "loss_parts", None) is not None:
            self._parts.append(outputs.loss_parts)
        if getattr(outputs, "residual_norms", None) is not None:
            self._residual_norms.append(outputs.residual_norms)

    def add_microbatch(self, loss: Tensor, shape: torch.Size) -> None:
        """Count one microbatch of all ranks."""
        self._losses.append(loss)
        ranks = self.trainer.args.world_size
        self.tokens_seen += shape.numel() * ranks
        self.flops += self.trainer._flops(shape) * ranks

    @property
    def loss(self) -> float:
        """Objective of the update: the trainer scales each microbatch so that they add up."""
        return float(self.trainer.accelerator.gather(torch.stack(self._losses).sum()).mean())

    def _mean_residual_norms(self) -> list[float]:
        if not self._residual_norms:
            return []
        # Microbatches may run different numbers of loops: each loop's mean is over those that ran it.
        deepest = max(map(len, self._residual_norms))
        by_loop = [[norms[i] for norms in self._residual_norms if len(norms) > i] for i in range(deepest)]
        return self._mean_over_ranks(torch.stack([torch.stack(norms).mean() for norms in by_loop])).tolist()

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        """Return the mean over ranks of some numbers, (n,); a collective."""
        gathered: Tensor = self.trainer.accelerator.gather(values[None])
        return gathered.mean(0)

    def _loss_parts(self) -> dict[str, float]:
        if not self._parts:
            return {}
        names = list(self._parts[0])
        sums = self._mean_over_ranks(torch.stack([torch.stack([p[name] for p in self._parts]).sum() for name in names]))
        # With a count of targets for the whole step, parts are sums over it and add up; otherwise they are means.
        by_count = self.trainer.model_accepts_loss_kwargs
        scale = self.trainer.args.world_size if by_count else 1.0 / len(self._parts)
        return {name: float(value) * scale for name, value in zip(names, sums, strict=True)}

    def scalars(self) -> dict[str, float]:
        """Return the last record as named numbers, for reporters."""
        if not self.last:
            return {}
        found = {name: self.last[name] for name in ("loss", "gradient_norm", "tokens_seen", "flops")}
        for group in ("loss_parts", "learning_rates"):
            found |= {f"{group}/{name}": value for name, value in self.last[group].items()}
        norms = enumerate(self.last["residual_norms"], start=1)
        return found | {f"residual_norms/loop_{loop}": norm for loop, norm in norms if norm is not None}

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the record of the update."""
        loss = self.loss
        record = {
            "step": state.global_step,
            "loss": loss,
            "loss_parts": self._loss_parts(),
            "gradient_norm": self.gradient_norm,
            "residual_norms": [_finite_or_none(norm) for norm in self._mean_residual_norms()],
            "learning_rates": self.learning_rates,
            "tokens_seen": self.tokens_seen,
            "flops": self.flops,
        }
        self._clear()
        self.last = record
        if not state.is_world_process_zero:
            return
        self.trainer.metrics.append(record)
        if self.on_progress is not None:
            self.on_progress(
                TrainingProgress(
                    step=state.global_step, num_steps=state.max_steps, loss=loss, gradient_norm=self.gradient_norm
                )
            )


def _finite_or_none(value: float) -> float | None:
    """JSON has no infinity; a residual stream may explode while the normed state and the loss stay finite."""
    return value if math.isfinite(value) else None
