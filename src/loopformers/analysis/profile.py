"""What loops do, measured over a stream of text: geometry, similarity, logit lens and trajectories of one model's runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformers.analysis import geometry
from loopformers.analysis.lens import LensToken, depth_needed, read_tokens
from loopformers.analysis.similarity import StateMoments
from loopformers.errors import ConfigError, DataError, NonFiniteError, check_count
from loopformers.model.mode import evaluating
from loopformers.objectives.cross_entropy import IGNORE
from loopformers.schedule import Schedule

__all__ = ["LoopMeasures", "ModelProfile", "RunProfile", "profile_model"]

SAMPLED_TOKENS = 16
"""Tokens whose own way through the loops is kept: the last of each of the first windows."""

NEGLIGIBLE = 1e-7
"""Movement below this share of a state's norm is rounding: float32 has seven digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopMeasures:
    """What one loop leaves. Formulas stand with the functions of `geometry`, `similarity` and `lens`."""

    loop: int
    """t, counted from 1."""
    time: float
    """Share of the schedule that is done after it."""
    state_norm: float
    """Mean over tokens of the state's L2 norm."""
    relative_change: float | None
    """Mean over tokens of |h_t - h_{t-1}| / |h_t|; None for the first loop."""
    update_cosine: float | None
    """Mean over tokens of the cosine between this loop's update and the one before; None for the first two."""
    anisotropy: float
    """Mean over sequences."""
    curvature: float
    """Mean over sequences; radians."""
    prompt_entropy: float
    """Mean over sequences; nats."""
    relative_prompt_entropy: float
    """The same as a share of its maximum, min(ln S, ln d)."""
    loss: float
    """Cross entropy of the head on this loop's state; nats per token."""
    settled: float
    """Share of tokens whose prediction stands from this loop on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProfile:
    """One model along one schedule."""

    schedule: str
    """Step sizes as fractions."""
    num_loops: int
    loops: tuple[LoopMeasures, ...]
    cka: tuple[tuple[float, ...], ...]
    """Linear CKA of every two loops, (loops, loops)."""
    mean_depth_needed: float
    """Mean over targets; loops."""
    lens: tuple[LensToken, ...]
    """What every loop would answer at the last positions of one window."""
    mean_path: tuple[tuple[float, float], ...]
    """The mean token's way from loop to loop in the model's plane, (loops, 2); see `ModelProfile`."""
    token_paths: tuple[tuple[tuple[float, float], ...], ...]
    """The same of some single tokens, (tokens, loops, 2)."""

    @property
    def mean_cka(self) -> float | None:
        """Mean CKA of two different loops: near 1, loops hardly change anything. None for a single loop."""
        pairs = [self.cka[i][j] for i in range(self.num_loops) for j in range(i)]
        return sum(pairs) / len(pairs) if pairs else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """One model along several schedules, over the same text.

    Paths lie in the plane of the two directions in which loops move tokens most: the leading eigenvectors of
    `StateMoments.movement`, averaged over runs. A path shows `Bᵀ (h_t - h_1) / r`: B the plane, h_1 of the
    first run's loop 1, and r the mean norm of the first run's last state, so that models of other widths and norms compare.
    """

    runs: tuple[RunProfile, ...]
    plane_shares: tuple[float, float]
    """Share of all movement that lies along each of the two directions; nan where nothing moves."""
    num_windows: int
    num_tokens: int
    num_targets: int


def profile_model(
    model: Any,
    windows: Iterable[Mapping[str, Any]],
    schedules: Sequence[Schedule],
    *,
    batch_size: int = 8,
    lens_window: int = 0,
    lens_tokens: int = 6,
    max_bytes: int = 1 << 31,
    on_batch: Callable[[int], None] | None = None,
) -> ModelProfile:
    """Measure every loop of a model's runs.

    Memory is bounded whatever the amount of text: one batch's states and one loop's logits, the sums of `StateMoments` for
    one run at a time, and the states of a few tokens. The model is put in evaluation mode and back.

    Args:
        model: A `LoopedForCausalLM`.
        windows: Windows with `input_ids` (seq,) and, optionally, unshifted `labels`, -100 where not scored, and
            `position_ids`. Read once a schedule.
        schedules: Runs.
        batch_size: Windows a forward; neighbours of unequal length are never put together.
        lens_window: Window, counted from 0, whose predictions are kept loop by loop.
        lens_tokens: At so many positions, its last.
        max_bytes: What the sums of a run may take.
        on_batch: Called with the number of windows after each batch.

    Raises:
        ConfigError: No schedules, counts below 1, a run that the model cannot do, or more sums than `max_bytes`.
        DataError: No windows, or none with a target.
        NonFiniteError: A state is not finite.
    """
    if not schedules:
        raise ConfigError("schedules=[] asks for nothing; give at least one")
    check_count("batch_size", batch_size)
    check_count("lens_window", lens_window, at_least=0)
    check_count("lens_tokens", lens_tokens)
    shown = (lens_window, lens_tokens)
    with evaluating(model):
        sums = [_profile_run(model, windows, run, batch_size, shown, max_bytes, on_batch) for run in schedules]
    scale = max(sums[0].measures[-1].state_norm, torch.finfo(torch.float64).tiny)
    axes, shares = _plane(torch.stack([run.movement for run in sums]).mean(dim=0), sums[0].mean_states, scale)

    def path(states: Tensor, origin: Tensor) -> tuple[tuple[float, float], ...]:
        return tuple((float(x), float(y)) for x, y in ((states - origin) @ axes / scale).tolist())

    first = sums[0]
    return ModelProfile(
        runs=tuple(
            RunProfile(
                schedule=str(schedule),
                num_loops=schedule.num_loops,
                loops=tuple(run.measures),
                cka=tuple(tuple(row) for row in run.cka.tolist()),
                mean_depth_needed=run.mean_depth_needed,
                lens=tuple(run.lens),
                mean_path=path(run.mean_states, first.mean_states[0]),
                token_paths=tuple(
                    path(states, begin[0]) for states, begin in zip(run.samples, first.samples, strict=True)
                ),
            )
            for schedule, run in zip(schedules, sums, strict=True)
        ),
        plane_shares=shares,
        num_windows=first.num_windows,
        num_tokens=first.num_tokens,
        num_targets=first.num_targets,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunSums:
    """What a pass over the text leaves of one run."""

    measures: list[LoopMeasures]
    cka: Tensor
    movement: Tensor
    mean_states: Tensor
    """(loops, dim)."""
    samples: list[Tensor]
    """Of some tokens, (loops, dim) each."""
    lens: list[LensToken]
    mean_depth_needed: float
    num_windows: int
    num_tokens: int
    num_targets: int


@torch.no_grad()
def _profile_run(
    model: Any,
    windows: Iterable[Mapping[str, Any]],
    schedule: Schedule,
    batch_size: int,
    shown: tuple[int, int],
    max_bytes: int,
    on_batch: Callable[[int], None] | None,
) -> _RunSums:
    num_loops, dim = schedule.num_loops, model.config.hidden_size
    moments = StateMoments(num_loops, dim, max_bytes=max_bytes)
    by_token = torch.zeros(3, num_loops, dtype=torch.float64)  # norm, change, cosine
    by_sequence = torch.zeros(4, num_loops, dtype=torch.float64)
    losses = torch.zeros(num_loops, dtype=torch.float64)
    depths = torch.zeros(num_loops + 1, dtype=torch.int64)  # by depth needed
    samples: list[Tensor] = []
    lens: list[LensToken] = []
    num_windows = 0
    for batch in _batches(windows, batch_size):
        ids, positions = batch["input_ids"].to(model.device), batch.get("position_ids")
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE).to(model.device)
        states, logits_of = _run(model, ids, None if positions is None else positions.to(model.device), schedule)
        exact = [state.to("cpu", torch.float64) for state in states]
        moments.add(exact)
        for t, state in enumerate(exact):
            if not torch.isfinite(state).all():
                raise NonFiniteError(
                    f"the state after loop {t + 1} of schedule {schedule} is not finite; the model is broken or overflows "
                    f"{states[t].dtype} at this number of loops: run fewer, or in float32"
                )
            by_token[0, t] += geometry.state_norm(state).sum()
            if t > 0:
                by_token[1, t] += geometry.relative_change(exact[t - 1], state).sum()
            if t > 1:
                by_token[2, t] += geometry.update_cosine(exact[t - 2], exact[t - 1], state).sum()
            entropy = geometry.prompt_entropy(state)
            most = geometry.max_prompt_entropy(state.shape[1], dim)
            means = [geometry.anisotropy(state), geometry.curvature(state), entropy, entropy / most]
            by_sequence[:, t] += torch.stack([mean.sum() for mean in means])
        samples += [torch.stack([state[row, -1] for state in exact]) for row in range(len(ids))][
            : SAMPLED_TOKENS - len(samples)
        ]
        is_target = targets != IGNORE
        best = torch.empty(num_loops, int(is_target.sum()), dtype=torch.int64)
        row = shown[0] - num_windows
        places = is_target[row].nonzero()[-shown[1] :, 0] if 0 <= row < len(ids) else None
        seen: list[Tensor] = []
        for t, state in enumerate(states):
            logits = logits_of(state)
            losses[t] += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
            best[t] = logits.argmax(dim=-1)[is_target].cpu()
            if places is not None:
                seen.append(logits[row, places].cpu())
        depths += torch.bincount(depth_needed(best), minlength=num_loops + 1)
        if places is not None:
            lens = read_tokens(torch.stack(seen), ids[row, places], targets[row, places])
        num_windows += len(ids)
        if on_batch is not None:
            on_batch(len(ids))
    num_targets = int(depths.sum())
    if num_targets == 0:
        raise DataError(
            "the text holds no target to predict; give windows of at least two tokens, not all labelled -100"
        )
    by_token /= moments.num_tokens
    by_sequence /= num_windows
    losses /= num_targets
    settled = depths.cumsum(dim=0) / num_targets
    time = torch.tensor(schedule.step_sizes, dtype=torch.float64).cumsum(dim=0)
    measures = [
        LoopMeasures(
            loop=t + 1,
            time=float(time[t]),
            state_norm=float(by_token[0, t]),
            relative_change=float(by_token[1, t]) if t > 0 else None,
            update_cosine=float(by_token[2, t]) if t > 1 else None,
            anisotropy=float(by_sequence[0, t]),
            curvature=float(by_sequence[1, t]),
            prompt_entropy=float(by_sequence[2, t]),
            relative_prompt_entropy=float(by_sequence[3, t]),
            loss=float(losses[t]),
            settled=float(settled[t + 1]),
        )
        for t in range(num_loops)
    ]
    return _RunSums(
        measures=measures,
        cka=moments.cka(),
        movement=moments.movement(),
        mean_states=moments.means,
        samples=samples,
        lens=lens,
        mean_depth_needed=float((depths * torch.arange(num_loops + 1)).sum() / num_targets),
        num_windows=num_windows,
        num_tokens=moments.num_tokens,
        num_targets=num_targets,
    )


def _run(
    model: Any, ids: Tensor, positions: Tensor | None, schedule: Schedule
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """Return every loop's state, and what turns a state into logits as if its loop were the last."""
    core = model.model
    run = model.config.resolve_schedule(schedule=schedule)
    prepared = core.prepare(ids, None, positions, None, None, run)
    states: list[Tensor] = []
    core.run(prepared, run, observer=lambda loop_idx, residual, state: states.append(state))
    return states, lambda state: model.head(core.finish(state, prepared))


