"""What models score on tasks: one file, typed, that can be resumed, merged and rendered again.

The file (`results.json`) holds three lists: models, protocols (one a task: all that decides its questions and prompts) and
scores (one a model, budget and task, with the score of every question). A score belongs to the protocol of its task, of
which a file has one: files whose protocols differ do not merge, because their numbers do not compare.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from loopformers.errors import ConfigError, DataError
from loopformers.files import write_whole
from loopformers.readers import read_json
from loopformers.records import make_record

__all__ = [
    "COST_SEQ_LEN",
    "RESULTS_FILE",
    "SCHEMA_VERSION",
    "ModelInfo",
    "Protocol",
    "Results",
    "Score",
    "merge",
    "read_results",
]

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"

MAX_RESULTS_BYTES = 2**30
"""A results file holds the score of every question."""

AGAIN = "the file was damaged or changed: evaluate again"

T = TypeVar("T")

COST_SEQ_LEN = 256
"""Tokens of the sequence over which operations per token are counted, the same for every model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A model that was scored."""

    hash: str
    """Of weights, configuration and vocabulary."""
    name: str
    """Folder or name that it was opened by; may change, the hash does not."""
    kind: str
    """transformers' `model_type`; ours is `loopformers`."""
    num_parameters: int
    """Tied matrices once."""
    dtype: str
    """Of the weights."""
    max_length: int
    """Tokens seen at once."""
    trained_loops: int | None = None
    """T, of a looped model."""
    training_flops: float | None = None
    """Operations that training took, where the checkpoint records them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """All that decides the questions and prompts of a task. Two scores compare when their protocols are equal."""

    task: str
    """The harness's name."""
    version: str
    """Of the harness's task file."""
    harness: str
    """Version of lm-eval."""
    source: str
    """Where the questions come from."""
    split: str
    """Which of them."""
    num_questions: int
    """Scored."""
    limit: int | None
    """First so many questions alone; None: all."""
    num_fewshot: int
    """Examples before a question."""
    seed: int
    """Of the choice of examples."""
    chat_template: bool
    """Whether prompts are put in the model's chat template."""
    prompts_hash: str
    """Of every prompt and choice, in order, before a chat template."""
    example: str
    """First prompt and its first choice, as a reader wants to see them."""
    definition: Mapping[str, Any] = field(default_factory=dict)
    """How the task file makes prompts and scores of a question."""

    @property
    def fingerprint(self) -> str:
        """Hash of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Protocol) -> list[str]:
        """Name what differs from another protocol, with both values."""
        names = [f.name for f in fields(self) if f.name not in ("example", "definition")]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        found = [f"{name} {mine!r} and {theirs!r}" for name, mine, theirs in pairs if mine != theirs]
        return found or (["its definition"] if self.definition != other.definition else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one model scores on one task at one budget."""

    model: str
    """Hash."""
    num_loops: int | None
    """M; None for a model without loops."""
    schedule: str | None
    """Step sizes as fractions."""
    exit_rule: str | None
    """Where one was used."""
    flops_per_token: float | None
    """Operations of a forward over `COST_SEQ_LEN` tokens, for one of them; None under an exit rule, where tokens differ."""
    task: str
    """The harness's name."""
    metric: str
    """What tables show of it."""
    weight: float
    """In a mean over tasks."""
    values: Mapping[str, float]
    """Every metric of the task."""
    standard_errors: Mapping[str, float | None]
    """Of each, over questions; None where a metric is no mean of theirs."""
    questions: Mapping[str, Sequence[float]]
    """Each metric's value for each question, in order, where it has one."""
    num_cut: int = 0
    """Requests cut on the left to what the model sees at once."""
    seconds: float = 0.0
    """Wall time."""

    @property
    def key(self) -> tuple[str, str | None, str | None, str]:
        """What a file has one score for: model, schedule, exit rule, task."""
        return self.model, self.schedule, self.exit_rule, self.task

    @property
    def value(self) -> float:
        """Of the metric that tables show."""
        return self.values[self.metric]

    @property
    def standard_error(self) -> float | None:
        """Of the metric that tables show."""
        return self.standard_errors.get(self.metric)


