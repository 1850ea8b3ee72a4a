"""Recipes: a whole experiment as one value: model, data or task, loop law, optimiser, schedule, training, evaluation.

A recipe reads and writes nothing; `recipe_file` loads and saves it, `run` trains it. This module imports no torch: the
classes of optimisers and learning-rate schedules are imported when a recipe is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from loopformers.data.synthetic.registry import TASKS
from loopformers.errors import ConfigError, check_count, shorten, unknown_name
from loopformers.extensions import load_extensions
from loopformers.laws import Law
from loopformers.limits import MAX_BATCH, MAX_BUDGETS, MAX_LOOPS, MAX_ROW, MAX_SEED, MAX_SEQ_LEN, MAX_STEPS
from loopformers.paths import expand_path
from loopformers.schedule import Schedule, check_num_loops
from loopformers.yaml_events import read_int

if TYPE_CHECKING:
    from loopformers.data.synthetic.contract import Task
    from loopformers.model.config import LoopConfig
    from loopformers.training.lr_schedules import LearningRateSchedule
    from loopformers.training.optimizers import OptimizerSettings

__all__ = [
    "CHOICES",
    "DEFAULT_CHOICE",
    "SECTIONS",
    "DataRecipe",
    "EvaluationRecipe",
    "ModelRecipe",
    "Recipe",
    "TrainingRecipe",
    "build_law",
    "choice_classes",
    "differences",
    "flatten",
    "from_fields",
    "to_fields",
]

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

BUNDLED = "bundled"
"""The corpus, or the tokenizer, that ships with this package."""

CHOICES: Mapping[str, Mapping[str, str]] = {
    "task": TASKS,
    "law": {
        "fixed": "loopformers.laws:Fixed",
        "uniform_range": "loopformers.laws:UniformRange",
        "poisson_log_normal": "loopformers.laws:PoissonLogNormal",
        "curriculum": "loopformers.laws:Curriculum",
        "short_trajectory": "loopformers.laws:ShortTrajectory",
    },
    "optimizer": {
        "muon_adamw": "loopformers.training.optimizers:MuonAdamW",
        "decayed_adamw": "loopformers.training.optimizers:DecayedAdamW",
    },
    "lr_schedule": {
        "constant_then_linear": "loopformers.training.lr_schedules:ConstantThenLinear",
        "warmup_cosine": "loopformers.training.lr_schedules:WarmupCosine",
    },
}
"""Sections that hold one of several classes: by section, from the name in a recipe to where the class lives."""

DEFAULT_CHOICE = {"optimizer": "muon_adamw", "lr_schedule": "constant_then_linear"}
"""What a section is when it gives no name. Tasks and laws have no default: without a task a
recipe trains on text, and without a law of its own the model's applies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """A system and the fields of LoopConfig that differ from its preset's."""

    preset: str = "flt"
    """System: a name that `LoopConfig.from_preset` knows."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of LoopConfig; in a recipe file they stand beside `preset`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", dict(self.overrides))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecipe:
    """Text, and how it becomes windows of tokens."""

    sources: tuple[str, ...] = (BUNDLED,)
    """Where documents come from, as `load_splits` reads them: `bundled`, files, folders, `datasets` names."""
    tokenizer: str = BUNDLED
    """`bundled`, the folder of a tokenizer, or a name that `AutoTokenizer` knows."""
    seq_len: int = 256
    """Tokens in a window."""
    text_column: str = "text"
    """Where JSON, Parquet and named datasets keep the text."""
    id_column: str = "id"
    """Where they keep the id of a document."""
    fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """Shares of train, validation and test."""
    split_seed: int = 1159
    """Names one division into splits among many."""
    split_by: Literal["document", "id", "tail"] = "document"
    """document: each falls whole into one split, equal texts into the same one; id: the same by id, so that documents that
    share one stay together; tail: each is cut in three, for corpora of one or few documents."""
    cache_dir: str | None = None
    """Where prepared text is kept; null: the Hugging Face cache."""
    streaming: bool = False
    """Read and tokenise as training goes on, for a source that does not fit on disk; also the names of `STREAMED_CORPORA`."""
    isolate_documents: bool = False
    """Whether no token of a training window sees another document's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", as_tuple(self.sources))
        object.__setattr__(self, "fractions", as_tuple(self.fractions))
        if not self.sources or not all(self.sources):
            raise ConfigError(
                f"data.sources={shorten(list(self.sources))} is empty; give at least one file, folder or name"
            )
        object.__setattr__(self, "sources", tuple(expand_path(source, "data.sources") for source in self.sources))
        object.__setattr__(self, "tokenizer", expand_path(self.tokenizer, "data.tokenizer"))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", expand_path(self.cache_dir, "data.cache_dir"))
        check_count("data.seq_len", self.seq_len, at_least=2, at_most=MAX_SEQ_LEN)
        check_count("data.split_seed", self.split_seed, at_least=0, at_most=MAX_SEED)
        if self.streaming and (len(self.sources) > 1 or self.split_by == "tail"):
            raise ConfigError(
                f"data.streaming=true with sources={list(self.sources)} and split_by={self.split_by!r}: a stream reads one "
                "source and splits it by document or id; give one source, or streaming=false"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """How long, how, and where to."""

    steps: int = 1000
    """Updates."""
    batch_size: int = 8
    """Windows an update, over all processes and microbatches."""
    gradient_accumulation: int = 1
    """Microbatches an update on each process: batch_size / (processes x this) windows go through the model at a time."""
    precision: Precision = "float32"
    """float32, or bfloat16 autocast over float32 weights."""
    seed: int = 0
    """Of weights, data order and drawn loops."""
    clip: float | None = 1.0
    """Global gradient norm that larger gradients are scaled down to; null: none."""
    activation_checkpointing: bool = False
    """Whether each loop's activations are recomputed in the backward pass instead of kept."""
    kept_loops: int = 0
    """Last loops that keep their activations under activation checkpointing."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits are in memory at a time; null: all of a microbatch. Changes memory and time, no number."""
    num_grad_loops: int | None = None
    """Last loops that gradients flow through; null: all."""
    compile_layers: bool = False
    """Whether each layer is compiled, with the loop outside."""
    shard: bool = False
    """Whether weights, gradients and optimiser states are divided over processes (FSDP2) instead of copied (DDP)."""
    skip_non_finite: bool = False
    """Whether an update whose loss or gradient is not finite is left out and counted, instead of ending the run."""
    checkpoint_interval: int | None = 100
    """Updates between checkpoints; null: at the end and on interruption only."""
    checkpoints_kept: int = 2
    """Newest checkpoints that stay, at least 2: one is whole while the next is being written."""
    output_dir: str = "runs/train"
    """Folder of the run."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl: names that `transformers.Trainer` knows (tensorboard, trackio, wandb)."""
    log_interval: int = 10
    """Updates between reports there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "report_to", tuple(name for name in as_tuple(self.report_to) if name != "none"))
        for name in ("steps", "batch_size", "gradient_accumulation", "log_interval"):
            check_count(f"training.{name}", getattr(self, name), at_most=MAX_BATCH if "batch" in name else MAX_STEPS)
        check_count("training.checkpoints_kept", self.checkpoints_kept, at_least=2, at_most=MAX_STEPS)
        check_count("training.seed", self.seed, at_least=0, at_most=MAX_SEED)
        check_count("training.kept_loops", self.kept_loops, at_least=0, at_most=MAX_LOOPS)
        for name in ("checkpoint_interval", "loss_chunk_tokens", "num_grad_loops"):
            if getattr(self, name) is not None:
                most = {"checkpoint_interval": MAX_STEPS, "loss_chunk_tokens": MAX_SEQ_LEN, "num_grad_loops": MAX_LOOPS}
                check_count(f"training.{name}", getattr(self, name), at_most=most[name])
        if self.precision not in PRECISIONS:
            raise ConfigError(unknown_name("training.precision", self.precision, PRECISIONS))
        if self.clip is not None and not (self.clip > 0 and math.isfinite(self.clip)):
            raise ConfigError(f"training.clip={self.clip!r} must be a positive number, or null for none")
        object.__setattr__(self, "output_dir", expand_path(self.output_dir, "training.output_dir"))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecipe:
    """What the validation split is asked, during training and at its end."""

    interval: int | None = None
    """Updates between evaluations; null: at the end only."""
    budgets: tuple[int | str, ...] = ()
    """Numbers of loops, and schedules such as coarse-first:4, beside the trained number, which is always scored."""
    windows: int = 256
    """Windows scored, spread evenly over the split."""
    batch_size: int = 16
    """Windows a forward."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(map(_budget, as_tuple(self.budgets))))
        check_count("evaluation.windows", self.windows, at_most=MAX_BATCH)
        check_count("evaluation.batch_size", self.batch_size, at_most=MAX_BATCH)
        if self.interval is not None:
            check_count("evaluation.interval", self.interval, at_most=MAX_STEPS)
        check_count("number of evaluation.budgets", len(self.budgets), at_least=0, at_most=MAX_BUDGETS)
        for budget in self.budgets:
            if not isinstance(budget, str):
                check_num_loops(budget, name="evaluation.budgets")


