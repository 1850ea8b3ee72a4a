"""What a run takes on this machine: the time of a decoded token, and tokens scored a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopformers.errors import check_count
from loopformers.model.untrained import untrained_on_purpose
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["RunTime", "time_runs"]

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """Medians of wall time along one run."""

    decode_seconds: float
    """One token decoded with the cache behind a prompt, batch 1."""
    tokens_per_second: float
    """Tokens of whole windows in one forward without cache, in one batch."""


@torch.no_grad()
@untrained_on_purpose()
def time_runs(
    model: LoopedForCausalLM,
    runs: Sequence[Schedule],
    windows: Sequence[Any],
    *,
    repeats: int = 3,
    new_tokens: int = 8,
    clock: Clock = time.perf_counter,
    on_run: Callable[[], None] | None = None,
) -> list[RunTime]:
    """Time runs on one batch of windows.

    Each round times every run once, in turn, so that a slow moment of a shared machine hits all of them; one more round
    before those that count warms up.

    Args:
        model: The model, in evaluation mode.
        runs: Schedules.
        windows: Records with `input_ids` (seq,), all of one length. The prompt is the first half of the first.
        repeats: Rounds that count.
        new_tokens: Tokens decoded in a round; at most half a window.
        clock: Seconds that only go up.
        on_run: Called after each run of each round.

    Returns:
        One time a run, in order.

    Raises:
        ConfigError: Fewer than one round or token.
    """
    check_count("repeats", repeats)
    check_count("new_tokens", new_tokens)
    ids = torch.stack([torch.as_tensor(window["input_ids"]) for window in windows]).to(model.device)
    half = max(1, ids.shape[1] // 2)
    decoding: list[list[float]] = [[] for _ in runs]
    scoring: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, decoded, scored in zip(runs, decoding, scoring, strict=True):
            tokens = _decode(model, run, ids[:1, :half], min(new_tokens, half), clock)
            forward = _forward(model, run, ids, clock)
            if repeat:
                decoded += tokens
                scored.append(forward)
            if on_run is not None:
                on_run()
    return [
        RunTime(
            decode_seconds=statistics.median(decoded),
            tokens_per_second=ids.numel() / max(statistics.median(scored), 1e-9),
        )
        for decoded, scored in zip(decoding, scoring, strict=True)
    ]


def _decode(model: LoopedForCausalLM, run: Schedule, prompt: Tensor, num_tokens: int, clock: Clock) -> list[float]:
    """Return the seconds of each token decoded behind a prompt (1, seq)."""
    cache = model.new_cache()
    token = model(prompt, schedule=run, past_key_values=cache, logits_to_keep=1).logits.argmax(dim=-1)
    seconds = []
    for _ in range(num_tokens):
        started_at = _now(model, clock)
        token = model(token, schedule=run, past_key_values=cache).logits.argmax(dim=-1)
        seconds.append(_now(model, clock) - started_at)
    return seconds


def _forward(model: LoopedForCausalLM, run: Schedule, ids: Tensor, clock: Clock) -> float:
    started_at = _now(model, clock)
    model(ids, schedule=run, use_cache=False)
    return _now(model, clock) - started_at


def _now(model: LoopedForCausalLM, clock: Clock) -> float:
    """The time when the device has done what it was asked."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return clock()
