"""What a training step keeps in memory, by formula: saved activations, logits, gradients, optimiser state, and the peak.

Saved activations are what the forward pass keeps for the backward pass, each storage once, parameters left out. With
`n = windows x seq_len` tokens of a microbatch on one process, width d, `q = heads x head_dim`, `k = key-value heads x
head_dim`, MLP width m, vocabulary V; s = 4 bytes (the residual stream is float32) and c = 4 bytes, or 2 under bfloat16
autocast. The formulas describe modules run as written; a compiled layer keeps less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from loopformers.errors import ConfigError
from loopformers.recurrence.slots import Stage
from loopformers.training.optimizers import MuonAdamW

if TYPE_CHECKING:
    from loopformers.laws import LoopPlan
    from loopformers.model.config import LoopConfig
    from loopformers.training.optimizers import OptimizerSettings

__all__ = [
    "ActivationMode",
    "MemoryPlan",
    "Microbatch",
    "optimizer_state_bytes",
    "plan_memory",
    "saved_activation_bytes",
    "saved_logit_bytes",
    "trajectories_of",
]

FLOAT = 4
"""Bytes of float32: weights, gradients, optimiser state, residual stream, statistics of norms, logits."""

INDEX = 8
"""Bytes of a token or a target."""

STEP_COUNT = 4
"""Bytes of the update count that AdamW keeps for each parameter tensor: negligible, and left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationMode:
    """Which activations wait for the backward pass."""

    checkpointing: bool = False
    """Whether each loop keeps its inputs alone and is run again in the backward pass."""
    kept_loops: int = 0
    """Last loops of a trajectory that keep everything all the same."""

    def __str__(self) -> str:
        if not self.checkpointing:
            return "none"
        return f"per loop, last {self.kept_loops} kept" if self.kept_loops else "per loop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """What goes through the model at a time on one process, and how."""

    windows: int
    """Sequences."""
    seq_len: int
    """Tokens in each."""
    precision: str = "float32"
    """float32, or bfloat16 autocast over float32 weights."""
    mode: ActivationMode = dataclasses.field(default_factory=ActivationMode)
    """Activation checkpointing."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits are made at a time; None: all."""
    num_grad_loops: int | None = None
    """Last loops that gradients flow through; None: all."""
    device_type: str = "cpu"
    """cpu or cuda: their attention kernels and autocast lists differ."""

    def __post_init__(self) -> None:
        for name in ("windows", "seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1: a step needs tokens")

    @property
    def tokens(self) -> int:
        """n."""
        return self.windows * self.seq_len

    @property
    def compute_bytes(self) -> int:
        """c, bytes of what matrix products read and write."""
        return 2 if self.precision == "bfloat16" else FLOAT

    def gradient_loops(self, num_loops: int) -> int:
        """Loops of a trajectory that gradients flow through."""
        return min(num_loops, self.num_grad_loops or num_loops)

    def recomputed_loops(self, num_loops: int) -> int:
        """Loops of a trajectory that are run again in the backward pass."""
        return max(0, self.gradient_loops(num_loops) - self.mode.kept_loops) if self.mode.checkpointing else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes on one process.

    The peak is not the sum: logits are gone before the first loop's gradients are complete, and a recomputed loop stands
    in memory only while its own backward pass runs. `peak_at` names the moment.
    """

    weights: int
    """Parameters, float32; under bfloat16 autocast also a copy of each matrix in bfloat16, in `autocast_weights`."""
    autocast_weights: int
    """bfloat16 copies of matrices that autocast makes once in a forward pass and keeps."""
    gradients: int
    """One float32 number for each parameter, when the backward pass is through."""
    gradient_buckets: int
    """The copy of all gradients that several processes reduce from; 0 on one process."""
    optimizer_state: int
    """Muon: one number for each parameter of its matrices; AdamW: two."""
    saved_activations: int
    """Kept between forward and backward pass by embedding, prelude, loops, coda and final norm, of all trajectories."""
    saved_logits: int
    """Kept by the loss; 0 for a chunked one."""
    recomputed_loop: int
    """What one loop saves when it is run again; 0 without checkpointing."""
    peak: int
    """Largest sum that stands at one moment of a step after the first."""
    peak_at: str
    """`loss`, `loops` or `update`."""


# -- saved activations -----------------------------------------------------------------------------------------


def trajectories_of(config: LoopConfig, plan: LoopPlan, num_grad_loops: int | None = None) -> tuple[int, ...]:
    """Return the number of loops that a microbatch runs for each trajectory; loops that two share count for the long one."""
    if plan.short is None:
        return (plan.long.num_loops,)
    return plan.long.num_loops, plan.short.num_loops - config.shared_by(plan, num_grad_loops)


def saved_activation_bytes(config: LoopConfig, batch: Microbatch, trajectories: Sequence[int]) -> int:
    """Return what embedding, loops and final norm save for the backward pass.

    Shared by all trajectories: token ids (and positions, where these are learned), 8 n each; rotary tables, 2 n head_dim
    c; the core's inputs, n d s, where anything later reads them; the prelude. Then for each trajectory:

    - every loop that keeps its activations: `_loop_bytes`;
    - every loop that is recomputed: its input state, n d s, alone (the first loop's is the shared inputs);
    - every loop before the last `num_grad_loops`: nothing;
    - conditioning: `_conditioning_bytes`;
    - the end: `_finish_bytes`.

    Args:
        config: The model.
        batch: Tokens and mode.
        trajectories: Loops of each trajectory.
    """
    n, d = batch.tokens, config.hidden_size
    shared = INDEX * n
    if config.position_embedding == "learned":
        shared += INDEX * n
    else:
        shared += 2 * n * cast(int, config.head_dim) * FLOAT
    shared += n * d * FLOAT  # the core's inputs
    if config.num_prelude_layers:
        shared += n * ((d * FLOAT if config.loop_norm else 0) + FLOAT * config.loop_norm)
        shared += sum(_layer_bytes(config, batch, "prelude", i) for i in range(config.num_prelude_layers))
    total = shared
    loops = [_loop_bytes(config, batch, loop_idx) for loop_idx in (0, 1)]  # all loops after the first save the same
    for num_loops in trajectories:
        recomputed = batch.recomputed_loops(num_loops)
        first_grad = num_loops - batch.gradient_loops(num_loops)
        for loop_idx in range(first_grad, num_loops):
            if loop_idx - first_grad < recomputed:
                total += n * d * FLOAT if loop_idx else 0
            else:
                total += loops[loop_idx > 0]
        total += _conditioning_bytes(config, batch, num_loops)
        # A query injection reads the state itself; where the stream is the state, layer 0 has counted it already.
        if config.injection in ("query_first", "query_all") and config.stream != "state":
            total += n * d * FLOAT * max(0, batch.gradient_loops(num_loops) - recomputed - (recomputed == 0))
        total += _finish_bytes(config, batch)
    return total


def _layer_bytes(
    config: LoopConfig,
    batch: Microbatch,
    stage: Stage,
    layer_idx: int,
    *,
    signal: bool = False,
    adds_state: bool = False,
    modulated: bool = False,
) -> int:
    """Bytes that one application of one layer saves.

    For each token:

    - inputs of both norms, 2 d s, and one number each, 4 bytes; norms with weights also what these multiply, 2 d s;
      `residual_all` also the sum that it norms, d s + 4;
    - inputs of the projections. In float32: d s of q, k, v together, d s of the MLP, and with a recurrent signal d s for
      q's own. Under autocast each projection casts its input anew: 3 d c (2 d c with latent attention) and d c (2 d c
      with SwiGLU);
    - a norm of the signal: 4 bytes;
    - modulation: normed inputs before scaling, 2 d s (3 d s with a signal), and branch outputs before gating, 2 d c;
    - QK-norm: its inputs, (q + k) s with rotary positions (tables are float32) and (q + k) c without, and a number a head;
    - attention: query, key, value, output, (2 q + 2 k) c, and 4 bytes a head for the softmax; a mask (sliding windows)
      makes grouped keys and values as many as queries, and is itself seq^2 c, once for all windows of a batch; CPU kernels
      leave the output of rotated or normed queries in another order than the projection reads, q c more;
    - latent attention of rank r: the latent before and after its norm, 2 r c + 4, and the projections read that;
    - MLP: squared ReLU and GELU 2 m c, SwiGLU 4 m c. CUDA's autocast squares in float32: 4 m more there.
    """
    c, s = batch.compute_bytes, FLOAT
    is_mixed = c != s
    d, m = config.hidden_size, cast(int, config.intermediate_size)
    heads, kv_heads = cast(int, config.num_attention_heads), cast(int, config.num_key_value_heads)
    q, k = heads * cast(int, config.head_dim), kv_heads * cast(int, config.head_dim)
    rank = config.kv_lora_rank
    window = config.window(stage, layer_idx)
    masked = window is not None and window < batch.seq_len

    norms = 2 * d * s + 2 * FLOAT + (d * s + FLOAT if adds_state else 0) + (FLOAT if signal else 0)
    if config.learned_norms == "all":
        norms += 2 * d * s + (d * s if signal else 0)
    if is_mixed:
        projections = (3 if rank is None else 2) * d * c + (2 if config.hidden_act == "swiglu" else 1) * d * c
    else:
        projections = (3 if signal else 2) * d * s
    modulation = ((3 if signal else 2) * d * s + 2 * d * c) if modulated else 0
    qk_norm = 0
    if config.qk_norm:
        qk_norm = (q + k) * (s if config.position_embedding == "rotary" else c) + (heads + kv_heads) * FLOAT
    attention = (2 * q + 2 * (q if masked else k)) * c + heads * FLOAT
    if batch.device_type == "cpu" and (config.qk_norm or config.position_embedding == "rotary"):
        attention += q * c
    latent = 0 if rank is None else 2 * rank * c + FLOAT
    mlp = (4 if config.hidden_act == "swiglu" else 2) * m * c
    if config.hidden_act == "relu2" and is_mixed and batch.device_type == "cuda":
        mlp += m * FLOAT
    per_token = norms + projections + modulation + qk_norm + attention + latent + mlp
    mask = batch.seq_len**2 * c if masked else 0
    vectors = 2 * d * c if modulated else 0  # 1 + scale, twice
    return batch.tokens * per_token + mask + vectors


def _loop_bytes(config: LoopConfig, batch: Microbatch, loop_idx: int) -> int:
    """Bytes that one loop saves: its layers, its start and its closing norm.

    For each token: a norm at the start, 4 bytes (and the sum d s where the stream is inputs + state or an adapter, which
    also saves what its two maps read); a norm at the end, its input d s and 4 bytes. Models that chain raw states
    (`loop_norm` false) have neither, and where the first layer reads the shared inputs themselves it does not save them
    again, - d s.
    """
    n, d = batch.tokens, config.hidden_size
    later = loop_idx > 0
    total = 0
    for i in range(config.num_hidden_layers):
        total += _layer_bytes(
            config,
            batch,
            "core",
            i,
            signal=later and (config.injection == "query_all" or (config.injection == "query_first" and i == 0)),
            adds_state=later and config.injection == "residual_all" and config.loop_norm,
            modulated=config.conditioning != "none",
        )
    if config.loop_norm:
        starts_anew = not later or config.stream != "state"
        total += n * FLOAT if starts_anew else 0
        total += n * d * FLOAT if later and config.stream in ("inputs_plus_state", "adapter") else 0
        total += n * (2 * d + 1) * FLOAT if later and config.stream == "adapter" else 0  # normed inputs, and the state
        total += n * _norm_numbers(config) * FLOAT
    elif not later or (config.stream == "inputs" and config.injection != "residual_all"):
        total -= n * d * FLOAT
    return total


def _norm_numbers(config: LoopConfig) -> int:
    """Numbers a token that the final norm, which is also the closing norm of loops, saves: input, scale, and with weights
    what these multiply."""
    return config.hidden_size * (1 if config.learned_norms == "none" else 2) + 1


def _conditioning_bytes(config: LoopConfig, batch: Microbatch, num_loops: int) -> int:
    """Bytes of the conditioning of a trajectory: one row a loop, whatever the batch.

    Each embedder: 256 frequencies and 2 d; then d before and after SiLU, and 4 d for each layer.
    """
    if config.conditioning == "none":
        return 0
    d = config.hidden_size
    embedders = 2 if config.conditioning == "time_and_step" else 1
    row = embedders * (256 + 2 * d) + 2 * d + config.num_hidden_layers * 4 * d
    return num_loops * row * batch.compute_bytes


def _finish_bytes(config: LoopConfig, batch: Microbatch) -> int:
    """Bytes between the last loop and the loss: coda layers, a final norm where the loop has not applied it, head input.

    A final norm: n (d s + 4), with weights n d s more. The head's input: n d c; where the loss compares hidden states of
    two trajectories, or makes logits in chunks, the float32 state is kept too, n d s under autocast.
    """
    n, d, c = batch.tokens, config.hidden_size, batch.compute_bytes
    predictions = trained_predictions(config, config.num_loops)
    one = sum(_layer_bytes(config, batch, "coda", i) for i in range(config.num_coda_layers))
    if config.num_coda_layers or not config.loop_norm:
        one += n * _norm_numbers(config) * FLOAT
    keeps_float = config.objective == "shortcut_consistency" and config.consistency_target == "hidden"
    if batch.loss_chunk_tokens is not None:
        one += n * d * FLOAT
    else:
        one += n * d * c + (n * d * FLOAT if keeps_float and c != FLOAT else 0)
    return predictions * one


# -- logits ----------------------------------------------------------------------------------------------------


def trained_predictions(config: LoopConfig, num_loops: int) -> int:
    """Return how many loops of a trajectory are scored."""
    match config.objective:
        case "every_loop":
            return num_loops
        case "last_third":
            return num_loops - 2 * num_loops // 3
        case _:
            return 1


def saved_logit_bytes(config: LoopConfig, batch: Microbatch, trajectories: Sequence[int]) -> int:
    """Return what the loss saves for the backward pass.

    Whole: for each scored loop of each trajectory n V 4 of the log-softmax, and n V 4 of the soft-cap's tanh where there
    is one; where logits are compared (`consistency_target` logits) 2 n V 4. Chunked: nothing, since each chunk's logits
    are made again. Targets: 8 n.
    """
    n = batch.tokens
    if batch.loss_chunk_tokens is not None:
        return INDEX * n
    each = 1 if config.final_logit_softcapping is None else 2
    count = sum(trained_predictions(config, loops) for loops in trajectories) * each
    if config.objective == "shortcut_consistency" and config.consistency_target == "logits" and len(trajectories) > 1:
        count += 2
    return count * n * config.vocab_size * FLOAT + INDEX * n


# -- the peak --------------------------------------------------------------------------------------------------


def optimizer_state_bytes(config: LoopConfig, optimizer: OptimizerSettings) -> int:
    """Return the optimiser's state: Muon one number for each parameter of layer matrices, AdamW two for each parameter."""
    total = config.num_parameters()
    muon = matrix_parameters(config) if isinstance(optimizer, MuonAdamW) else 0
    return (2 * (total - muon) + muon) * FLOAT


