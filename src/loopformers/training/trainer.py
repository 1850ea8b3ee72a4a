"""LoopTrainer: `transformers.Trainer` with what a looped model needs recorded, checked and resumed exactly."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from loopformers.analysis.monitor import LiveVerdict
from loopformers.errors import CheckpointError, ConfigError, NonFiniteError, ObjectiveWarning
from loopformers.folders import owned
from loopformers.laws import Law, LoopPlan
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.objectives.contract import IGNORE, check_smoothing
from loopformers.schedule import check_num_loops
from loopformers.training.callbacks import BudgetValidationCallback, LoopDrawCallback, StopCallback
from loopformers.training.checkpointing import WholeCheckpoints
from loopformers.training.checkpoints import (
    ASIDE,
    check_complete,
    check_writable,
)
from loopformers.training.engine import EngineSettings
from loopformers.training.lr_schedules import ConstantThenLinear, LearningRateSchedule
from loopformers.training.optimizers import MuonAdamW, OptimizerSettings
from loopformers.training.progress import ProgressListener
from loopformers.training.sharding import is_sharded
from loopformers.training.speed import SPEED_FILE, Speed
from loopformers.training.step_log import METRICS_FILE, StepLog
from loopformers.training.step_record import StepRecord
from loopformers.training.step_tally import StepNumbers, local_part
from loopformers.training.streamed import StreamedData
from loopformers.training.trainer_arguments import check_dataset, check_parts, collate_windows, training_arguments

__all__ = ["LoopTrainer", "training_arguments"]


class LoopTrainer(StreamedData, WholeCheckpoints):
    """Trains a `LoopedForCausalLM`, records every update, and resumes bit for bit.

    On top of `transformers.Trainer`:

    - each update appends a record to `metrics.jsonl`, whose fields `step_record` lists: objective, gradient norms before
      clipping (global, by layer, by loop), residual norms, state cosines, a verdict on stability; one host sync reads all;
    - each update appends its time to `speed.jsonl`: tokens per second and the share of the machine's peak;
    - a loss or gradient that is not finite raises NonFiniteError before the update, on every rank: the weights stay as they
      were. With `engine.skip_non_finite` the update is left out and counted instead;
    - Ctrl-C ends after the running update, saves a checkpoint and raises KeyboardInterrupt; a second one ends at once;
    - a resumed run continues from the last *complete* checkpoint and repeats no record.

    Args:
        model: The model.
        args: As `training_arguments` returns. `label_smoothing_factor` smooths the labels of each cross entropy in the
            objective; evaluation measures the plain one.
        train_dataset: Windows with `input_ids` and `labels`, (seq,) each; or `StreamedWindows`, of which each rank reads its
            own part, and whose position every checkpoint holds.
        optimizer_settings: Builds the optimiser.
        lr_schedule: Multiplier of each group's rate.
        law: Draws what each microbatch runs, from (seed, step, microbatch) with the configuration's `loop_seed`; the model
            is then given its trajectories and draws nothing. None: the model draws from its own law.
        num_grad_loops: Last loops that gradients flow through; None: what `engine` says.
        engine: What a step costs, and what happens when one fails.
        unigram_loss: Cross entropy of token frequencies alone, nats per token: a run that stays there has collapsed. None:
            unknown, and the verdict does without.
        checkpoint_files: Texts by file name that every checkpoint holds beside the model, such as the recipe.
        on_progress: Called after each update on the main process.
        stop_requested: Asked after each update; True acts as Ctrl-C does, for workers that share a terminal.
        callbacks: Further callbacks.
        kwargs: Passed to `transformers.Trainer`.

    Raises:
        DataError: `train_dataset` holds no windows, or windows without labels.
        ConfigError: A part is of another type, a field has no effect, `save_total_limit` is 1, `compute_loss_func` is given,
            `label_smoothing_factor` is not a share from 0 to below 1, or the output folder cannot be written.
    """

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
        engine: EngineSettings | None = None,
        unigram_loss: float | None = None,
        checkpoint_files: Mapping[str, str] | None = None,
        on_progress: ProgressListener | None = None,
        stop_requested: Callable[[], bool] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ) -> None:
        check_parts(
            model,
            args,
            {
                "optimizer_settings": (optimizer_settings, "build"),
                "lr_schedule": (lr_schedule, "build"),
                "law": (law, "plan"),
            },
        )
        check_dataset(train_dataset)
        if num_grad_loops is not None:
            check_num_loops(num_grad_loops, name="num_grad_loops")
        if args.save_total_limit == 1:
            raise ConfigError(
                "save_total_limit=1 leaves no complete checkpoint while the next one is being written; use 2 or more"
            )
        if kwargs.get("compute_loss_func") is not None:
            raise ConfigError(
                "compute_loss_func would replace the model's objective, which LoopTrainer trains and records; leave it out, "
                "or train with transformers.Trainer"
            )
        check_smoothing(args.label_smoothing_factor, name="label_smoothing_factor")
        if args.process_index == 0:
            check_writable(args.output_dir)
        self.optimizer_settings = optimizer_settings or MuonAdamW()
        self.lr_schedule = lr_schedule or ConstantThenLinear()
        self.law = law
        self.engine = engine or EngineSettings()
        self.num_grad_loops = self.engine.num_grad_loops if num_grad_loops is None else num_grad_loops
        self.checkpoint_files = dict(checkpoint_files or {})
        self.metrics = StepLog(Path(args.output_dir) / METRICS_FILE)
        self.speeds = StepLog(Path(args.output_dir) / SPEED_FILE)
        self.logs = [self.metrics, self.speeds, *(c.log for c in callbacks if isinstance(c, BudgetValidationCallback))]
        self._interrupted = False
        self._stop = StopCallback(
            lambda: self._on_any_rank(self._interrupted or bool(stop_requested and stop_requested()))
        )
        self._draw = LoopDrawCallback()
        self._record = StepRecord(self, on_progress, unigram_loss=unigram_loss)
        self._losses: list[Tensor] = []
        if isinstance(model, LoopedForCausalLM):
            self.engine.apply(model)
        if getattr(kwargs.get("processing_class"), "pad_token_id", None) is None:
            kwargs.setdefault("data_collator", collate_windows)  # windows are of equal length: nothing is padded
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            # The record is written first, the stop is decided last: whatever others do on a step's end is in between.
            callbacks=[self._draw, self._record, *callbacks, self._stop],
            **kwargs,
        )
        self.label_smoother = None  # it would replace the objective, which smooths labels itself (compute_loss)
        self.remove_callback(PrinterCallback)
        if is_sharded(model):  # what is divided over ranks must not be wrapped for copies
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self._watches_loops = (
            self.engine.diagnostics and "output_loop_diagnostics" in inspect.signature(model.forward).parameters
        )

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
        self._losses.clear()
        self._record.begin()
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
        """Compute the objective, and keep its parts and what its loops did."""
        if model.training and self._watches_loops:
            inputs = {**inputs, "output_loop_diagnostics": True}
        if model.training and self.law is not None:
            plan = self._plan()
            inputs = {**inputs, "schedule": plan.long}
            if plan.short is not None:
                inputs["short_schedule"] = plan.short
        if model.training and self.num_grad_loops is not None:
            inputs = {**inputs, "num_grad_loops": self.num_grad_loops}
        if model.training and self.args.label_smoothing_factor:
            inputs = {**inputs, "smoothing": self.args.label_smoothing_factor}
        with warnings.catch_warnings() if is_sharded(model) else contextlib.nullcontext():
            if is_sharded(model):  # logits are a view, of which nobody here changes anything
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        if model.training:
            self._record.tally.add_outputs(outputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of one microbatch; after the last of a step, check that all is finite.

        Raises:
            NonFiniteError: The loss or the gradient is not finite.
        """
        if is_sharded(model):
            model.set_requires_gradient_sync(self.accelerator.sync_gradients)  # type: ignore[operator]
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._losses.append(loss)
        self._record.add_microbatch(loss, inputs["input_ids"].shape)
        if self.accelerator.sync_gradients:
            self._check_finite(model, self._record.read(model))
            self._losses.clear()
            self._record.learning_rates = {
                str(group.get("name", index)): float(group["lr"])
                for index, group in enumerate(self.optimizer.param_groups)
            }
        return loss

    def _check_finite(self, model: nn.Module, numbers: StepNumbers) -> None:
        """Raise NonFiniteError, or leave the update out, when a number is not finite. All ranks have the same numbers."""
        if math.isfinite(numbers.loss) and math.isfinite(numbers.gradient_norm):
            if numbers.loss == 0 and numbers.gradient_norm == 0 and self.args.process_index == 0:
                warnings.warn(
                    f"step {self.state.global_step + 1} had no target, and trained nothing: all its labels are {IGNORE}; look at "
                    "how they are masked, or at whether windows are cut off before their answers",
                    ObjectiveWarning,
                    stacklevel=2,
                )
            return
        if getattr(self.accelerator, "scaler", None) is not None:
            return  # float16: the scaler skips updates that overflow
        step = self.state.global_step
        if self.engine.skip_non_finite:
            self._record.skipped_steps += 1
            for p in model.parameters():
                p.grad = None  # optimisers leave such parameters, and what they know of them, alone
            return
        # A loss tells which rank it began on; a gradient has been reduced already, and is the same everywhere.
        own = float(torch.stack(self._losses).sum())
        losses = [own] if self.args.world_size == 1 else gather_object([own])
        ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        on = f" on rank {', '.join(map(str, ranks))}" if ranks and self.args.world_size > 1 else ""
        named = [(n, local_part(p.grad)) for n, p in model.named_parameters() if p.grad is not None]
        bad = [n for n, gradient in named if not bool(torch.isfinite(gradient).all())]
        where = (
            f"the first of {len(bad)} parameters with such a gradient is {bad[0]!r}"
            if bad
            else "no gradient is affected"
        )
        model.zero_grad()
        raise NonFiniteError(
            f"step {step + 1}: loss={numbers.loss:.6g}{on}, gradient norm={numbers.gradient_norm:.6g}; {where}. The update was "
            f"not made: the weights are those after step {step}. Lower the learning rate, or look at metrics.jsonl for where it "
            "began"
        )

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip by the norm that is known already: it is global, of reduced gradients, and needs no second pass."""
        numbers = self._record.numbers
        if numbers is None or getattr(self.accelerator, "scaler", None) is not None:
            return super()._clip_grad_norm(model)
        if numbers.gradient_norm > self.args.max_grad_norm:
            gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, self.args.max_grad_norm / (numbers.gradient_norm + 1e-6))
        return numbers.gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._record.numbers is not None:
            return self._record.numbers.gradient_norm
        return super()._get_grad_norm(model, grad_norm=grad_norm)

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

    def write_record(self, record: Mapping[str, Any], speed: Speed) -> None:
        """Append an update's record and time to the run's logs."""
        try:
            self._append(record, speed)
        except OSError as error:
            raise CheckpointError(
                f"the record of step {record['step']} could not be written to {self.args.output_dir!r} "
                f"({error.strerror or error}); {self._what_remains()}"
            ) from error

    def _append(self, record: Mapping[str, Any], speed: Speed) -> None:
        self.metrics.append(record)
        times = {"seconds": speed.seconds, "tokens_per_second": speed.tokens_per_second, "mfu": speed.mfu}
        self.speeds.append({"step": record["step"], **times})

    @property
    def stability(self) -> LiveVerdict | None:
        """The verdict on the run so far, on the main process; None before training, and where loops are not watched."""
        monitor = self._record.monitor
        return None if monitor is None else monitor.live

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
            CheckpointError: Nothing whole to continue from, records of the run are missing, or something could not be written.
            ConfigError: A fresh start in a folder that holds a run.
            NonFiniteError: Training diverged.
            KeyboardInterrupt: Ctrl-C or `stop_requested`, after a checkpoint was saved.
        """
        with owned(self.args.output_dir) if self.is_world_process_zero() else contextlib.nullcontext():
            return self._train(self._resolve(resume_from_checkpoint), **kwargs)

    def _train(self, checkpoint: Path | None, **kwargs: Any) -> Any:
        done = 0 if checkpoint is None else check_complete(checkpoint)
        if self.is_world_process_zero():
            shutil.rmtree(Path(self.args.output_dir) / ASIDE, ignore_errors=True)
            self._record.continue_from(self.metrics.truncate(done))
            self.speeds.truncate(done)
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

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if "batch_size" in kwargs and not self.args.auto_find_batch_size:
            # Some versions take the checkpoint's: another number of processes would then train on another global batch.
            kwargs["batch_size"] = self.args.train_batch_size
        return super()._inner_training_loop(*args, **kwargs)

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