def _budget(value: Any) -> Any:
    """Return a number of loops that is written as text as a number; other text is a schedule."""
    number = read_int(value.strip()) if isinstance(value, str) else None
    return value if number is None else number


def _default(section: str) -> Any:
    return choice_classes(section)[DEFAULT_CHOICE[section]]()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole experiment.

    Example:
        >>> recipe = Recipe(model=ModelRecipe(preset="lt", overrides={"num_loops": 6}))
        >>> from_fields(to_fields(recipe)) == recipe
        True
    """

    model: ModelRecipe = field(default_factory=ModelRecipe)
    """System and its fields."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text and windows; at its defaults, and unused, where there is a task."""
    task: Task | None = None
    """Makes rows on the spot, in place of text; None: text."""
    law: Law | None = None
    """How training draws loops; None: the model's own `config.law`."""
    optimizer: OptimizerSettings = field(default_factory=lambda: _default("optimizer"))
    """Optimiser."""
    lr_schedule: LearningRateSchedule = field(default_factory=lambda: _default("lr_schedule"))
    """Multiplier of its rates."""
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    """Length, batch, precision, folder."""
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    """Validation."""

    def __post_init__(self) -> None:
        if self.task is None:
            return
        check_count("tokens of a row of the task", self.task.seq_len, at_most=MAX_ROW)
        default = DataRecipe()
        for name in (f.name for f in dataclasses.fields(DataRecipe)):
            if getattr(self.data, name) != getattr(default, name):
                raise ConfigError(
                    f"data.{name}={shorten(getattr(self.data, name))} configures text, but a task makes its own rows and words; "
                    "leave section data out, or task"
                )

    @property
    def seq_len(self) -> int:
        """Tokens of a training window, or of a task's row."""
        return self.data.seq_len if self.task is None else self.task.seq_len

    def fingerprint(self) -> str:
        """Return a digest of everything that the outcome depends on: all but where it is kept, cached and reported."""
        fields = {key: value for key, value in flatten(to_fields(self)).items() if key not in NOT_OUTCOME}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