def matrix_parameters(config: LoopConfig) -> int:
    """Return the parameters of attention and MLP matrices, which Muon updates."""
    groups = config.parameter_groups()
    layers = config.num_prelude_layers + config.num_hidden_layers + config.num_coda_layers
    norms = 2 * config.hidden_size * layers if config.learned_norms == "all" else 0
    return groups["prelude"] + groups["core"] + groups["coda"] - norms


def plan_memory(
    config: LoopConfig,
    batch: Microbatch,
    trajectories: Sequence[int],
    optimizer: OptimizerSettings,
    *,
    accumulates: bool = False,
    num_processes: int = 1,
) -> MemoryPlan:
    """Return the memory of one process, and its peak over a step.

    With W weights, O optimiser state, A saved activations, L saved logits, and G0 = 0, or all gradients where earlier
    microbatches of the step have left theirs, the peak is the largest of

    - loss: W + O + G0 + A + L + two float32 copies of the logits on their way back (whole: n V 4 each; chunked: a chunk's,
      and what its own forward pass saves), or, a moment later, A + one copy and the head's gradient;
    - loops: W + O + G0 + the head's gradient + what `_loops_peak` finds: A, less the loops that are through, + one loop that
      is run again + the core's gradients + those of the MLP on their way back, n (2 m + 2 d) c;
    - update: W + O + all gradients + what the update itself needs (`_update_bytes`).

    A parameter that is used several times (the core of several loops, a head over chunks, a tied embedding) collects its
    gradient in a buffer of its own before it is added to what earlier microbatches have left.

    Args:
        config: The model.
        batch: A microbatch.
        trajectories: Loops of each trajectory that it runs.
        optimizer: Optimiser settings.
        accumulates: Whether a step has several microbatches.
        num_processes: Processes that reduce gradients.
    """
    n, d = batch.tokens, config.hidden_size
    weights = config.num_parameters() * FLOAT
    state = optimizer_state_bytes(config, optimizer)
    buckets = weights if num_processes > 1 else 0
    activations = saved_activation_bytes(config, batch, trajectories)
    logits = saved_logit_bytes(config, batch, trajectories)
    casts = _autocast_bytes(config, batch, trajectories)
    fixed = weights + state + buckets
    base = fixed + casts + (weights if accumulates else 0)

    vocabulary = config.vocab_size * d * FLOAT
    is_chunked = batch.loss_chunk_tokens is not None
    chunk = min(n, batch.loss_chunk_tokens or n)
    copy = chunk * config.vocab_size * FLOAT
    made_again = (1 if config.final_logit_softcapping is None else 2) * copy if is_chunked else 0
    predictions = sum(trained_predictions(config, loops) for loops in trajectories)
    one_prediction = 0 if is_chunked else logits // predictions
    head_uses = predictions * -(-n // chunk)
    # The first use of a shared matrix leaves a gradient; every later one makes its own beside the sum.
    first, later = (vocabulary, 2 * vocabulary) if head_uses > 1 else (0, vocabulary)
    at_loss = base + activations + logits + max(2 * copy + made_again + first, copy - one_prediction + later)

    head_gradient = vocabulary if not accumulates or head_uses > 1 else 0
    in_loops = base + head_gradient + _loops_peak(config, batch, trajectories, activations, accumulates=accumulates)
    at_update = fixed + weights + _update_bytes(config, optimizer, batch)
    moments = {"loss": at_loss, "loops": in_loops, "update": at_update}
    peak_at = max(moments, key=lambda moment: moments[moment])
    is_recomputed = any(batch.recomputed_loops(loops) for loops in trajectories)
    return MemoryPlan(
        weights=weights,
        autocast_weights=casts,
        gradients=weights,
        gradient_buckets=buckets,
        optimizer_state=state,
        saved_activations=activations,
        saved_logits=logits,
        recomputed_loop=_loop_bytes(config, batch, max(trajectories) - 1) if is_recomputed else 0,
        peak=moments[peak_at],
        peak_at=peak_at,
    )


def _autocast_bytes(config: LoopConfig, batch: Microbatch, trajectories: Sequence[int]) -> int:
    """Bytes of the bfloat16 copies of matrices that the backward pass needs: c for each parameter of them.

    Those of the core only where some loop is not recomputed, that of the head only where its logits are whole: what is run
    again casts again.
    """
    c = batch.compute_bytes
    if c == FLOAT:
        return 0
    groups = config.parameter_groups()
    keeps_core = any(batch.gradient_loops(loops) > batch.recomputed_loops(loops) for loops in trajectories)
    numbers = groups["prelude"] + groups["coda"] + groups["conditioning"]
    numbers += groups["core"] if keeps_core else 0
    numbers += config.vocab_size * config.hidden_size if batch.loss_chunk_tokens is None else 0
    return numbers * c


def _loops_peak(
    config: LoopConfig, batch: Microbatch, trajectories: Sequence[int], activations: int, *, accumulates: bool
) -> int:
    """Largest sum of activations, gradients of the core and gradients on their way back while loops are run backwards.

    The trajectory that ran last comes first, each from its last loop to its first. A loop that kept its activations gives
    them back, a recomputed one makes them for its own time. The core's gradients arrive with the first of them and stay.
    """
    n, c = batch.tokens, batch.compute_bytes
    groups = config.parameter_groups()
    core = (groups["core"] + groups["conditioning"]) * FLOAT
    uses = sum(batch.gradient_loops(loops) for loops in trajectories)
    if accumulates and uses == 1:
        core = 0  # added to what is there
    working = n * (2 * cast(int, config.intermediate_size) + 2 * config.hidden_size) * c
    loops = [_loop_bytes(config, batch, loop_idx) for loop_idx in (0, 1)]
    live, peak, done = activations, 0, 0
    for num_loops in reversed(trajectories):
        first_grad = num_loops - batch.gradient_loops(num_loops)
        recomputed = batch.recomputed_loops(num_loops)
        for loop_idx in reversed(range(first_grad, num_loops)):
            whole = loops[loop_idx > 0]
            runs_again = loop_idx - first_grad < recomputed
            casts = groups["core"] * c if runs_again and c != FLOAT else 0
            arriving = core if done else max(0, core - whole)  # the first gradients come while activations go
            peak = max(peak, live + arriving + working + (whole + casts if runs_again else 0))
            live -= (n * config.hidden_size * FLOAT if loop_idx else 0) if runs_again else whole
            done += 1
    return peak


def _update_bytes(config: LoopConfig, optimizer: OptimizerSettings, batch: Microbatch) -> int:
    """Bytes that the update itself needs.

    AdamW makes one denominator for each parameter: on a CPU one tensor after the other, so two copies of the largest; on
    CUDA all together. Muon goes matrix by matrix, a few copies of one: less than that.
    """
    if batch.device_type == "cpu":
        return 2 * config.vocab_size * config.hidden_size * FLOAT
    adamw = config.num_parameters() - (matrix_parameters(config) if isinstance(optimizer, MuonAdamW) else 0)
    return adamw * FLOAT
