from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from loopformers import LoopedForCausalLM
from loopformers.cli import quickstart as command
from loopformers.errors import ConfigError
from loopformers.studies.quickstart import QuickstartOutcome, QuickstartSettings, run_quickstart
from loopformers.studies.workers import Finished, Reported, Started, TaskEvent

WORDS = ["the", "ship", "and", "whale", "of", "a", "state", "union", "dear", "lady", "house", "sea", "captain", "is"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of small documents, and a cache for what is prepared from it."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choices(WORDS, k=120)) + ".\n")
    return folder, tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def settings(corpus: tuple[Path, Path]) -> QuickstartSettings:
    return QuickstartSettings.fast(
        source=str(corpus[0]), num_loops=3, num_layers=1, hidden_size=24, num_steps=8, seq_len=16, batch_size=3,
        budgets=(1, 2, 5), num_validation_windows=7, sample_budgets=(1, 3), sample_tokens=4, save_steps=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(corpus: tuple[Path, Path]) -> Callable[..., QuickstartOutcome]:
    def run(settings: QuickstartSettings, folder: Path, **options: object) -> QuickstartOutcome:
        return run_quickstart(settings, folder, cache_dir=corpus[1], **{"jobs": 1, **options})

    return run


@pytest.fixture(scope="module")
def outcome(
    settings: QuickstartSettings, run: Callable[..., QuickstartOutcome], tmp_path_factory: pytest.TempPathFactory
) -> QuickstartOutcome:
    return run(settings, tmp_path_factory.mktemp("runs") / "first")


def test_every_system_is_trained_scored_and_loadable(outcome: QuickstartOutcome, settings: QuickstartSettings) -> None:
    assert [result.system for result in outcome.results] == list(settings.systems)
    assert outcome.failures == ()
    for result in outcome.results:
        folder = outcome.output_dir / result.system
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, 9))
        assert records[-1]["loss"] < records[0]["loss"]
        assert [budget["num_loops"] for budget in result.budgets] == [1, 2, 5]
        assert result.tokens_seen == 8 * 3 * 16
        assert result.loss < result.unigram_loss + 3
        assert [sample["num_loops"] for sample in result.samples] == [1, 3]
        assert all(sample["prompt"].startswith("It was a fine") for sample in result.samples)
        model = LoopedForCausalLM.from_pretrained(folder)
        assert model.config.num_parameters() == result.num_parameters
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("the whale", return_tensors="pt").input_ids
        assert model.generate(ids, num_loops=2, max_new_tokens=3).shape[1] == ids.shape[1] + 3
        assert not list(folder.glob("checkpoint-*"))
    assert sorted(path.name for path in outcome.output_dir.iterdir()) == sorted(
        ["settings.json", "results.json", "report.html", *settings.systems]
    )


def test_the_page_stands_alone_and_results_are_plain_json(outcome: QuickstartOutcome) -> None:
    page = (outcome.output_dir / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|<script|@import""", page)
    assert page.count("data:image/svg+xml;base64,") == 5  # loss, gradient norm, two of residual norms, budgets
    for result in outcome.results:
        assert result.system in page
    held = json.loads((outcome.output_dir / "results.json").read_text())
    assert held == json.loads(json.dumps(outcome.to_json()))
    assert held["summary"] == outcome.summary
    for result in outcome.results:
        assert f"{result.system} ({result.loss:.2f} nats per token" in outcome.summary


def test_trained_systems_are_kept_and_other_settings_refused(
    outcome: QuickstartOutcome, settings: QuickstartSettings, run: Callable[..., QuickstartOutcome], tmp_path: Path
) -> None:
    events: list[TaskEvent] = []
    again = run(settings, outcome.output_dir, on_event=events.append)
    assert events == []
    assert again.results == outcome.results
    with pytest.raises(ConfigError, match=r"other settings: seed=1 \(there: 0\)"):
        run(dataclasses.replace(settings, seed=1), outcome.output_dir)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a quickstart's"):
        run(settings, tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        run(settings, tmp_path / "precious.txt")


def test_an_interrupted_run_continues_and_ends_as_if_uninterrupted(
    outcome: QuickstartOutcome, settings: QuickstartSettings, run: Callable[..., QuickstartOutcome], tmp_path: Path
) -> None:
    first, second, third = reversed(settings.systems)

    def interrupt(event: TaskEvent) -> None:
        if isinstance(event, Reported) and event.task == second and event.value.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "run", on_event=interrupt)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"settings.json", first, f"{second}.unfinished"}

    events: list[TaskEvent] = []
    continued = run(settings, tmp_path / "run", on_event=events.append)
    assert [event.task for event in events if isinstance(event, Started)] == [second, third]
    steps = [event.value.step for event in events if isinstance(event, Reported) and event.task == second]
    assert steps == [6, 7, 8]
    assert continued.results == outcome.results
    for system in settings.systems:
        weights = [
            LoopedForCausalLM.from_pretrained(folder / system).state_dict()
            for folder in (outcome.output_dir, tmp_path / "run")
        ]
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
        logs = [(folder / system / "metrics.jsonl").read_text() for folder in (outcome.output_dir, tmp_path / "run")]
        assert logs[0] == logs[1]


def test_a_system_that_fails_in_its_worker_leaves_the_others_trained(
    settings: QuickstartSettings,
    run: Callable[..., QuickstartOutcome],
    corpus: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = dataclasses.replace(settings, systems=("flt", "ftl"), num_steps=2)
    monkeypatch.setattr(QuickstartSettings, "fast", lambda seed: small)
    monkeypatch.setattr("loopformers.studies.quickstart.run_quickstart", run)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    folder = tmp_path / "run"
    code = command.run(parser.parse_args(["--fast", "--json", "--jobs", "2", "--output-dir", str(folder)]))
    printed = capsys.readouterr()
    assert code == 1
    held = json.loads(printed.out)
    assert [result["system"] for result in held["results"]] == ["flt"]
    assert held["failures"][0]["system"] == "ftl"
    assert "preset='ftl' is not known; did you mean 'flt'?" in held["failures"][0]["error"]
    assert "ftl: failed: ConfigError" in printed.err
    assert "flt: done" in printed.err
    assert (folder / "flt" / "model.safetensors").exists()


def test_the_command_prints_tables_and_says_how_to_continue(
    outcome: QuickstartOutcome,
    settings: QuickstartSettings,
    run: Callable[..., QuickstartOutcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(QuickstartSettings, "fast", lambda seed: settings)
    monkeypatch.setattr("loopformers.studies.quickstart.run_quickstart", run)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(["--fast", "--jobs", "1", "--output-dir", str(outcome.output_dir)])
    assert command.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "M = 5" in printed
    assert " ".join(outcome.summary.split()) in " ".join(printed.split())

    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loopformers.studies.quickstart.run_quickstart", stop)
    assert command.run(arguments) == 130
    assert "same command continues" in capsys.readouterr().err


def test_progress_events_reach_every_step(
    settings: QuickstartSettings, run: Callable[..., QuickstartOutcome], tmp_path: Path
) -> None:
    events: list[TaskEvent] = []
    run(dataclasses.replace(settings, systems=("flt",), num_steps=2), tmp_path / "run", on_event=events.append)
    assert [type(event) for event in events] == [Started, Reported, Reported, Finished]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_steps", 0), ("budgets", (1, 0)), ("seq_len", 1), ("systems", ()), ("seed", -1), ("systems", ("lt", "lt"))],
)
def test_illegal_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        QuickstartSettings(**{field: value})
