"""A recipe whose text is streamed, and one whose windows keep documents apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from loopformers.data.stream_sources import STREAMED_CORPORA
from loopformers.data.streaming import StreamedWindows
from loopformers.errors import ConfigError, DataError
from loopformers.training.recipe import DataRecipe, Recipe
from loopformers.training.recipe_file import load
from loopformers.training.run import prepare
from loopformers.training.step_log import StepLog

WORDS = [
    "the",
    "whale",
    "and",
    "the",
    "sea",
    "said",
    "nothing",
    "to",
    "the",
    "captain",
    "of",
    "the",
    "ship",
    "that",
    "morning",
]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        rows = [{"id": f"{shard}-{i}", "text": " ".join(WORDS[i % 9 :] * 3) + f" {shard} {i}"} for i in range(30)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def streamed(recipe: Recipe, shards: Path, **fields: object) -> Recipe:
    data = dataclasses.replace(recipe.data, sources=(str(shards),), streaming=True, split_by="document", **fields)
    return dataclasses.replace(recipe, data=data)


def test_a_streamed_recipe_trains_and_scores_and_is_repeatable(recipe: Recipe, shards: Path, tmp_path: Path) -> None:
    losses = []
    for attempt in range(2):
        again = streamed(recipe, shards, fractions=(0.7, 0.2, 0.1), isolate_documents=True)
        training = dataclasses.replace(again.training, output_dir=str(tmp_path / f"run-{attempt}"))
        run = prepare(dataclasses.replace(again, training=training))
        assert isinstance(run.train_windows, StreamedWindows)
        assert 2 < run.bytes_per_token < 6
        assert "position_ids" in next(iter(run.train_windows))
        result = prepare(dataclasses.replace(again, training=training)).train()
        assert result.unigram_loss > 0
        losses.append([record["loss"] for record in StepLog(tmp_path / f"run-{attempt}" / "metrics.jsonl").read()])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 7


def test_windows_of_a_recipe_keep_documents_apart_on_request(recipe: Recipe) -> None:
    apart = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, isolate_documents=True))
    run = prepare(apart)
    assert "position_ids" in run.train_windows[0]
    assert "position_ids" not in run.validation_windows[0]


def test_a_stream_is_one_source_split_by_document() -> None:
    with pytest.raises(ConfigError, match="a stream reads one source"):
        DataRecipe(sources=("a", "b"), streaming=True)
    with pytest.raises(ConfigError, match="a stream reads one source"):
        DataRecipe(sources=("a",), streaming=True, split_by="tail")


def test_a_stream_too_short_for_a_window_is_refused(recipe: Recipe, shards: Path) -> None:
    with pytest.raises(DataError, match="fills no window of data"):
        prepare(streamed(recipe, shards, seq_len=100_000))


@pytest.mark.parametrize("name", ["flt-small", "flt-base", "loopformer-3x8", "loopformer-2x12", "loopformer-1x24"])
def test_full_size_recipes_stream_a_published_corpus(name: str) -> None:
    data = load(name).data
    assert data.streaming
    assert data.sources[0] in STREAMED_CORPORA
