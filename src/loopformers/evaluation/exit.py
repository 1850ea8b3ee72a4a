"""What an exit rule costs and saves on held-out text, and the threshold that meets an average budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopformers.errors import ConfigError, DataError, check_count, unknown_name
from loopformers.evaluation.scoring import OnBatch, Tally, score_runs, window_batches
from loopformers.generation.adaptive import adaptive_forward
from loopformers.generation.look import Look
from loopformers.generation.rules import EXIT_RULES, ExitRule, ThresholdExit
from loopformers.generation.untrained import note_measurement
from loopformers.model.mode import evaluating

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.schedule import Schedule

__all__ = ["ExitMeasurement", "calibrate", "measure_exit"]

TOLERANCE = 0.01
"""How far the measured average may be from the one asked for, as a share of it, before `calibrate` looks further."""

MAX_CORRECTIONS = 5
"""How often `calibrate` measures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitMeasurement:
    """What a rule does on some text."""

    rule: str
    """The rule, as `parse_exit_rule` reads it."""
    average_loops: float
    """Mean number of loops that a token got."""
    num_loops: int
    """The most that one may get."""
    loss: float
    """Cross entropy in nats per target, of tokens that leave by the rule."""
    full_loss: float
    """The same where every token gets all loops."""
    num_targets: int
    """Tokens predicted."""

    def __str__(self) -> str:
        return (
            f"measured on {self.num_targets} held-out tokens, loss {self.loss:.4f} at {self.average_loops:.2f} loops on average, "
            f"against {self.full_loss:.4f} at all {self.num_loops}"
        )


def measure_exit(
    model: LoopedForCausalLM,
    rule: ExitRule,
    windows: Iterable[dict[str, Any]],
    *,
    num_loops: int | None = None,
    schedule: Any = None,
    batch_size: int = 8,
    on_batch: OnBatch | None = None,
) -> ExitMeasurement:
    """Score windows under an exit rule and at full depth. The warning of untrained models quotes the last measurement.

    Args:
        model: The model; it is put in evaluation mode and back.
        rule: The rule.
        windows: Held-out text: `input_ids` (seq,) and, optionally, unshifted `labels` (seq,), -100 where not scored.
        num_loops: The most loops that a token may get; default: the trained T.
        schedule: Run that tokens leave, in place of `num_loops`.
        batch_size: Windows at a time.
        on_batch: Called after each batch with the number of its windows.

    Raises:
        ConfigError: No legal schedule, or a batch size below 1.
        DataError: No target.
    """
    check_count("batch_size", batch_size)
    run = model.config.resolve_schedule(num_loops, schedule)
    windows = list(windows)
    tally, num_loops_run, num_tokens = Tally(), 0, 0
    with evaluating(model):
        for batch in window_batches(windows, batch_size):
            output = adaptive_forward(model, rule, schedule=run, input_ids=batch.input_ids.to(model.device))
            assert output.logits is not None, "every position was kept"
            assert output.exit_loops is not None, "a rule was at work"
            tally.add(output.logits, batch, lambda logits: logits)
            num_loops_run += int(output.exit_loops.sum())
            num_tokens += batch.input_ids.numel()
            if on_batch is not None:
                on_batch(len(batch.input_ids))
    loss = tally.loss  # raises where there was no target
    measured = ExitMeasurement(
        rule=str(rule),
        average_loops=num_loops_run / num_tokens,
        num_loops=run.num_loops,
        loss=loss,
        full_loss=score_runs(model, windows, [run], batch_size=batch_size)[0].loss,
        num_targets=tally.num_targets,
    )
    note_measurement(model, rule, str(measured))
    return measured


