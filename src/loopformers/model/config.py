"""LoopConfig: everything that shapes a looped model, as one validated transformers configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any, Literal

from loopformers.errors import CheckpointError, ConfigError, check_count, shorten, unknown_name
from loopformers.extensions import load_extensions
from loopformers.laws import SHORT_SAMPLERS, Fixed, Law, LoopPlan, ShortSampler, ShortTrajectory
from loopformers.limits import MAX_HEADS, MAX_LAYERS, MAX_SEED, MAX_SEQ_LEN, MAX_VOCABULARY, MAX_WIDTH
from loopformers.model.costs import Costs
from loopformers.model.inherited import INHERITED, StoredConfig, check_inherited, check_tokens, read_extras
from loopformers.model.presets import preset_fields
from loopformers.nn.conditioning import CONDITIONINGS, ConditioningKind
from loopformers.nn.init import INIT_SCHEMES, MODULATION_INITS, InitScheme, ModulationInit
from loopformers.nn.mlp import ACTIVATIONS, Activation
from loopformers.objectives import OBJECTIVES
from loopformers.objectives.shortcut import CONSISTENCY_TARGETS, ConsistencyTarget
from loopformers.recurrence.injection import INJECTIONS
from loopformers.recurrence.slots import SlotLayout, Stage
from loopformers.recurrence.stream import STREAMS
from loopformers.schedule import Schedule, check_num_loops

__all__ = ["LoopConfig"]

NO_CODE: dict[str, str] = {}
"""What a checkpoint brings of code of its own: nothing. TRL asks this of every model whose class transformers lacks."""


class LoopConfig(Costs, StoredConfig):
    """Configuration of a looped model: stack x recurrence x conditioning, and the objective it is trained with.

    Unknown fields are refused. Sizes left at None are derived, and stored as derived.

    Example:
        >>> config = LoopConfig.from_preset("flt", hidden_size=64, num_attention_heads=2, num_loops=4, vocab_size=97)
        >>> config.injection, config.head_dim, str(config.resolve_schedule(num_loops=2))
        ('query_all', 32, '1/2,1/2')
    """

    model_type = "loopformers"
    auto_map = NO_CODE
    keys_to_ignore_at_inference = [  # noqa: RUF012 - Trainer adds a list to it
        "past_key_values", "cache", "loop_states", "residual_norms", "loop_diagnostics", "loss_parts",
    ]  # fmt: skip

    vocab_size: int = 2048
    """Number of tokens."""
    pad_vocab_size_multiple: int | None = None
    """Random rows of embedding and head are drawn for a multiple of this, and a GPU multiplies by the head as if it had that
    many; the parameters have vocab_size rows. None: vocab_size."""
    hidden_size: int = 384
    """d, width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the MLP; None: 4 d."""
    num_hidden_layers: int = 6
    """N, unique layers of the looped stack."""
    num_prelude_layers: int = 0
    """Layers before the loop, run once."""
    num_coda_layers: int = 0
    """Layers after the loop, run once."""
    num_loops: int = 12
    """T, loops the model is trained with and runs by default."""

    num_attention_heads: int | None = None
    """Query heads; None: one for every 128 of the width, rounded up."""
    num_key_value_heads: int | None = None
    """Key and value heads; None: as many as query heads."""
    head_dim: int | None = None
    """Size of a head; None: hidden_size / num_attention_heads."""
    kv_lora_rank: int | None = None
    """Width of the latent of multi-head latent attention; None: ordinary keys and values."""
    qk_norm: bool = True
    """Whether queries and keys are RMS-normed per head."""
    window_pattern: str = "L"
    """S (sliding window) or L (full attention) by layer, repeated over prelude, core and coda; the last is always L."""
    sliding_window: int | None = None
    """Width of the sliding window in tokens; None: a quarter of max_position_embeddings."""

    position_embedding: Literal["rotary", "learned"] = "rotary"
    """How the model knows positions."""
    max_position_embeddings: int = 1024
    """Training length; with learned positions also the longest input."""
    rope_theta: float = 10000.0
    """Base of rotary frequencies."""
    rope_table_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision that rotary tables are rounded to; FLT's released code rounds to bfloat16."""

    hidden_act: Activation = "relu2"
    """MLP: gelu (exact), relu2 (squared ReLU) or swiglu."""
    rms_norm_eps: float | None = None
    """Epsilon of every norm; None: machine epsilon of the dtype, torch's default."""
    learned_norms: Literal["none", "final", "all"] = "none"
    """Which norms have weights."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""
    final_logit_softcapping: float | None = None
    """c in c tanh(logits / c); None: no cap."""

    stream: str = "inputs"
    """Where loops after the first start: state, inputs_plus_state, inputs, balanced or adapter."""
    injection: str = "query_all"
    """What layers see of the previous state: none, query_first, query_all or residual_all."""
    loop_norm: bool = True
    """Whether each loop starts from a normed stream and closes with a norm; False chains raw states."""
    conditioning: ConditioningKind = "none"
    """What a loop is told: none, loop_index (0, 1, ..), time (t) or time_and_step (t and its step size)."""
    time_scale: float = 1.0
    """Factor on t and step size before their frequency embedding."""

    objective: str = "last_loop"
    """What labels train in training mode: last_loop, last_third, every_loop or shortcut_consistency."""
    short_sampler: ShortSampler = "sequential"
    """How shortcut consistency draws its short trajectory: sequential (the released code) or uniform."""
    short_weight: float = 0.1
    """Weight of the short trajectory's cross entropy."""
    consistency_weight: float = 0.1
    """Weight of the consistency term."""
    consistency_target: ConsistencyTarget = "hidden"
    """What the short trajectory is pulled to: the long one's final hidden state or its logits."""
    loop_seed: int = 0
    """Seed of the draws of short trajectories."""

    init_scheme: InitScheme = "flt"
    """flt or loopformer, see nn/init.py."""
    modulation_init: ModulationInit = "open"
    """zero, normal or open, see nn/init.py."""
    initializer_range: float = 0.02
    """Standard deviation of the loopformer scheme and of the conditioning."""
    use_cache: bool = True
    """Whether generation caches keys and values."""
    bos_token_id: int | None = None
    """Token that a text starts with."""
    eos_token_id: int | list[int] | None = None
    """Token that a text ends with."""
    pad_token_id: int | None = None
    """Token that batches are padded with."""

    def __init__(self, **fields: Any) -> None:
        if (architecture := fields.pop("model_type", self.model_type)) != self.model_type:
            raise CheckpointError(
                f"model_type={architecture!r} is another architecture's configuration, not {self.model_type!r}; open it with "
                "transformers' AutoModelForCausalLM, or convert an official looped checkpoint with `loopformers convert`"
            )
        own = self.own_fields()
        extras = read_extras(fields, dir(LoopConfig))
        if unknown := sorted(fields.keys() - own.keys() - INHERITED):
            raise ConfigError(unknown_name("field", unknown[0], own))
        check_inherited(fields)
        for name, default in own.items():
            setattr(self, name, fields.pop(name, default))
        super().__init__(**fields)
        for name, value in extras.items():
            setattr(self, name, value)
        self.check()

    @classmethod
    def own_fields(cls) -> dict[str, Any]:
        """Return the fields that shape a model and their defaults, without those that transformers adds."""
        return {name: default for name, default in vars(LoopConfig).items() if name in LoopConfig.__annotations__}

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> LoopConfig:
        """Return the configuration of a system, at its paper's size unless overridden.

        Args:
            name: `lt lt-input lt-query flt-residual flt`, `base base-loop base-loop-exit tmlt tmlt-exit loopformer`, or one
                of ours: `lt-balanced`, `lt-adapter`, `elastic-balanced`, `elastic-flt`.
            overrides: Any field.

        Raises:
            ConfigError: Unknown preset or field, or a combination that is not legal.
        """
        return cls(**preset_fields(name, overrides))

    # -- rules -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Fill in derived sizes and raise ConfigError at the first rule that is broken."""
        for name, at_most in _COUNTS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                at_least = 0 if name in ("num_prelude_layers", "num_coda_layers") else 1
                check_count(name, getattr(self, name), at_least=at_least, at_most=at_most)
        check_count("loop_seed", self.loop_seed, at_least=0, at_most=MAX_SEED)
        load_extensions()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(unknown_name(name, value, allowed))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shorten(getattr(self, name))} must be true or false")
        check_num_loops(self.num_loops)
        self._check_heads()
        self._check_window()
        self._check_numbers()
        self._check_training()

    def _check_heads(self) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_attention_heads is None:
            self.num_attention_heads = -(-self.hidden_size // 128)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                nearest = self.num_attention_heads * max(1, round(self.hidden_size / self.num_attention_heads))
                raise ConfigError(
                    f"hidden_size={self.hidden_size} does not split into num_attention_heads={self.num_attention_heads} "
                    f"equal heads; the nearest size that does is {nearest}, or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            divisors = [n for n in range(1, self.num_attention_heads + 1) if self.num_attention_heads % n == 0]
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads="
                f"{self.num_attention_heads}; choose one of {divisors}"
            )
        if self.position_embedding == "rotary" and self.head_dim % 2:
            raise ConfigError(
                f"head_dim={self.head_dim} must be even with rotary positions, which turn pairs of channels; "
                "change hidden_size or num_attention_heads"
            )

    def _check_window(self) -> None:
        pattern = self.window_pattern
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set("SL"):
            raise ConfigError(
                f"window_pattern={shorten(pattern)} must be a string of S (sliding) and L (full), such as 'SSSL', of at most "
                f"{MAX_LAYERS} letters"
            )
        if self.sliding_window is None and "S" in pattern:
            self.sliding_window = max(1, self.max_position_embeddings // 4)

    def _check_numbers(self) -> None:
        for name, (largest, may_be_zero, may_be_none) in _NUMBERS.items():
            value = getattr(self, name)
            if may_be_none and value is None:
                continue
            number = _as_number(value)
            if not (number >= 0 if may_be_zero else number > 0) or number > largest:
                kind = "a number of at least 0" if may_be_zero else "a positive number"
                rest = ", or null for none" if may_be_none else ""
                raise ConfigError(f"{name}={shorten(value)} must be {kind}, at most {largest:g}{rest}")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            check_tokens(name, getattr(self, name), self.vocab_size, several=name == "eos_token_id")

    def _check_training(self) -> None:
        if self.objective == "shortcut_consistency" and self.num_loops < 2:
            raise ConfigError(
                f"objective='shortcut_consistency' with num_loops={self.num_loops} leaves no shorter trajectory to train; "
                "use num_loops >= 2 or objective='last_loop'"
            )
        if self.conditioning != "none" and self.modulation_init == "zero" and self.init_scheme == "flt":
            raise ConfigError(
                "modulation_init='zero' with init_scheme='flt' never trains: gates and output projections are both zero, so "
                "both gradients are; use modulation_init='open' or init_scheme='loopformer'"
            )

    # -- what follows from the fields --------------------------------------------------------------------------

    @property
    def padded_vocab_size(self) -> int:
        """vocab_size, rounded up to the multiple; the parameters have vocab_size rows, see `nn/head.py`."""
        multiple = self.pad_vocab_size_multiple or 1
        return -(-self.vocab_size // multiple) * multiple

    @property
    def head_std(self) -> float:
        """Standard deviation that an untied head starts with."""
        return 0.001 if self.init_scheme == "flt" else self.initializer_range

    @property
    def slot_layout(self) -> SlotLayout:
        """How a cache numbers its rows."""
        return SlotLayout(self.num_prelude_layers, self.num_hidden_layers, self.num_coda_layers)

    @property
    def understands_time(self) -> bool:
        """Whether runs of unequal step sizes mean anything to this model."""
        return self.conditioning in ("time", "time_and_step")

    @property
    def law(self) -> Law:
        """How the objective draws what a microbatch runs."""
        return Fixed(self.num_loops) if self.objective != "shortcut_consistency" else self.short_law(self.num_loops)

    def short_law(self, num_loops: int) -> ShortTrajectory:
        """Return how short trajectories beside a long one of `num_loops` are drawn."""
        return ShortTrajectory(num_loops, self.short_sampler, passes_only=not self.understands_time)

    def told(self, run: Schedule) -> tuple[Any, ...]:
        """Return what each loop of a run is told: nothing, its index, its time, or its time and step size.

        Two loops that are told the same compute the same from the same state.
        """
        return tuple(self._told(run))

    def _told(self, run: Schedule) -> Iterator[Any]:
        """Yield what `told` returns: two runs mostly differ at the first loop or the second, and have thousands."""
        times = (n / run.grid for n in itertools.accumulate(itertools.chain((0,), run.numerators)))
        if self.conditioning == "time_and_step" or STREAMS[self.stream].uses_step_size:
            return zip(times, (n / run.grid for n in run.numerators), strict=False)
        if self.conditioning == "time":
            return itertools.islice(times, run.num_loops)
        return iter(range(run.num_loops))

    def shared_loops(self, one: Schedule, other: Schedule) -> int:
        """Return how many loops at their start two runs have in common, so that one need compute them.

        All of the shorter one where loops are told nothing or their index; where they know their step size, those before
        the first that differs.

        Example:
            >>> exits, elastic = LoopConfig.from_preset("base-loop-exit"), LoopConfig.from_preset("loopformer")
            >>> exits.shared_loops(Schedule.uniform(8), Schedule.uniform(3))
            3
            >>> elastic.shared_loops(Schedule.uniform(8), Schedule((1, 1, 6), 8))
            2
        """
        pairs = zip(self._told(one), self._told(other), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def shared_by(self, plan: LoopPlan, num_grad_loops: int | None = None) -> int:
        """Return how many loops the short trajectory of a plan takes over from the long one.

        None where gradients are truncated: the last loops of the short one, which keep theirs, are early ones of the long.
        """
        if plan.short is None or (num_grad_loops is not None and num_grad_loops < plan.long.num_loops):
            return 0
        return self.shared_loops(plan.long, plan.short)

    def window(self, stage: Stage, layer_idx: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None for full attention."""
        offset = {
            "prelude": 0,
            "core": self.num_prelude_layers,
            "coda": self.num_prelude_layers + self.num_hidden_layers,
        }
        position = offset[stage] + layer_idx
        is_last = position == self.num_prelude_layers + self.num_hidden_layers + self.num_coda_layers - 1
        slides = self.window_pattern[position % len(self.window_pattern)] == "S" and not is_last
        return self.sliding_window if slides else None

    def resolve_schedule(self, num_loops: int | None = None, schedule: Any = None) -> Schedule:
        """Return the run that these arguments ask for; by default T uniform steps.

        Args:
            num_loops: M uniform steps for a model that knows time, M passes otherwise.
            schedule: Anything that `Schedule.parse` reads.

        Raises:
            ConfigError: Not a legal schedule, or unequal steps for a model that does not know time.
        """
        run = Schedule.parse(schedule, num_loops=num_loops, grid=self.num_loops)
        if not run.is_uniform and not self.understands_time:
            raise ConfigError(
                f"schedule={str(run)!r} has unequal steps, and a model with conditioning={self.conditioning!r} does not know "
                f"step sizes; give num_loops={run.num_loops} instead, or train with conditioning='time_and_step'"
            )
        return run


def _as_number(value: Any) -> float:
    """Return a finite number as it is, and anything else as one that is neither positive, zero nor negative."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if is_number else math.nan


_COUNTS = {
    "vocab_size": MAX_VOCABULARY, "pad_vocab_size_multiple": MAX_VOCABULARY, "hidden_size": MAX_WIDTH,
    "intermediate_size": 4 * MAX_WIDTH, "num_hidden_layers": MAX_LAYERS, "num_prelude_layers": MAX_LAYERS,
    "num_coda_layers": MAX_LAYERS, "num_attention_heads": MAX_HEADS, "num_key_value_heads": MAX_HEADS,
    "head_dim": MAX_WIDTH, "kv_lora_rank": MAX_WIDTH, "sliding_window": MAX_SEQ_LEN, "max_position_embeddings": MAX_SEQ_LEN,
}  # fmt: skip
"""Whole numbers, each with its ceiling."""
_OPTIONAL = {
    "pad_vocab_size_multiple", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "kv_lora_rank", "sliding_window",
}  # fmt: skip
_NUMBERS = {
    # largest value, whether it may be 0, whether it may be None
    "rope_theta": (1e12, False, False),
    "time_scale": (1e6, False, False),
    "initializer_range": (1e3, False, False),
    "rms_norm_eps": (1.0, False, True),
    "final_logit_softcapping": (1e6, False, True),
    "short_weight": (1e6, True, False),
    "consistency_weight": (1e6, True, False),
}
_SWITCHES = ("qk_norm", "tie_word_embeddings", "loop_norm", "use_cache")
_CHOICES: dict[str, Collection[str]] = {
    "position_embedding": ("rotary", "learned"),
    "rope_table_dtype": ("float32", "bfloat16"),
    "hidden_act": ACTIVATIONS,
    "learned_norms": ("none", "final", "all"),
    "stream": STREAMS,
    "injection": INJECTIONS,
    "conditioning": CONDITIONINGS,
    "objective": tuple(OBJECTIVES),
    "short_sampler": SHORT_SAMPLERS,
    "consistency_target": CONSISTENCY_TARGETS,
    "init_scheme": INIT_SCHEMES,
    "modulation_init": MODULATION_INITS,
}
