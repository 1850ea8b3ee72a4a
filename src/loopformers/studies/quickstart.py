"""The quickstart: three looped systems trained side by side on real text, and what became of them.

A plain looped transformer (`lt`) and a fully looped one (`flt`) get the same data, size and optimiser at a depth where
the first stops training (arXiv 2605.18797), and one elastic model (`elastic-flt`) is trained to answer at any budget.

A run's folder:

    settings.json                what was asked for; another request is refused
    <system>.unfinished/         a system in training: checkpoints and logs; the same command continues it
    <system>/                    a trained one: model, tokenizer, metrics.jsonl, result.json
    results.json, report.html    the outcome, rewritten by each run

This module imports no torch: systems are trained in worker processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformers.errors import ConfigError, check_count
from loopformers.files import write_whole
from loopformers.folders import foreign_names, owned
from loopformers.limits import MAX_SEED
from loopformers.readers import read_json
from loopformers.records import make_record
from loopformers.studies.workers import Emit, Failed, TaskEvent, run_tasks
from loopformers.training.checkpoints import remove_all
from loopformers.training.step_log import METRICS_FILE, StepLog

__all__ = ["QuickstartOutcome", "QuickstartSettings", "SystemResult", "run_quickstart"]

RESULT_FILE = "result.json"
SETTINGS_FILE = "settings.json"
RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"


_COUNTS = (
    "num_loops", "num_layers", "hidden_size", "num_heads", "seq_len", "batch_size", "num_steps", "budgets",
    "num_validation_windows", "save_steps", "sample_budgets", "sample_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartSettings:
    """Everything that the outcome depends on.

    With the defaults `lt` collapsed and the other two trained on every seed that was tried (0 to 2).
    """

    systems: tuple[str, ...] = ("lt", "flt", "elastic-flt")
    """Presets to train, in the order of the report."""
    num_loops: int = 12
    """T."""
    num_layers: int = 3
    """N, unique layers."""
    hidden_size: int = 64
    """d."""
    num_heads: int = 2
    """Attention heads."""
    seq_len: int = 64
    """Tokens in a window."""
    batch_size: int = 8
    """Windows an update."""
    num_steps: int = 200
    """Updates."""
    matrix_lr: float = 0.03
    """Muon's rate of layer matrices. At the recipe's 0.02 and this size `lt` is still collapsing after 200 updates."""
    seed: int = 0
    """Of weights, data order and drawn trajectories."""
    budgets: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    """Loop counts to evaluate at."""
    num_validation_windows: int = 256
    """Windows scored, spread evenly over the validation split."""
    save_steps: int = 25
    """Updates between checkpoints."""
    prompt: str = "It was a fine morning, and the"
    """Text that samples continue."""
    sample_budgets: tuple[int, ...] = (1, 4, 12)
    """Loop counts to sample at."""
    sample_tokens: int = 40
    """Tokens in a sample."""
    source: str = "bundled"
    """Corpus, as `loopformers.data.corpora.load_splits` reads it."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                check_count(name, number)
        if self.seq_len < 2:
            raise ConfigError(f"seq_len={self.seq_len} leaves no token to predict; use at least 2")
        check_count("seed", self.seed, at_least=0, at_most=MAX_SEED)
        if not self.systems or len(set(self.systems)) < len(self.systems):
            raise ConfigError(f"systems={self.systems} must name at least one preset, each once")

    @classmethod
    def fast(cls, **overrides: Any) -> QuickstartSettings:
        """Return settings for a check in continuous integration: real, but too short to learn much."""
        small: dict[str, Any] = {
            "num_loops": 6,
            "num_layers": 2,
            "hidden_size": 48,
            "seq_len": 32,
            "num_steps": 60,
            "budgets": (1, 2, 3, 6, 8),
            "num_validation_windows": 64,
            "sample_budgets": (1, 6),
            "sample_tokens": 24,
        }
        return cls(**{**small, **overrides})


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemResult:
    """What became of one system; losses are in nats per token of the validation split."""

    system: str
    """Preset."""
    num_loops: int
    """T it was trained with."""
    num_parameters: int
    """Tied matrices once."""
    tokens_seen: int
    """Training tokens."""
    training_flops: float
    """Forward and backward, every loop and both trajectories."""
    unigram_loss: float
    """Loss of token frequencies alone: where a model sits that ignores its context."""
    loss: float
    """Loss at T loops."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Loss in bits per byte of text."""
    verdict: str
    """Whether it trained: see `loopformers.analysis.stability`."""
    reason: str
    """What the verdict rests on."""
    log_gradient_norm_std: float
    """Standard deviation of the log of the gradient norm before clipping: how far the norm swings."""
    last_residual_norm: float | None
    """Residual norm of the last loop at the last update; None where it was infinite."""
    budgets: tuple[dict[str, Any], ...]
    """One `BudgetResult` as a dict for each budget."""
    samples: tuple[dict[str, Any], ...]
    """`num_loops`, `prompt` and `continuation` of each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartOutcome:
    """What a run of the quickstart came to."""

    output_dir: Path
    """Its folder."""
    settings: QuickstartSettings
    """What was asked for."""
    results: tuple[SystemResult, ...]
    """Systems that are trained, in the order of the settings."""
    failures: tuple[Failed, ...]
    """Systems that failed."""
    summary: str
    """What was seen, in a few sentences computed from the results."""
    report: Path | None
    """The HTML page; None when no system is trained."""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "results": [dataclasses.asdict(result) for result in self.results],
            "failures": [{"system": failure.task, "error": failure.error} for failure in self.failures],
            "summary": self.summary,
            "report": None if self.report is None else str(self.report),
        }


def run_quickstart(
    settings: QuickstartSettings,
    output_dir: str | os.PathLike[str],
    *,
    jobs: int = 2,
    cache_dir: str | os.PathLike[str] | None = None,
    on_event: Callable[[TaskEvent], None] = lambda event: None,
) -> QuickstartOutcome:
    """Train what is not trained yet, and report on all.

    Args:
        settings: What to train.
        output_dir: The run's folder. Trained systems are kept and unfinished ones continued.
        jobs: Systems trained at the same time, each by a process with one thread; 1: in this process.
        cache_dir: Where the prepared corpus is kept; None: the Hugging Face cache.
        on_event: Told of progress: `Reported` events hold a `TrainingProgress`.

    Returns:
        The outcome; a system that failed is in `failures`, and the others are complete.

    Raises:
        ConfigError: The folder holds a run with other settings, or other files, or another process owns it.
        KeyboardInterrupt: Ctrl-C, after each running system saved a checkpoint.
    """
    check_count("jobs", jobs)
    with owned(output_dir):
        return _run_quickstart(settings, Path(output_dir), jobs, cache_dir, on_event)


def _run_quickstart(
    settings: QuickstartSettings,
    folder: Path,
    jobs: int,
    cache_dir: str | os.PathLike[str] | None,
    on_event: Callable[[TaskEvent], None],
) -> QuickstartOutcome:
    claim_folder(folder, settings)
    for system in settings.systems:
        remove_all(system_folder(folder, system, finished=True))  # what a run that was killed at its end has left
    # Last first: the elastic model costs most, and keeps one worker busy while the other trains two.
    missing = [system for system in reversed(settings.systems) if read_result(folder, system) is None]
    task = functools.partial(train_one, settings, folder, None if cache_dir is None else Path(cache_dir))
    failures = run_tasks(task, missing, jobs=jobs, on_event=on_event)
    results = [result for system in settings.systems if (result := read_result(folder, system)) is not None]
    return write_outcome(folder, settings, results, failures)


def train_one(
    settings: QuickstartSettings,
    folder: Path,
    cache_dir: Path | None,
    system: str,
    emit: Emit,
    stop_requested: Callable[[], bool],
) -> None:
    """Train one system: a task of `run_tasks`."""
    from loopformers.studies.quickstart_system import train_system  # torch, in the worker alone

    train_system(system, settings, folder, cache_dir=cache_dir, emit=emit, stop_requested=stop_requested)


def write_outcome(
    folder: Path, settings: QuickstartSettings, results: Sequence[SystemResult], failures: Sequence[Failed]
) -> QuickstartOutcome:
    """Write the report and `results.json`."""
    from loopformers.studies.quickstart_report import summarise, write_report  # matplotlib

    report = write_report(folder / REPORT_FILE, settings, results, folder) if results else None
    outcome = QuickstartOutcome(
        output_dir=folder,
        settings=settings,
        results=tuple(results),
        failures=tuple(failures),
        summary=summarise(results),
        report=report,
    )
    write_json(folder / RESULTS_FILE, outcome.to_json())
    return outcome


# -- the run's folder ------------------------------------------------------------------------------------------


def claim_folder(folder: Path, settings: QuickstartSettings) -> None:
    """Make the folder this run's own, or see that it is already. A claim without a system in training may be made anew.

    Raises:
        ConfigError: It holds another run, or something else.
    """
    asked = json.loads(json.dumps(dataclasses.asdict(settings)))
    path = folder / SETTINGS_FILE
    others = foreign_names(folder) if folder.exists() else []
    if path.exists() and others != [SETTINGS_FILE]:
        held: dict[str, Any] = read_json(
            path, error=ConfigError, remedy="choose another output_dir, or remove that folder"
        )
        if held != asked:
            names = [name for name in {**asked, **held} if asked.get(name) != held.get(name)]
            changes = ", ".join(f"{name}={asked.get(name)} (there: {held.get(name)})" for name in names)
            raise ConfigError(
                f"output_dir={str(folder)!r} holds a run with other settings: {changes}; give the same settings to "
                "continue it, or another output_dir"
            )
        return
    if others not in ([], [SETTINGS_FILE]):
        raise ConfigError(
            f"output_dir={str(folder)!r} holds files that are not a quickstart's; choose a new or an empty folder"
        )
    write_json(path, asked)


def system_folder(folder: Path, system: str, *, finished: bool) -> Path:
    """Return where a system lives."""
    return folder / (system if finished else f"{system}.unfinished")


def read_result(folder: Path, system: str) -> SystemResult | None:
    """Return a trained system's result, or None.

    Raises:
        CheckpointError: The file is damaged, or of another version.
    """
    path = system_folder(folder, system, finished=True) / RESULT_FILE
    if not path.exists():
        return None
    remedy = f"restore it, or remove {str(path.parent)!r} to train the system again"
    return make_record(SystemResult, read_json(path, remedy=remedy), path, remedy=remedy)


def read_records(folder: Path, system: str) -> list[dict[str, Any]]:
    """Return the step records of a trained system."""
    return StepLog(system_folder(folder, system, finished=True) / METRICS_FILE).read()


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2) + "\n")
