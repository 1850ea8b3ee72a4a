"""What a recipe will cost, before it runs: parameters, operations, memory by loops and checkpoint mode, and time."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from loopformers.errors import ConfigError
from loopformers.laws import LoopPlan
from loopformers.limits import MAX_LOOPS
from loopformers.schedule import Schedule
from loopformers.training.calibration import Calibration, device_of
from loopformers.training.launcher import world_size
from loopformers.training.memory import (
    ActivationMode,
    MemoryPlan,
    Microbatch,
    matrix_parameters,
    plan_memory,
    saved_activation_bytes,
    saved_logit_bytes,
    trained_predictions,
    trajectories_of,
)
from loopformers.training.optimizers import MuonAdamW
from loopformers.training.recipe import BUNDLED, build_law

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig
    from loopformers.training.optimizers import OptimizerSettings
    from loopformers.training.recipe import Recipe

__all__ = [
    "CacheRow",
    "FlopsPlan",
    "ModeRow",
    "Plan",
    "TextCount",
    "TimePlan",
    "count_text",
    "executed_flops",
    "make_plan",
    "plan_config",
    "update_flops",
]

DRAWS = 256
"""Draws of a law that its mean and its deepest run are taken over, spread evenly over the run's steps."""

CACHE_BYTES = 2
"""Bytes of a number in the cache that is reported: bfloat16."""

CHUNK_TOKENS = 1024
"""Chunk that the table compares with where the recipe's loss is whole."""

Calibrate = Callable[["LoopConfig", Microbatch, "OptimizerSettings", Callable[[Microbatch], float]], Calibration]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsPlan:
    """Operations of one step, over all processes and microbatches, a mean over the law's draws."""

    model: float
    """Forward and backward of the objective, every loop and both trajectories: what metrics.jsonl counts, and MFU."""
    recomputed_loops: float
    """Loops run again under activation checkpointing."""
    recomputed_logits: float
    """The head run again for a chunked loss."""
    attention: float
    """Scores that attention kernels make again in the backward pass."""
    truncated: float
    """Backward passes that truncated back-propagation leaves out, negative."""
    update: float
    """Muon's Newton-Schulz steps, on every process."""
    executed: float
    """All of the above."""
    model_per_token: float
    """`model` by token."""
    run: float
    """`executed` times steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRow:
    """One line of the table of loops and checkpoint modes, bytes on one process."""

    num_loops: int
    """T."""
    mode: str
    """Which activations are kept."""
    saved_activations: int
    """Of all trajectories."""
    whole_logits: int
    """Saved by a whole loss."""
    chunked_logits: int
    """What one chunk makes while its own backward pass runs."""
    peak: int
    """Of a step, with the recipe's own loss."""
    relative_time: float
    """Operations of forward and backward pass against the recipe's own."""
    is_recipe: bool
    """Whether it is the recipe's own choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRow:
    """Keys and values of one sequence of the recipe's length, bfloat16."""

    num_loops: int
    """T."""
    bytes_per_token: int
    """One token."""
    bytes_per_sequence: int
    """All."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCount:
    """How much text there is."""

    tokens: int | None
    """Of the training split; None: not counted."""
    reason: str
    """Why it was not counted, or where it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePlan:
    """Expected time. Evaluation, checkpoints, loading and the exchange between processes are not in it."""

    calibration: Calibration
    """What it rests on."""
    step_seconds: float
    """One update."""
    run_seconds: float
    """All."""
    tokens_per_second: float
    """Over all processes."""
    mfu: float
    """Model operations by second against the peak of all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a recipe will cost."""

    preset: str
    """System."""
    num_loops: int
    """Trained T."""
    deepest: tuple[int, ...]
    """Loops of the trajectories of the deepest draw of the law; memory is planned for it."""
    parameters: Mapping[str, int]
    """By part, and `total`."""
    num_processes: int
    """Processes."""
    microbatch: Microbatch
    """What goes through the model at a time on each."""
    microbatches: int
    """Microbatches of a step on each process."""
    steps: int
    """Updates."""
    tokens_per_step: int
    """Over all processes."""
    tokens: int
    """Of the run."""
    text: TextCount
    """Of the training split."""
    epochs: float | None
    """Tokens of the run against tokens of the text."""
    flops: FlopsPlan
    """Operations."""
    memory: MemoryPlan
    """Of one process."""
    modes: tuple[ModeRow, ...]
    """Loops x checkpoint modes."""
    chunk_tokens: int
    """Chunk of the column `chunked_logits`."""
    cache: tuple[CacheRow, ...]
    """By T."""
    time: TimePlan | None
    """Expected time; None: no calibration was asked for."""


