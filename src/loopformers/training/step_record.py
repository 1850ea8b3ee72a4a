"""The record of each update: collected while it runs, written when it is made, shown as it goes.

`metrics.jsonl` holds one object an update. A resumed run continues it, so nothing in it depends on the clock:

    step                         updates done
    loss, loss_parts             objective and its terms, nats per token; the loss of a skipped update is null
    gradient_norm                global L2 norm before clipping; null for a skipped update
    layer_gradient_norms         the same of each layer's parameters, by layer
    loop_gradient_norms          of the loss by each loop's output, the residual stream after its last layer
    residual_norms               by loop: mean over tokens of the residual stream's L2 norm before the closing norm
    residual_norms_per_sqrt_dim  the same divided by sqrt(d), for comparison between widths
    state_cosines                by loop from the second: mean cosine between its state and the one before
    oscillation                  over the last window: log_std, the standard deviation of ln gradient_norm;
                                 mean_relative_change from update to update; num_spikes of the run so far, norms above three
                                 times the median of the window before them
    verdict, verdict_reason, verdict_since
                                 stable, oscillating, exploding, collapsed, or null while it is too early, see
                                 `loopformers.analysis.monitor`; the update since which it has held
    learning_rates               by parameter group, of this update
    tokens_seen, flops           since the start of the run, over all ranks; forward and backward, every loop, both trajectories
    skipped_steps                updates left out so far because a number was not finite

Lists by loop have one entry for each loop that any microbatch ran; null stands for a number that is not finite.
`speed.jsonl` holds the times: `step`, `seconds`, `tokens_per_second`, `mfu`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from loopformers.analysis.monitor import StabilityMonitor, cross_entropy_of
from loopformers.training.progress import ProgressListener, TrainingProgress
from loopformers.training.speed import Speed, Speedometer, measured_peak
from loopformers.training.step_tally import StepNumbers, StepTally

if TYPE_CHECKING:
    from loopformers.training.trainer import LoopTrainer

__all__ = ["StepRecord"]

BY_LOOP = ("residual_norms", "residual_norms_per_sqrt_dim", "loop_gradient_norms", "state_cosines")
"""Fields with a number for each loop."""


class StepRecord(TrainerCallback):
    """Collects what one update did and writes it when the update is made.

    Args:
        trainer: The trainer whose updates these are.
        on_progress: Called after each update on the main process.
        unigram_loss: Cross entropy of token frequencies alone, nats per token; None: unknown.
    """

    def __init__(
        self, trainer: LoopTrainer, on_progress: ProgressListener | None, *, unigram_loss: float | None = None
    ) -> None:
        self.trainer, self.on_progress, self.unigram_loss = trainer, on_progress, unigram_loss
        self.tokens_seen: int = 0
        self.flops: float = 0.0
        self.skipped_steps: int = 0
        self.numbers: StepNumbers | None = None
        self.learning_rates: dict[str, float] = {}
        self.last: dict[str, Any] = {}
        self.speed: Speed | None = None
        self.monitor: StabilityMonitor | None = None
        self._tally: StepTally | None = None
        self._speedometer: Speedometer | None = None
        self._known: list[dict[str, Any]] = []
        self._before = (0, 0.0)

    # -- during an update --------------------------------------------------------------------------------------

    @property
    def tally(self) -> StepTally:
        """The update's sums."""
        if self._tally is None:
            trainer = self.trainer
            by_count = bool(trainer.model_accepts_loss_kwargs)
            self._tally = StepTally(
                world_size=trainer.args.world_size,
                reduce_sum=lambda vector: trainer.accelerator.reduce(vector, "sum"),
                microbatches_add_up=by_count,
                ranks_add_up=by_count and bool(trainer.args.average_tokens_across_devices),
            )
        return self._tally

    def begin(self) -> None:
        """Note that the data of an update are about to be fetched."""
        self.tally.clear()
        self._before = (self.tokens_seen, self.flops)
        if self._speedometer is not None:
            self._speedometer.begin()

    def add_microbatch(self, loss: Tensor, shape: torch.Size) -> None:
        """Count one microbatch of all ranks."""
        self.tally.add_loss(loss)
        ranks = self.trainer.args.world_size
        self.tokens_seen += shape.numel() * ranks
        self.flops += self.trainer._flops(shape) * ranks

    def read(self, model: nn.Module) -> StepNumbers:
        """Read the update's numbers, after its last backward pass."""
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        self.numbers = self.tally.read(model, gradient_scale=scale)
        return self.numbers

    # -- around a run ------------------------------------------------------------------------------------------

    def continue_from(self, records: list[dict[str, Any]]) -> None:
        """Take over the totals of the last record."""
        self._known = records
        last = records[-1] if records else {}
        self.tokens_seen, self.flops = int(last.get("tokens_seen", 0)), float(last.get("flops", 0.0))
        self.skipped_steps = int(last.get("skipped_steps", 0))
        self.last = last

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the machine, and judge the updates that are already made."""
        precision = "bfloat16" if args.bf16 else "float32"
        peak = measured_peak(args.device.type, precision, torch.get_num_threads()) * args.world_size
        self._speedometer = Speedometer(peak_flops=peak, num_steps=state.max_steps)
        if self.trainer.engine.diagnostics:
            self.monitor = StabilityMonitor(num_steps=state.max_steps, unigram_cross_entropy=self.unigram_loss)
            self.monitor.replay(self._known)
        self._known = []

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the record of the update."""
        numbers = self.numbers
        assert numbers is not None, "training_step has read them"
        assert self._speedometer is not None, "on_train_begin has made it"
        tokens, flops = self._before
        self.speed = self._speedometer.end(
            step=state.global_step, tokens=self.tokens_seen - tokens, flops=self.flops - flops
        )
        if not state.is_world_process_zero:
            return
        self.last = self._record(state.global_step, numbers)
        self.trainer.write_record(self.last, self.speed)
        if self.on_progress is not None:
            live = None if self.monitor is None else self.monitor.live
            self.on_progress(
                TrainingProgress(
                    step=state.global_step,
                    num_steps=state.max_steps,
                    loss=numbers.loss,
                    gradient_norm=numbers.gradient_norm,
                    tokens_per_second=self.speed.tokens_per_second,
                    mfu=self.speed.mfu,
                    seconds_left=self.speed.seconds_left,
                    verdict=None if live is None else live.verdict,
                    verdict_reason="" if live is None else live.reason,
                )
            )

    def _record(self, step: int, numbers: StepNumbers) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": step,
            "loss": _finite(numbers.loss),
            "loss_parts": {name: _finite(value) for name, value in numbers.loss_parts.items()},
            "gradient_norm": _finite(numbers.gradient_norm),
            "layer_gradient_norms": {name: _finite(value) for name, value in numbers.layer_gradient_norms.items()},
            "learning_rates": self.learning_rates,
            "tokens_seen": self.tokens_seen,
            "flops": self.flops,
            "skipped_steps": self.skipped_steps,
        }
        root = math.sqrt(self.trainer.accelerator.unwrap_model(self.trainer.model).config.hidden_size)
        by_loop = {
            "residual_norms": numbers.residual_norms,
            "residual_norms_per_sqrt_dim": [norm / root for norm in numbers.residual_norms],
            "loop_gradient_norms": numbers.loop_gradient_norms,
            "state_cosines": numbers.state_cosines,
        }
        record |= {name: [_finite(value) for value in values] for name, values in by_loop.items()}
        monitor = self.monitor
        if monitor is not None:
            if record["gradient_norm"] is not None:
                monitor.add(
                    step=step,
                    loss=cross_entropy_of(record),
                    gradient_norm=numbers.gradient_norm,
                    residual_norms=record["residual_norms"],
                )
            swing, live = monitor.oscillation(), monitor.live
            record["oscillation"] = {
                "log_std": swing.log_std,
                "mean_relative_change": swing.mean_relative_change,
                "num_spikes": swing.num_spikes,
            }
            record |= {"verdict": live.verdict, "verdict_reason": live.reason, "verdict_since": live.since_step}
        return record

    # -- for reporters -----------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return the last record and its speed as named numbers."""
        if not self.last:
            return {}
        found = {name: self.last[name] for name in ("loss", "gradient_norm", "tokens_seen", "flops", "skipped_steps")}
        for group in ("loss_parts", "learning_rates", "layer_gradient_norms", "oscillation"):
            found |= {f"{group}/{name}": value for name, value in self.last.get(group, {}).items()}
        for group in BY_LOOP:
            values = self.last.get(group, [])
            first = 2 if group == "state_cosines" else 1
            found |= {f"{group}/loop_{loop}": value for loop, value in enumerate(values, start=first)}
        if self.speed is not None:
            found |= {"speed/tokens_per_second": self.speed.tokens_per_second, "speed/mfu": self.speed.mfu}
        return {name: value for name, value in found.items() if value is not None}


def _finite(value: float) -> float | None:
    """JSON has no infinity; a residual stream may explode while the normed state and the loss stay finite."""
    return value if math.isfinite(value) else None