def _plane(movement: Tensor, mean_states: Tensor, scale: float) -> tuple[Tensor, tuple[float, float]]:
    """Return the two directions of most movement, (dim, 2), turned so that the mean path ends up right, and their shares."""
    values, vectors = torch.linalg.eigh(movement)
    axes = vectors[:, [-1, -2]]
    end = (mean_states[-1] - mean_states[0]) @ axes
    total = float(values.clamp(min=0).sum())
    moves = total > (NEGLIGIBLE * scale) ** 2
    first, second = (float(value) / total if moves else math.nan for value in values[[-1, -2]])
    return axes * torch.where(end < 0, -1.0, 1.0), (first, second)


def _batches(windows: Iterable[Mapping[str, Any]], batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield windows of one length stacked: `input_ids`, `labels` and, where given, `position_ids`, (batch, seq) each."""
    batch: list[dict[str, Tensor]] = []
    for window in windows:
        fields = {name: torch.as_tensor(window[name]) for name in ("input_ids", "position_ids") if name in window}
        fields["labels"] = torch.as_tensor(window.get("labels", window["input_ids"]))
        if batch and (len(batch) == batch_size or fields["input_ids"].shape != batch[0]["input_ids"].shape):
            yield _stack(batch)
            batch = []
        batch.append(fields)
    if batch:
        yield _stack(batch)


def _stack(batch: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([window[name] for window in batch]) for name in batch[0]}