def calibrate(
    model: LoopedForCausalLM,
    rule: str,
    windows: Iterable[dict[str, Any]],
    *,
    average_loops: float,
    num_loops: int | None = None,
    schedule: Any = None,
    batch_size: int = 8,
) -> ExitRule:
    """Find the threshold at which tokens of held-out text get so many loops on average.

    A token's depth is one more than the loops after which its lowest score so far is above the threshold, so over all
    tokens the mean depth is 1 + (scores of that kind above the threshold) / tokens: the threshold is an order statistic
    of the scores of one run at full depth. Tokens that leave change what later ones see, so the average is then measured,
    and the target moved by what it missed, until it is met within 1 %, at most five times.

    The average holds for text like this text. Deciding by a threshold that meets a budget on held-out data is the
    budgeted batch classification of multi-scale dense networks (Huang et al. 2018).

    Args:
        model: The model; it is put in evaluation mode and back.
        rule: Name of a rule with a threshold: kl, entropy or state.
        windows: Held-out text, as `measure_exit` takes it.
        average_loops: Loops that a token is to get on average, from 2 (a rule compares two) to the most it may get.
        num_loops: The most loops that a token may get; default: the trained T.
        schedule: Run that tokens leave, in place of `num_loops`.
        batch_size: Windows at a time.

    Returns:
        The rule with its threshold.

    Raises:
        ConfigError: A rule without a threshold, or an average that no threshold can give.
        DataError: No text.
    """
    with_threshold = [name for name, kind in EXIT_RULES.items() if issubclass(kind, ThresholdExit)]
    if rule not in with_threshold:
        raise ConfigError(unknown_name("rule to calibrate", rule, with_threshold))
    check_count("batch_size", batch_size)
    run = model.config.resolve_schedule(num_loops, schedule)
    if not 2 <= average_loops <= run.num_loops:
        raise ConfigError(
            f"average_loops={average_loops} must lie between 2, as a rule compares two loops, and the {run.num_loops} that a "
            "token may get; for one loop run num_loops=1"
        )
    windows = list(windows)
    recorder = _Recorder(EXIT_RULES[rule](0.0), run.num_loops)
    _average_loops(model, recorder, windows, run, batch_size)
    lowest = recorder.lowest_scores()
    num_tokens = lowest.shape[1]
    ranked = lowest.flatten().sort(descending=True).values
    best: tuple[float, ExitRule] | None = None
    target = average_loops
    for _ in range(MAX_CORRECTIONS):
        rank = min(max(round((target - 1) * num_tokens), 0), len(ranked) - 1)
        candidate: ExitRule = EXIT_RULES[rule](ranked[rank].item())
        missed = average_loops - _average_loops(model, candidate, windows, run, batch_size)
        if best is None or abs(missed) < best[0]:
            best = abs(missed), candidate
        if abs(missed) <= TOLERANCE * average_loops:
            break
        target += missed
    assert best is not None, "at least one was measured"
    return best[1]


class _Recorder(ExitRule):
    """Lets no token leave, and keeps the scores of a rule."""

    def __init__(self, rule: ExitRule, num_loops: int) -> None:
        self.rule, self.num_loops = rule, num_loops
        self.threshold = -math.inf
        self.scores: list[Tensor] = []

    def score(self, look: Look, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the rule's score."""
        score, memory = self.rule.score(look, memory)
        self.scores.append(score.float().cpu())
        return score, memory

    def lowest_scores(self) -> Tensor:
        """Return each token's lowest score up to each loop but the last, (loops - 1, tokens)."""
        per_run = self.num_loops - 1
        runs = [torch.stack(self.scores[i : i + per_run]) for i in range(0, len(self.scores), per_run)]
        return torch.cat(runs, dim=1).cummin(dim=0).values


def _average_loops(
    model: LoopedForCausalLM, rule: ExitRule, windows: Sequence[dict[str, Any]], run: Schedule, batch_size: int
) -> float:
    total, num_tokens = 0, 0
    with evaluating(model):
        for batch in window_batches(windows, batch_size):
            ids = batch.input_ids
            output = adaptive_forward(model, rule, schedule=run, input_ids=ids.to(model.device), logits_to_keep=1)
            assert output.exit_loops is not None, "a rule was at work"
            total += int(output.exit_loops.sum())
            num_tokens += ids.numel()
    if num_tokens == 0:
        raise DataError("no windows to calibrate on; give held-out text")
    return total / num_tokens
