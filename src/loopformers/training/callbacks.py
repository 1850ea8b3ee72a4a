"""Callbacks of training. They work with `transformers.Trainer` too, except where a docstring says otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from loopformers.errors import ConfigError
from loopformers.evaluation.budget import Budget, BudgetResult, evaluate_budgets, sweep_budgets
from loopformers.training.sharding import is_sharded
from loopformers.training.step_log import StepLog

__all__ = ["BudgetValidationCallback", "LoopDrawCallback", "StopCallback"]


class LoopDrawCallback(TrainerCallback):
    """Tells the model which microbatch it is about to see, so that the trajectory drawn for it depends on nothing else.

    The draw is then a pure function of (seed, step, microbatch): the same on every rank and after every resume.
    `model.set_draw(step, microbatch)` is called before each microbatch; models without it are left alone.
    """

    def __init__(self) -> None:
        self.microbatch = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Name the first microbatch of a step."""
        self._name(state.global_step, 0, kwargs["model"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Name the next microbatch of the same step."""
        self._name(state.global_step, self.microbatch + 1, kwargs["model"])

    def _name(self, step: int, microbatch: int, model: Any) -> None:
        self.microbatch = microbatch
        model = getattr(model, "module", model)  # unwrap DistributedDataParallel
        if hasattr(model, "set_draw"):
            model.set_draw(step, microbatch)


class StopCallback(TrainerCallback):
    """Saves a checkpoint and ends training after the update during which a stop was asked for.

    Args:
        stop_requested: Asked after each update, on each rank.
    """

    def __init__(self, stop_requested: Callable[[], bool]) -> None:
        self.stop_requested = stop_requested
        self.stopped = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask, and stop."""
        if self.stop_requested():
            self.stopped = control.should_save = control.should_training_stop = True


class BudgetValidationCallback(TrainerCallback):
    """Scores the model at several budgets every so many updates, and after the last.

    Records go to a step log: `{"step": .., "budgets": [one `BudgetResult` as a dict each]}`. Weights, gradients and
    random states are left as they were.

    Args:
        dataset: Validation windows.
        budgets: Loop counts or schedules.
        every_steps: Updates between evaluations.
        log: Where records go.
        batch_size: Windows a forward.
        bytes_per_token: For bits per byte.
        refine: Applied to the scores before they are kept.
    """

    def __init__(
        self,
        dataset: Iterable[dict[str, Any]],
        budgets: Sequence[Budget],
        *,
        every_steps: int,
        log: StepLog,
        batch_size: int = 8,
        bytes_per_token: float | None = None,
        refine: Callable[[Sequence[BudgetResult]], Sequence[BudgetResult]] | None = None,
    ) -> None:
        if every_steps < 1:
            raise ConfigError(f"every_steps={every_steps} must be at least 1")
        self.dataset, self.budgets, self.every_steps, self.log = dataset, budgets, every_steps, log
        self.batch_size, self.bytes_per_token = batch_size, bytes_per_token
        self.refine = refine
        self.last: Sequence[BudgetResult] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget records of updates that a resumed run will repeat."""
        if state.is_world_process_zero:
            self.log.truncate(state.global_step)

    def score(self, model: Any) -> Sequence[BudgetResult]:
        """Return a model's scores, one a budget, by the fastest way that it allows."""
        # The parts of a divided model gather their weights in the model's own forward alone.
        evaluate = evaluate_budgets if is_sharded(model) else sweep_budgets
        scores = evaluate(
            model, self.dataset, self.budgets, batch_size=self.batch_size, bytes_per_token=self.bytes_per_token
        )
        return scores if self.refine is None else self.refine(scores)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate when it is time."""
        if state.global_step % self.every_steps and state.global_step < state.max_steps:
            return
        self.last = self.score(kwargs["model"])
        if state.is_world_process_zero:
            self.log.append(
                {"step": state.global_step, "budgets": [dataclasses.asdict(r) for r in self.last]}, to_disk=True
            )