# -- the plan --------------------------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe,
    *,
    num_processes: int | None = None,
    config: LoopConfig | None = None,
    text: TextCount | None = None,
    calibration: Calibration | Calibrate | None = None,
    device_type: str | None = None,
) -> Plan:
    """Return what a recipe will cost.

    Args:
        recipe: The recipe.
        num_processes: Processes, one device each; default: those of the launcher (WORLD_SIZE), else one.
        config: The model's configuration; default: `plan_config(recipe)`.
        text: What `count_text` returned; default: not counted.
        calibration: Speed, or a function that measures it; None: no times.
        device_type: cpu or cuda; default: what this machine would train on.

    Raises:
        ConfigError: A rule of the recipe is broken.
    """
    config = plan_config(recipe) if config is None else config
    training = recipe.training
    processes = world_size() if num_processes is None else num_processes
    batch = Microbatch(
        windows=_windows(recipe, processes),
        seq_len=recipe.seq_len,
        precision=training.precision,
        mode=ActivationMode(checkpointing=training.activation_checkpointing, kept_loops=training.kept_loops),
        loss_chunk_tokens=training.loss_chunk_tokens,
        num_grad_loops=training.num_grad_loops,
        device_type=device_type or device_of().type,
    )
    draws = _draws(recipe, config)
    deepest = max((trajectories_of(config, plan, training.num_grad_loops) for plan in draws), key=lambda t: (sum(t), t))
    tokens_per_step = training.batch_size * recipe.seq_len
    tokens = tokens_per_step * training.steps
    text = text or TextCount(tokens=None, reason="not counted")
    flops = _flops_plan(recipe, config, batch, draws, processes)
    accumulates = training.gradient_accumulation > 1
    if callable(calibration):
        calibration = calibration(config, batch, recipe.optimizer, lambda b: executed_flops(config, b, _timed(config)))
    return Plan(
        preset=recipe.model.preset,
        num_loops=config.num_loops,
        deepest=deepest,
        parameters={**config.parameter_groups(), "total": config.num_parameters()},
        num_processes=processes,
        microbatch=batch,
        microbatches=training.gradient_accumulation,
        steps=training.steps,
        tokens_per_step=tokens_per_step,
        tokens=tokens,
        text=text,
        epochs=None if text.tokens is None else tokens / text.tokens,
        flops=flops,
        memory=plan_memory(config, batch, deepest, recipe.optimizer, accumulates=accumulates, num_processes=processes),
        modes=_mode_rows(recipe, config, batch, deepest, processes),
        chunk_tokens=_chunk(batch),
        cache=tuple(
            CacheRow(num_loops=loops, bytes_per_token=each, bytes_per_sequence=each * recipe.seq_len)
            for loops in _loop_counts(config, deepest)
            for each in [config.kv_bytes_per_token(loops, bytes_per_element=CACHE_BYTES)]
        ),
        time=None
        if calibration is None
        else _time_plan(calibration, flops, processes, training.steps, tokens_per_step),
    )


def plan_config(recipe: Recipe) -> LoopConfig:
    """Return the model's configuration. The tokenizer is asked only where the recipe gives no vocabulary.

    Raises:
        ConfigError: An illegal field.
        DataError: The vocabulary follows from a tokenizer that cannot be loaded.
    """
    from loopformers.model.quiet import quiet_transformers
    from loopformers.training.run import model_config
    from loopformers.training.run_text import recipe_tokenizer

    if recipe.data.tokenizer != BUNDLED and "vocab_size" in recipe.model.overrides:
        return model_config(recipe)
    with quiet_transformers():
        return model_config(recipe, recipe_tokenizer(recipe))


def count_text(recipe: Recipe) -> TextCount:
    """Count the tokens of the training split, where text and tokenizer are on this disk.

    Raises:
        DataError: A source that is a path does not exist or holds no text.
    """
    if recipe.task is not None:
        return TextCount(tokens=None, reason="a task makes new rows for every update")
    data = recipe.data
    for source in (*data.sources, data.tokenizer):
        if not _is_local(source):
            return TextCount(tokens=None, reason=f"{source!r} is a name, and is read only when the run starts")
    from loopformers.model.quiet import quiet_transformers
    from loopformers.training.run_text import load_tokenizer, read_windows

    with quiet_transformers():
        train, _ = read_windows(data, load_tokenizer(data))
    return TextCount(tokens=train.num_tokens, reason="counted")


def _is_local(source: str) -> bool:
    path = Path(source)
    looks_like_path = source.startswith(("/", "./", "../", "~")) or "." in path.suffix
    return source.partition("/")[0] == BUNDLED or path.exists() or looks_like_path


