"""What stands in a run's folder beside checkpoints and model, and whether a recipe may have it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformers import __version__
from loopformers.data.fingerprints import corpus_fingerprint
from loopformers.errors import ConfigError
from loopformers.folders import check_free, foreign_names
from loopformers.readers import read_json
from loopformers.records import make_record
from loopformers.training.checkpoints import checkpoint_folders
from loopformers.training.launcher import process_rank
from loopformers.training.recipe import Recipe, differences
from loopformers.training.recipe_file import load
from loopformers.training.step_log import METRICS_FILE

__all__ = [
    "CORPUS_FILE",
    "RECIPE_FILE",
    "RESULT_FILE",
    "VALIDATION_FILE",
    "VERSIONS_FILE",
    "RunResult",
    "check_corpus",
    "check_folder",
    "corpus_fingerprints",
    "read_result",
    "versions",
]

RECIPE_FILE = "recipe.yaml"
VERSIONS_FILE = "versions.json"
CORPUS_FILE = "corpus.json"
"""Holds the fingerprint of each source of text, by its name in the recipe."""
VALIDATION_FILE = "validation.jsonl"
RESULT_FILE = "result.json"

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run came to; losses in nats per token of the validation split."""

    fingerprint: str
    """Of the recipe."""
    steps: int
    """Updates."""
    tokens_seen: int
    """Training tokens."""
    training_flops: float
    """Forward and backward, every loop and both trajectories."""
    num_parameters: int
    """Tied matrices once."""
    unigram_loss: float
    """Loss of token frequencies alone."""
    loss: float
    """Loss at the trained number of loops."""
    verdict: str
    """Whether it trained: see `loopformers.analysis.stability`."""
    reason: str
    """What the verdict rests on."""
    budgets: tuple[dict[str, Any], ...]
    """One `BudgetResult` as a dict for each budget, the trained one first."""
    verdict_since: int | None = None
    """Update since which the verdict that is made during training has been the last one."""
    skipped_steps: int = 0
    """Updates left out because a number was not finite."""


def check_folder(recipe: Recipe, *, compare: bool = True) -> None:
    """Check that the output folder is new, empty, or holds this recipe's run, and that nobody else is using it.

    A folder that an earlier start claimed, and where nothing was trained, may be claimed by any recipe. Writes nothing.

    Args:
        recipe: As resolved.
        compare: Whether to compare it with the run that the folder holds.

    Raises:
        ConfigError: It is in use, cannot be written, or holds another run or files that are no run's.
    """
    folder = Path(recipe.training.output_dir)
    existing = _first_that_exists(folder)
    if not existing.is_dir():
        raise ConfigError(f"training.output_dir={str(folder)!r}: {str(existing)!r} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"training.output_dir={str(folder)!r} cannot be written: no permission for {str(existing)!r}; give another folder"
        )
    if not folder.exists():
        return
    if process_rank() == 0:  # the first process of a run owns its folder for all of them
        check_free(folder)
    if not (folder / RECIPE_FILE).exists():
        if foreign_names(folder):
            raise ConfigError(
                f"training.output_dir={str(folder)!r} contains files of something other than a training run; choose a new or an "
                "empty folder"
            )
        return
    if not compare or not holds_work(folder):
        return
    changed = differences(recipe, load(folder / RECIPE_FILE))
    if changed:
        changes = ", ".join(f"{key}={new!r} (there: {old!r})" for key, (new, old) in changed.items())
        raise ConfigError(
            f"training.output_dir={str(folder)!r} holds another run: {changes}; give the same recipe to continue it, or "
            "another training.output_dir"
        )


def _first_that_exists(folder: Path) -> Path:
    try:
        return next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except FileNotFoundError as error:
        raise ConfigError("the working directory has been removed; change to one that exists") from error
    except (OSError, ValueError) as error:  # a name that is too long, or holds NUL
        raise ConfigError(f"training.output_dir={str(folder)!r} is not a path ({error}); give another name") from error


def holds_work(folder: Path) -> bool:
    """Whether a run's folder holds more than its claim: a checkpoint, whole or not, a record or a result."""
    metrics = folder / METRICS_FILE
    has_records = metrics.exists() and metrics.stat().st_size > 0
    return has_records or (folder / RESULT_FILE).exists() or bool(checkpoint_folders(folder))


def corpus_fingerprints(recipe: Recipe) -> dict[str, str] | None:
    """Return the fingerprint of each source of a recipe's text; None where a task makes the rows."""
    if recipe.task is not None:
        return None
    data = recipe.data
    columns = {"text_column": data.text_column, "id_column": data.id_column}
    return {source: corpus_fingerprint([source], **columns) for source in data.sources}


def check_corpus(folder: Path, found: Mapping[str, str] | None) -> None:
    """Raise ConfigError where the text is not that of the run which a folder holds.

    Args:
        folder: Of the run; where it has no fingerprints, those of its last checkpoint count, and runs of earlier versions
            have none.
        found: See `corpus_fingerprints`.
    """
    places = [folder, *reversed(checkpoint_folders(folder))]
    file = next((place / CORPUS_FILE for place in places if (place / CORPUS_FILE).exists()), None)
    if found is None or file is None or not holds_work(folder):
        return
    began: dict[str, Any] = read_json(file, remedy="restore it, or remove it to continue with the text as it is now")
    changed = [source for source in found if began.get(source) != found[source]]
    if changed:
        raise ConfigError(
            f"the text of data.sources={changed} has changed since the run in {str(folder)!r} began (fingerprint "
            f"{began.get(changed[0])} then, {found[changed[0]]} now); restore it, or give another training.output_dir"
        )


def read_result(folder: Path) -> RunResult | None:
    """Return the result of a finished run, or None.

    Raises:
        CheckpointError: The file is damaged, or of another version.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    remedy = "restore it, or remove it and run the same command again, which recreates it from the last checkpoint"
    return make_record(RunResult, read_json(path, remedy=remedy), path, remedy=remedy)


def versions() -> Mapping[str, Any]:
    """Return what a run rests on: Python, packages, and the commit of the repository in the working folder, if any."""
    return {
        "python": platform.python_version(),
        "loopformers": __version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": None if (status := _git("status", "--porcelain")) is None else bool(status),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
