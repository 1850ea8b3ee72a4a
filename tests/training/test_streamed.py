"""A run on a stream resumes to the bit, reads nothing twice, and divides the documents over its ranks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from datasets import Dataset

from loopformers.data.stream_sources import DatasetShards, DocumentStream
from loopformers.data.streaming import StreamedWindows
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.errors import CheckpointError, ConfigError
from loopformers.testing import tiny_model
from loopformers.training.checkpoints import mark_complete
from loopformers.training.trainer import LoopTrainer, training_arguments


def build(folder, *, num_steps=6, seed=0, save_steps=3, stop_requested=None, **overrides):
    rows = Dataset.from_dict({"text": [f"document {i} tells of the sea " * (1 + i % 5) for i in range(50)]})
    documents = DocumentStream(DatasetShards(rows.to_iterable_dataset(num_shards=4), "sea"), "source 'sea'")
    tokenizer = bundled_tokenizer()
    stream = StreamedWindows(documents, tokenizer, 16, seed=seed, block_size=5, isolate_documents=True)
    arguments = training_arguments(folder, num_steps=num_steps, batch_size=2, save_steps=save_steps, **overrides)
    return LoopTrainer(tiny_model("flt", vocab_size=len(tokenizer)), arguments, stream, stop_requested=stop_requested)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit_and_replays_no_window(
    tmp_path, accumulation, monkeypatch
):
    options = {"gradient_accumulation_steps": accumulation}
    whole = build(tmp_path / "whole", save_steps=6, **options)
    whole.train()
    asked = iter([False, False, True])
    stopped = build(tmp_path / "parts", save_steps=6, stop_requested=lambda: next(asked), **options)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert json.loads((tmp_path / "parts/checkpoint-3/stream_0.json").read_text())["position"]["num_windows"] == (
        3 * 2 * accumulation
    )
    resumed = build(tmp_path / "parts", save_steps=6, **options)
    given = []
    windows = StreamedWindows.__iter__
    monkeypatch.setattr(StreamedWindows, "__iter__", lambda self: (given.append(w) or w for w in windows(self)))
    resumed.train(resume_from_checkpoint=True)
    for name, parameter in weights(whole).items():
        assert torch.equal(parameter, weights(resumed)[name])
    assert len(given) <= (3 + 1) * 2 * accumulation
    records = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    assert records[0] == records[1]


def test_a_checkpoint_of_another_stream_or_of_none_is_refused(tmp_path):
    build(tmp_path, num_steps=3).train()
    with pytest.raises(CheckpointError, match="seed=0 there and 1 here"):
        build(tmp_path, seed=1).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3/stream_0.json").unlink()
    with pytest.raises(CheckpointError, match=r"stream_0\.json is missing"):
        build(tmp_path).train(resume_from_checkpoint=True)
    mark_complete(tmp_path / "checkpoint-3", 3)  # a whole checkpoint of a run that streamed nothing
    with pytest.raises(
        CheckpointError, match=r"stream_0\.json does not exist; resume a checkpoint of a run that streamed"
    ):
        build(tmp_path).train(resume_from_checkpoint=True)


def test_worker_processes_are_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="dataloader_num_workers=1"):
        build(tmp_path, dataloader_num_workers=1).train()


def test_a_run_over_an_iterable_without_a_length_is_not_resumed_at_a_wrong_place(tmp_path):
    rows = [{"input_ids": list(range(5 + i, 14 + i)), "labels": list(range(5 + i, 14 + i))} for i in range(6)]
    data = Dataset.from_list(rows).to_iterable_dataset()
    arguments = training_arguments(tmp_path, num_steps=4, batch_size=2, save_steps=2)
    LoopTrainer(tiny_model("flt"), arguments, data).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    with pytest.raises(ConfigError, match=r"a run over a IterableDataset cannot be resumed.*StreamedWindows"):
        LoopTrainer(tiny_model("flt"), arguments, data).train(resume_from_checkpoint=True)
