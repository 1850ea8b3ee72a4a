"""Scores models on tasks of the harness, budget by budget, and keeps each score as soon as it is there."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import statistics
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import lm_eval.evaluator

from loopformers.errors import ConfigError, DataError, LoopformersError, first_line
from loopformers.evaluation.harness import LoopformersLM
from loopformers.evaluation.models import is_looped, model_hash
from loopformers.evaluation.results import COST_SEQ_LEN, ModelInfo, Protocol, Results, Score
from loopformers.evaluation.task_list import TaskChoice, load_task, quiet_harness
from loopformers.schedule import Schedule

__all__ = ["Listener", "Prepared", "PreparedTask", "describe_model", "flops_per_token", "prepare_task", "score_model"]

Listener = Callable[[str, int], None]
"""Called with what is being done and the number of requests that have been answered since the last call."""

DEFINITION = ("output_type", "description", "doc_to_text", "doc_to_target", "doc_to_choice", "process_docs", "process_results",
              "target_delimiter", "fewshot_delimiter", "fewshot_split", "generation_kwargs", "metric_list", "filter_list",
              "repeats")  # fmt: skip
"""What a protocol keeps of a task file."""


class Prepared(typing.Protocol):
    """What can be put to a model: a task, or a text whose perplexity is wanted."""

    @property
    def protocol(self) -> Protocol:
        """All that decides what is asked."""

    @property
    def num_requests(self) -> int:
        """How much there is to do at each budget."""

    def score(self, lm: LoopformersLM, info: ModelInfo, schedule: Schedule | None, exit_rule: str | None) -> Score:
        """Put it to a model along one run."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task with its questions, ready to be put to models."""

    task: Any
    """The harness's."""
    choice: TaskChoice
    """As asked for."""
    protocol: Protocol
    """All that decides its prompts."""
    num_requests: int
    """Continuations to score or texts to write."""

    def score(self, lm: LoopformersLM, info: ModelInfo, schedule: Schedule | None, exit_rule: str | None) -> Score:
        """Put the task to a model."""
        task, protocol = self.task, self.protocol
        lm.num_cut = 0
        start = time.perf_counter()
        with quiet_harness():
            output = lm_eval.evaluator.evaluate(
                lm,
                {"tasks": {protocol.task: task}, "groups": {}, "group_map": {}},
                limit=protocol.limit,
                bootstrap_iters=0,
                apply_chat_template=protocol.chat_template,
                fewshot_as_multiturn=protocol.chat_template,
            )
        seconds = time.perf_counter() - start
        assert output is not None  # of the only process
        values = {
            _metric_name(key): float(value)
            for key, value in output["results"][protocol.task].items()
            if "," in key and "_stderr" not in key and isinstance(value, int | float)
        }
        questions = {name: _of_questions(output["samples"][protocol.task], name) for name in values}
        metric = self.choice.metric or _main_metric(values)
        if metric not in values:
            raise ConfigError(f"{protocol.task} has no metric {metric!r}, but {', '.join(values)}")
        is_share = task.higher_is_better().get(metric.partition(",")[0], True)
        return Score(
            model=info.hash,
            num_loops=None if schedule is None else schedule.num_loops,
            schedule=None if schedule is None else str(schedule),
            exit_rule=exit_rule,
            flops_per_token=None if exit_rule is not None else flops_per_token(lm.model, schedule),
            task=protocol.task,
            metric=metric,
            weight=self.choice.weight if is_share else 0.0,
            values=values,
            standard_errors={name: _standard_error(values[name], questions[name]) for name in values},
            questions={name: scores for name, scores in questions.items() if scores},
            num_cut=lm.num_cut,
            seconds=seconds,
        )


