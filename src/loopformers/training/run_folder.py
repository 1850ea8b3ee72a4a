"""What stands in a run's folder beside checkpoints and model, and whether a recipe may have it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformers import __version__
from loopformers.errors import ConfigError
from loopformers.training.recipe import Recipe, differences
from loopformers.training.recipe_file import load

__all__ = [
    "RECIPE_FILE",
    "RESULT_FILE",
    "VALIDATION_FILE",
    "VERSIONS_FILE",
    "RunResult",
    "check_folder",
    "read_result",
    "versions",
]

RECIPE_FILE = "recipe.yaml"
VERSIONS_FILE = "versions.json"
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
    """Raise ConfigError unless the output folder is new, empty, or holds this recipe's run. Writes nothing.

    Args:
        recipe: As resolved.
        compare: Whether to compare it with the run that the folder holds.
    """
    folder = Path(recipe.training.output_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"training.output_dir={str(folder)!r}: {str(existing)!r} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"training.output_dir={str(folder)!r} cannot be written: no permission for {str(existing)!r}; give another folder"
        )
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / RECIPE_FILE).exists():
        raise ConfigError(
            f"training.output_dir={str(folder)!r} holds files that are no run's of loopformers train; choose a new or an "
            "empty folder"
        )
    if not compare:
        return
    changed = differences(recipe, load(folder / RECIPE_FILE))
    if changed:
        changes = ", ".join(f"{key}={new!r} (there: {old!r})" for key, (new, old) in changed.items())
        raise ConfigError(
            f"training.output_dir={str(folder)!r} holds another run: {changes}; give the same recipe to continue it, or "
            "another training.output_dir"
        )


def read_result(folder: Path) -> RunResult | None:
    """Return the result of a finished run, or None."""
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    return RunResult(**{**fields, "budgets": tuple(fields["budgets"])})


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