@dataclass(frozen=True, slots=True)
class Results:
    """Scores with their models and protocols."""

    models: tuple[ModelInfo, ...] = ()
    protocols: tuple[Protocol, ...] = ()
    scores: tuple[Score, ...] = ()

    def protocol(self, task: str) -> Protocol | None:
        """Return the protocol of a task."""
        return next((p for p in self.protocols if p.task == task), None)

    def model(self, hash: str) -> ModelInfo:
        """Return the model of a hash."""
        return next(m for m in self.models if m.hash == hash)

    def find(self, key: tuple[str, str | None, str | None, str]) -> Score | None:
        """Return the score of a key."""
        return next((s for s in self.scores if s.key == key), None)

    def tasks(self) -> list[str]:
        """Return the tasks that were scored, in order."""
        return list(dict.fromkeys(score.task for score in self.scores))

    def with_score(self, model: ModelInfo, protocol: Protocol, score: Score) -> Results:
        """Return these results with one more score; it replaces that of the same key.

        Raises:
            ConfigError: The protocol is not that which the task has here.
        """
        return merge([self, Results((model,), (protocol,), (score,))])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, which appears whole or not at all."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "models": [asdict(m) for m in self.models],
            "protocols": [{**asdict(p), "fingerprint": p.fingerprint} for p in self.protocols],
            "scores": [asdict(s) for s in self.scores],
        }
        return write_whole(path, json.dumps(_strict(content), allow_nan=False) + "\n")


def merge(parts: Iterable[Results]) -> Results:
    """Return the union of results; where two have a score of the same key, the last counts.

    Raises:
        ConfigError: Two have different protocols for one task.
    """
    models: dict[str, ModelInfo] = {}
    protocols: dict[str, Protocol] = {}
    scores: dict[Any, Score] = {}
    for part in parts:
        for protocol in part.protocols:
            known = protocols.setdefault(protocol.task, protocol)
            if known.fingerprint != protocol.fingerprint:
                raise ConfigError(
                    f"two protocols of {protocol.task} differ in {', '.join(known.differences(protocol)) or 'their text'}, so "
                    "their scores do not compare; evaluate again under one of them, or keep the files apart"
                )
        models |= {model.hash: model for model in part.models}
        scores |= {score.key: score for score in part.scores}
    return Results(tuple(models.values()), tuple(protocols.values()), tuple(scores.values()))


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read a results file, or that of a folder.

    Raises:
        DataError: No such file, no results in it, or another schema.
    """
    file = Path(path)
    file = file / RESULTS_FILE if file.is_dir() else file
    remedy = f"give a {RESULTS_FILE} that evaluate tasks wrote, or its folder"
    content = read_json(file, dict, error=DataError, remedy=remedy, max_bytes=MAX_RESULTS_BYTES)
    if "schema_version" not in content:
        raise DataError(f"{file} is not a results file: it has no schema_version; {remedy}")
    version = content["schema_version"]
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{file} has schema version {version!r} and this program reads {SCHEMA_VERSION}; evaluate again, or use the version "
            "of this program that wrote it"
        )
    results = Results(
        tuple(_entries(ModelInfo, content, "models", file)),
        tuple(_protocol(entry, f"{file}: protocols[{i}]") for i, entry in enumerate(_list(content, "protocols", file))),
        tuple(_entries(Score, content, "scores", file)),
    )
    _check(results, file)
    return results


def _list(content: Mapping[str, Any], name: str, file: Path) -> list[Any]:
    if not isinstance(content.get(name), list):
        raise DataError(f"{file} is a results file without a list of {name}; {AGAIN}")
    entries: list[Any] = content[name]
    return entries


def _entries(kind: type[T], content: Mapping[str, Any], name: str, file: Path) -> Iterator[T]:
    for index, entry in enumerate(_list(content, name, file)):
        yield make_record(kind, entry, f"{file}: {name}[{index}]", error=DataError, remedy=AGAIN, null_is_nan=True)


def _check(results: Results, file: Path) -> None:
    """Check that the three lists fit together."""
    hashes, tasks = {model.hash for model in results.models}, {protocol.task for protocol in results.protocols}
    for index, score in enumerate(results.scores):
        place = f"{file}: scores[{index}]"
        if score.model not in hashes:
            raise DataError(f"{place} names a model {score.model!r} that the file does not list; {AGAIN}")
        if score.task not in tasks:
            raise DataError(f"{place} names a task {score.task!r} without a protocol in the file; {AGAIN}")
        if score.metric not in score.values:
            raise DataError(f"{place} has no value of its metric {score.metric!r}; {AGAIN}")
        if not (math.isfinite(score.weight) and score.weight >= 0):
            raise DataError(f"{place} has the weight {score.weight}, which must be at least 0; {AGAIN}")
        if (score.num_loops is None) != (score.schedule is None):
            raise DataError(f"{place} has only one of num_loops and schedule; {AGAIN}")


def _protocol(entry: Any, source: str) -> Protocol:
    if not isinstance(entry, Mapping) or "fingerprint" not in entry:
        raise DataError(f"{source} has no fingerprint; {AGAIN}")
    fields = dict(entry)
    stored = fields.pop("fingerprint")
    protocol = make_record(Protocol, fields, source, error=DataError, remedy=AGAIN, null_is_nan=True)
    if protocol.fingerprint != stored:
        raise DataError(
            f"{source}: the protocol of {protocol.task} was changed after its scores were made (fingerprint {stored} there, "
            f"{protocol.fingerprint} of what stands there); evaluate again"
        )
    return protocol


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value