def _windows(recipe: Recipe, num_processes: int) -> int:
    training = recipe.training
    if num_processes < 1:
        raise ConfigError(f"num_processes={num_processes} must be at least 1: a run is at least one process")
    parts = num_processes * training.gradient_accumulation
    if training.batch_size % parts:
        raise ConfigError(
            f"training.batch_size={training.batch_size} does not divide into {num_processes} process(es) x "
            f"gradient_accumulation={training.gradient_accumulation} microbatches; the nearest that does is "
            f"{max(1, round(training.batch_size / parts)) * parts}"
        )
    return training.batch_size // parts


def _draws(recipe: Recipe, config: LoopConfig) -> Counter[LoopPlan]:
    """Return the plans of draws spread over the run, by how often each stands; schedules of as many loops cost the same."""
    law = build_law(recipe, config)
    training, found = recipe.training, Counter[LoopPlan]()
    count = min(DRAWS, training.steps * training.gradient_accumulation)
    for i in range(count):
        step, microbatch = i * training.steps // count, i % training.gradient_accumulation
        plan = law.plan(seed=config.loop_seed, step=step, microbatch=microbatch)
        short = None if plan.short is None else Schedule.uniform(plan.short.num_loops)
        found[LoopPlan(plan.long, short)] += 1
    return found


# -- operations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Executed:
    """Operations of one microbatch by origin, see FlopsPlan."""

    model: float
    recomputed_loops: float
    recomputed_logits: float
    attention: float
    truncated: float

    @property
    def total(self) -> float:
        return self.model + self.recomputed_loops + self.recomputed_logits + self.attention + self.truncated


def executed_flops(config: LoopConfig, batch: Microbatch, plan: LoopPlan) -> float:
    """Return the operations that forward and backward pass of a microbatch really make: `_executed`'s sum."""
    return _executed(config, batch, plan).total