def prepare_task(
    choice: TaskChoice,
    sources: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    seed: int = 0,
    chat_template: bool = False,
) -> PreparedTask:
    """Load a task's questions, make its prompts, and write down its protocol.

    Args:
        choice: Which task.
        sources: Where its questions may come from, see `local_splits`.
        limit: Take the first so many questions alone.
        num_fewshot: Examples before each question; None: the choice's own number.
        seed: Of the choice of examples.
        chat_template: Whether prompts will be put in each model's chat template.

    Raises:
        DataError: Its questions are nowhere, there are none, or they are of another schema.
    """
    try:
        with quiet_harness():
            task, source = load_task(choice, sources)
            if num_fewshot is not None:
                task.set_config(key="num_fewshot", value=num_fewshot)
            task.set_fewshot_seed(seed=seed)
            task.build_all_requests(limit=limit)
    except LoopformersError:
        raise
    except (
        jinja2.TemplateError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # templates, and functions of the task
        raise DataError(
            f"the questions of {choice.name} do not fit the task's templates ({first_line(error)}); give rows in the schema of "
            "the set that the harness's task names"
        ) from error
    if not task.instances:
        raise DataError(f"{source} contains no questions for {choice.name}; give a source that has some")
    prompts = [_plain(instance.args) for instance in task.instances]
    definition = {name: value for name, value in task.dump_config().items() if name in DEFINITION}
    protocol = Protocol(
        task=choice.name,
        version=str(task.VERSION),
        harness=importlib.metadata.version("lm_eval"),
        source=source,
        split=str(task.config.test_split if task.has_test_docs() else task.config.validation_split),
        num_questions=len({instance.doc_id for instance in task.instances}),
        limit=limit,
        num_fewshot=int(task.config.num_fewshot or 0),
        seed=seed,
        chat_template=chat_template,
        prompts_hash=hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        example="".join(part for part in prompts[0] if isinstance(part, str)),
        definition=_plain(definition),
    )
    return PreparedTask(task, choice, protocol, len(prompts))


def describe_model(
    model: Any, tokenizer: Any, name: str, *, max_length: int, training_flops: float | None = None
) -> ModelInfo:
    """Return what a results file says of a model."""
    return ModelInfo(
        hash=model_hash(model, tokenizer),
        name=name,
        kind=model.config.model_type,
        num_parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        max_length=max_length,
        trained_loops=model.config.num_loops if is_looped(model) else None,
        training_flops=training_flops,
    )


def score_model(
    model: Any,
    tokenizer: Any,
    name: str,
    tasks: Sequence[Prepared],
    *,
    schedules: Sequence[Schedule] | None = None,
    exit_rule: str | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    training_flops: float | None = None,
    results: Results | None = None,
    listener: Listener = lambda what, num_requests: None,
) -> Iterator[Results]:
    """Score a model on tasks, at each budget, and yield the grown results after each score.

    What `results` hold already, for the same model hash, budget and protocol, is not computed again.

    Args:
        model: Ours or another causal language model.
        tokenizer: Its tokenizer.
        name: What tables call it.
        tasks: In order.
        schedules: Runs of a looped model; None: the trained one. Other models have one run.
        exit_rule: Text of an exit rule, under which the schedules are the deepest runs.
        batch_size: Sequences a forward.
        max_length: See `LoopformersLM`.
        training_flops: Operations that its training took, where they are known.
        results: To go on from.
        listener: Is told of progress.

    Raises:
        ConfigError: `results` hold another protocol for a task, or a model without chat template is to use one.
    """
    grown = results or Results()
    for prepared in tasks:
        known = grown.protocol(prepared.protocol.task)
        if known is not None and known.fingerprint != prepared.protocol.fingerprint:
            raise ConfigError(
                f"the results so far have another protocol for {known.task}: {', '.join(known.differences(prepared.protocol))}; "
                "give another --output-dir"
            )
    if any(prepared.protocol.chat_template for prepared in tasks) and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"the tokenizer of {name} has no chat template; leave --chat-template out")
    runs: Sequence[Schedule | None] = [None]
    if is_looped(model):
        runs = schedules or [model.config.resolve_schedule()]
    info = None
    for schedule in runs:
        lm = LoopformersLM(
            model,
            tokenizer=tokenizer,
            schedule=schedule,
            exit_rule=exit_rule if is_looped(model) else None,
            batch_size=batch_size,
            max_length=max_length,
        )
        info = info or describe_model(model, tokenizer, name, max_length=lm.max_length, training_flops=training_flops)
        for prepared in tasks:
            what = f"{name}, {prepared.protocol.task}" + ("" if schedule is None else f", {_loops(schedule)}")
            rule = exit_rule if schedule is not None else None
            key = (info.hash, None if schedule is None else str(schedule), rule, prepared.protocol.task)
            if grown.find(key) is not None:
                listener(what, prepared.num_requests)
                continue
            listener(what, 0)
            lm.on_progress = functools.partial(listener, what)
            score = prepared.score(lm, info, schedule, rule)
            grown = grown.with_score(info, prepared.protocol, score)
            yield grown
    if results is not None or not tasks:
        yield grown


def flops_per_token(model: Any, schedule: Schedule | None) -> float:
    """Return the operations of a forward over `COST_SEQ_LEN` tokens, per token.

    Of other models than ours: two for each entry of a matrix that every token is multiplied with, and the attention scores.
    """
    config = model.config
    if is_looped(model):
        return float(config.flops_per_token(schedule=schedule, seq_len=COST_SEQ_LEN))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    entries = sum(p.numel() for p in model.parameters() if p.dim() == 2 and p is not embedding)
    if head is embedding:
        entries += embedding.numel()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scores = 4 * config.num_hidden_layers * config.num_attention_heads * width * COST_SEQ_LEN
    return float(2 * entries + scores)


def _metric_name(key: str) -> str:
    """`acc,none` is `acc`; other filters than none stay."""
    return key.removesuffix(",none")


def _main_metric(values: Mapping[str, float]) -> str:
    return "acc_norm" if "acc_norm" in values else next(iter(values))


def _of_questions(samples: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    name, _, chosen = metric.partition(",")
    found = [sample.get(name) for sample in samples if sample["filter"] == (chosen or "none")]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    return numbers if len(numbers) == len(found) else []


def _standard_error(value: float, questions: Sequence[float]) -> float | None:
    """Return the standard error over questions of a mean of theirs, or of exp(-mean); None of anything else."""
    if len(questions) < 2 or not all(map(math.isfinite, questions)):
        return None
    mean = statistics.fmean(questions)
    error = statistics.stdev(questions) / math.sqrt(len(questions))
    if math.isclose(value, mean, rel_tol=1e-9, abs_tol=1e-12):
        return error
    if -mean < 700 and math.isclose(value, math.exp(-mean), rel_tol=1e-9):  # perplexity of log-likelihoods
        return value * error
    return None


def _loops(schedule: Schedule) -> str:
    return f"{schedule.num_loops} loop{'s' if schedule.num_loops > 1 else ''}"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return json.loads(json.dumps(value, default=str, sort_keys=True))