SECTIONS: Mapping[str, type] = {
    "model": ModelRecipe,
    "data": DataRecipe,
    "training": TrainingRecipe,
    "evaluation": EvaluationRecipe,
}
"""Sections that are one class each; the others are in CHOICES."""

NOT_OUTCOME = (
    "data.cache_dir", "training.output_dir", "training.report_to", "training.log_interval",
    "training.checkpoint_interval", "training.checkpoints_kept", "training.activation_checkpointing",
    "training.kept_loops", "training.loss_chunk_tokens", "evaluation.batch_size",
)  # fmt: skip
"""Fields that do not change what is trained: a run may be continued with other values."""


def choice_classes(section: str) -> dict[str, type]:
    """Return the classes that a section of CHOICES may hold, by name; imports them."""
    load_extensions()
    classes = {}
    for name, place in CHOICES[section].items():
        module, _, attribute = place.partition(":")
        classes[name] = getattr(importlib.import_module(module), attribute)
    return classes


# -- plain values ----------------------------------------------------------------------------------------------


def to_fields(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as nested plain values, every field of every section named; of text and task, the one it has."""
    fields: dict[str, Any] = {}
    unused = "task" if recipe.task is None else "data"
    for section in (f.name for f in dataclasses.fields(Recipe) if f.name != unused):
        value = getattr(recipe, section)
        if isinstance(value, ModelRecipe):
            fields[section] = {"preset": value.preset, **value.overrides}
        elif value is None:
            fields[section] = None
        else:
            named = {}
            if section in CHOICES:
                named["name"] = next(n for n, cls in choice_classes(section).items() if cls is type(value))
            fields[section] = {**named, **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}
    plain: dict[str, Any] = json.loads(json.dumps(fields))  # tuples become lists
    return plain


def from_fields(fields: Mapping[str, Any]) -> Recipe:
    """Undo `to_fields`; what is left out takes its default.

    Raises:
        ConfigError: An unknown section, field or name, or a value that breaks its rule.
    """
    sections = [f.name for f in dataclasses.fields(Recipe)]
    made: dict[str, Any] = {}
    for section, given in fields.items():
        if section not in sections:
            raise ConfigError(unknown_name("section", section, sections))
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section}={shorten(given)} must be a mapping from field to value")
        if section == "model":
            overrides = {name: value for name, value in given.items() if name != "preset"}
            made[section] = ModelRecipe(**{k: given[k] for k in ("preset",) if k in given}, overrides=overrides)
        elif section in CHOICES:
            made[section] = _choose(section, given)
        else:
            made[section] = _make(section, SECTIONS[section], given)
    return Recipe(**made)


def _choose(section: str, given: Mapping[str, Any]) -> Any:
    classes = choice_classes(section)
    name = given.get("name", DEFAULT_CHOICE.get(section))
    if name not in classes:
        raise ConfigError(unknown_name(f"{section}.name", name, classes))
    known = {f.name for f in dataclasses.fields(classes[name])}
    own = {key: value for key, value in given.items() if key != "name"}
    for key in own.keys() - known:
        owners = [n for n, cls in classes.items() if key in {f.name for f in dataclasses.fields(cls)}]
        if owners:
            raise ConfigError(
                f"{section}.{key} is a field of {' and '.join(owners)}, and {section}.name is {name}; leave it out, or "
                f"choose {section}.name={owners[0]}"
            )
    return _make(f"{section} ({name})", classes[name], own)


def _make(section: str, cls: type, given: Mapping[str, Any]) -> Any:
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields]
    for name in given:
        if name not in names:
            raise ConfigError(unknown_name(f"field of {section}", name, names))
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(f"{section} needs {', '.join(missing)}, which the recipe does not give; add it")
    return cls(**given)


def flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections as one mapping from `section.field` to value; a section of None stays.

    Raises:
        ConfigError: A field that is given twice, inside its section and as `section.field`.
    """
    flat: dict[str, Any] = {}
    for section, value in fields.items():
        named = isinstance(value, Mapping)
        for key, entry in (
            {f"{section}.{name}": v for name, v in value.items()} if named else {section: value}
        ).items():
            if key in flat:
                raise ConfigError(
                    f"{key} is given twice, as {key}={shorten(flat[key])} and {shorten(entry)}; leave one out"
                )
            flat[key] = entry
    return flat


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields on which two recipes' outcomes may differ, with both values; None where one has none."""
    a, b = flatten(to_fields(one)), flatten(to_fields(other))
    return {k: (a.get(k), b.get(k)) for k in {**a, **b} if a.get(k) != b.get(k) and k not in NOT_OUTCOME}


# -- rules between sections ------------------------------------------------------------------------------------


def build_law(recipe: Recipe, config: LoopConfig) -> Law:
    """Return the law that training draws from.

    Raises:
        ConfigError: The law and the model's objective do not fit.
    """
    if recipe.law is None:
        return config.law
    law = recipe.law
    plan = law.plan(seed=0, step=0)
    if config.objective == "shortcut_consistency" and plan.short is None:
        raise ConfigError(
            "objective='shortcut_consistency' trains a shorter trajectory beside the long one, and this law draws none; use "
            "law.name=short_trajectory, or model.objective=last_loop"
        )
    if config.objective != "shortcut_consistency" and plan.short is not None:
        raise ConfigError(
            f"law.name=short_trajectory draws a trajectory that objective={config.objective!r} does not train; use "
            "law.name=fixed, or model.objective=shortcut_consistency"
        )
    if plan.short is not None and not config.understands_time and not getattr(law, "passes_only", True):
        raise ConfigError(
            f"law.passes_only=false draws unequal steps, and a model with conditioning={config.conditioning!r} does not know "
            "step sizes; set law.passes_only=true, or model.conditioning=time_and_step"
        )
    return law


def check_budgets(budgets: Sequence[int | str], config: LoopConfig) -> tuple[Schedule, ...]:
    """Return the schedules to score, the trained one first, each once.

    Raises:
        ConfigError: A budget that the model cannot run.
    """
    runs = [config.resolve_schedule()]
    for budget in budgets:
        count = _budget(budget)
        is_count = isinstance(count, int)
        runs.append(config.resolve_schedule(num_loops=count) if is_count else config.resolve_schedule(schedule=budget))
    return tuple(dict.fromkeys(runs))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a list as a tuple, and a single value as a tuple of one."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