def _executed(config: LoopConfig, batch: Microbatch, plan: LoopPlan) -> _Executed:
    """Operations of one microbatch, matrix products and attention, a multiplication and an addition as two.

    - model: `LoopConfig.training_flops`, three forward passes of what has gradients;
    - recomputed loops: one forward pass of each loop that is run again;
    - recomputed logits: one forward pass of the head for each scored loop, 2 n d V, of a chunked loss;
    - attention: kernels keep no scores and make them again in the backward pass: five products there, not four, so half
      of a forward pass of attention, 2 q seq n, for each layer with gradients;
    - truncated: minus two forward passes of each loop before the last `num_grad_loops`; trajectories then share no loop, so
      three of each that they would share are added.
    """
    n, length = batch.tokens, batch.seq_len
    trajectories = trajectories_of(config, plan, batch.num_grad_loops)
    sizes = {"batch_size": batch.windows, "seq_len": length}
    model = config.training_flops(**sizes, num_loops=plan.long.num_loops, short=plan.short)
    once = (
        config.num_hidden_layers
        * n
        * (2 * matrix_parameters(config) // _num_layers(config) + 4 * _query_width(config) * length)
    )
    recomputed = sum(batch.recomputed_loops(loops) for loops in trajectories)
    with_gradient = sum(batch.gradient_loops(loops) for loops in trajectories)
    predictions = sum(trained_predictions(config, loops) for loops in trajectories)
    unshared = config.shared_by(plan) - config.shared_by(plan, batch.num_grad_loops)
    layers = with_gradient * config.num_hidden_layers + config.num_prelude_layers + config.num_coda_layers * predictions
    head = 2 * n * config.hidden_size * config.vocab_size
    return _Executed(
        model=model,
        recomputed_loops=float(recomputed * once),
        recomputed_logits=float(predictions * head) if batch.loss_chunk_tokens is not None else 0.0,
        attention=2.0 * _query_width(config) * length * n * layers,
        truncated=(3.0 * unshared - 2.0 * (sum(trajectories) - with_gradient)) * once,
    )


def update_flops(config: LoopConfig, optimizer: OptimizerSettings) -> float:
    """Return the operations of Muon's five Newton-Schulz steps on every layer matrix; 0 for AdamW, which has no product.

    Each step on a matrix of r x s, r <= s, is three products: X X^T, 2 r^2 s; its square, 2 r^3; and that by X, 2 r^2 s.
    """
    if not isinstance(optimizer, MuonAdamW):
        return 0.0
    d, m, q = config.hidden_size, cast(int, config.intermediate_size), _query_width(config)
    k = cast(int, config.num_key_value_heads) * cast(int, config.head_dim)
    shapes = [(d, q), (q, d)] + [(d, m)] * (3 if config.hidden_act == "swiglu" else 2)
    rank = config.kv_lora_rank
    shapes += [(d, k)] * 2 if rank is None else [(d, rank), (rank, k), (rank, k)]
    each = sum(4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3 for shape in shapes)
    return 5.0 * each * _num_layers(config)


def _num_layers(config: LoopConfig) -> int:
    return config.num_prelude_layers + config.num_hidden_layers + config.num_coda_layers


def _query_width(config: LoopConfig) -> int:
    return cast(int, config.num_attention_heads) * cast(int, config.head_dim)


def _flops_plan(
    recipe: Recipe, config: LoopConfig, batch: Microbatch, draws: Counter[LoopPlan], num_processes: int
) -> FlopsPlan:
    scale = num_processes * recipe.training.gradient_accumulation / draws.total()
    parts = {
        field.name: scale * sum(getattr(_executed(config, batch, plan), field.name) * n for plan, n in draws.items())
        for field in dataclasses.fields(_Executed)
    }
    update = num_processes * update_flops(config, recipe.optimizer)
    executed = sum(parts.values()) + update
    tokens = recipe.training.batch_size * recipe.seq_len
    return FlopsPlan(
        **parts,
        update=update,
        executed=executed,
        model_per_token=parts["model"] / tokens,
        run=executed * recipe.training.steps,
    )


# -- loops x modes ---------------------------------------------------------------------------------------------


def _loop_counts(config: LoopConfig, deepest: tuple[int, ...]) -> list[int]:
    """T and the deepest draw, with a quarter, half and twice T."""
    trained = config.num_loops
    least = 2 if config.objective == "shortcut_consistency" else 1
    counts = {1, math.ceil(trained / 4), math.ceil(trained / 2), trained, 2 * trained, deepest[0]}
    return sorted(loops for loops in counts if least <= loops <= MAX_LOOPS)


def _timed(config: LoopConfig) -> LoopPlan:
    """What is timed, and compared in the table: T loops, and of short trajectories the longest."""
    return _plan_of(config, config.num_loops)


def _plan_of(config: LoopConfig, num_loops: int) -> LoopPlan:
    has_short = config.objective == "shortcut_consistency" and num_loops > 1
    return LoopPlan(Schedule.uniform(num_loops), Schedule.uniform(num_loops - 1) if has_short else None)


def _chunk(batch: Microbatch) -> int:
    return min(batch.tokens, batch.loss_chunk_tokens or CHUNK_TOKENS)


def _mode_rows(
    recipe: Recipe, config: LoopConfig, batch: Microbatch, deepest: tuple[int, ...], num_processes: int
) -> tuple[ModeRow, ...]:
    kept = recipe.training.kept_loops or max(1, config.num_loops // 4)
    modes = [ActivationMode(), ActivationMode(checkpointing=True), ActivationMode(checkpointing=True, kept_loops=kept)]
    own = batch.mode if batch.mode.checkpointing else ActivationMode()
    accumulates = recipe.training.gradient_accumulation > 1
    base = executed_flops(config, dataclasses.replace(batch, mode=own), _plan_of(config, deepest[0]))
    each = 1 if config.final_logit_softcapping is None else 2
    rows = []
    for loops in _loop_counts(config, deepest):
        sized = copy.copy(config)
        sized.num_loops = loops
        plan = _plan_of(sized, loops)
        trajectories = trajectories_of(sized, plan, batch.num_grad_loops)
        for mode in modes:
            if mode.kept_loops >= loops and not (loops == deepest[0] and mode == own):
                continue
            this = dataclasses.replace(batch, mode=mode)
            memory = plan_memory(
                sized,
                this,
                trajectories,
                recipe.optimizer,
                accumulates=accumulates,
                num_processes=num_processes,
            )
            whole = dataclasses.replace(this, loss_chunk_tokens=None)
            rows.append(
                ModeRow(
                    num_loops=loops,
                    mode=str(mode),
                    saved_activations=saved_activation_bytes(sized, this, trajectories),
                    whole_logits=saved_logit_bytes(sized, whole, trajectories),
                    chunked_logits=each * _chunk(batch) * config.vocab_size * 4,
                    peak=memory.peak,
                    relative_time=executed_flops(sized, this, plan) / base,
                    is_recipe=loops == deepest[0] and mode == own,
                )
            )
    return tuple(rows)


# -- time ------------------------------------------------------------------------------------------------------


def _time_plan(
    calibration: Calibration, flops: FlopsPlan, num_processes: int, steps: int, tokens_per_step: int
) -> TimePlan:
    """Times: a step = operations of a process's microbatches / (peak x efficiency) + the update."""
    speed = calibration.flops_per_second
    passes = (flops.executed - flops.update) / num_processes / speed
    update = flops.update / num_processes / speed if calibration.update_seconds is None else calibration.update_seconds
    step = passes + update
    return TimePlan(
        calibration=calibration,
        step_seconds=step,
        run_seconds=step * steps,
        tokens_per_second=tokens_per_step / step,
        mfu=flops.model / step / (calibration.peak_flops * num_processes),
    )
