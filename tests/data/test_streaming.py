"""Streams lose and repeat nothing, on any number of ranks, and a resumed one goes on as if it had never stopped."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator

from loopformers.data import streaming
from loopformers.data.stream_sources import DatasetShards, DocumentStream, stream_documents
from loopformers.data.streaming import StreamedWindows
from loopformers.errors import CheckpointError, ConfigError, DataError
from loopformers.testing import tiny_model

NUM_DOCUMENTS = 61


def text_of(i):
    return f"document {i} " + "tells of the sea. " * (i * 7 % 11)


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """61 documents in five Parquet files of unequal size, rows in small groups, as published corpora have them."""
    folder = tmp_path_factory.mktemp("shards")
    bounds = [0, 20, 23, 40, 41, NUM_DOCUMENTS]
    for k, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows = {"text": [text_of(i) for i in range(start, end)], "id": [f"<urn:{i}>" for i in range(start, end)]}
        rows |= {"score": [3.5] * (end - start), "language": ["en"] * (end - start)}
        Dataset.from_dict(rows).to_parquet(folder / f"{k:03}.parquet", batch_size=4)
    return folder


@pytest.fixture(scope="session")
def stream(shards):
    return stream_documents("fineweb-edu", data_files=shards)


@pytest.fixture
def windows_of(stream, tokenizer):
    def build(documents=stream, seq_len=16, **options):
        return StreamedWindows(documents, tokenizer, seq_len, **{"block_size": 7, "seed": 3, **options})

    return build


def ids(windows, count=None):
    return [window["input_ids"].tolist() for window in itertools.islice(iter(windows), count)]


# -- nothing is lost, nothing repeated -------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, 1, 7, 1000])
@pytest.mark.parametrize("shard_by", ["shard", "document"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_share_the_documents_of_two_epochs_without_overlap_or_loss(
    windows_of, tokenizer, world_size, shard_by, block_size
):
    expected = Counter(text_of(i) for i in range(NUM_DOCUMENTS))
    found = Counter()
    for rank in range(world_size):
        windows = windows_of(
            rank=rank, world_size=world_size, shard_by=shard_by, block_size=block_size, num_epochs=2, seq_len=2
        )
        tokens = [token for window in ids(windows) for token in window]
        assert windows.num_dropped_tokens == (1 if tokens[-1] != tokenizer.eos_token_id else 0)
        tokens += [
            tokenizer.eos_token_id
        ] * windows.num_dropped_tokens  # of two-token windows only an end can be missing
        found.update(tokenizer.decode(tokens).split("<|endoftext|>")[:-1])
    assert found == Counter({text: 2 * count for text, count in expected.items()})


def test_without_shuffling_the_windows_are_those_of_the_packed_corpus(windows_of, tokenizer, shards):
    tokens = np.concatenate(
        [[*tokenizer(text_of(i))["input_ids"], tokenizer.eos_token_id] for i in range(NUM_DOCUMENTS)]
    )
    windows = windows_of(block_size=0, num_epochs=1)
    assert ids(windows) == tokens[: len(tokens) // 16 * 16].reshape(-1, 16).tolist()
    assert windows.num_dropped_tokens == len(tokens) % 16
    assert windows.state_dict()["position"]["num_documents"] == NUM_DOCUMENTS


def test_the_tail_of_an_epoch_opens_the_next(windows_of, tokenizer):
    one, two = windows_of(num_epochs=1, block_size=0), windows_of(num_epochs=2, block_size=0)
    total = len(ids(one)) * 16 + one.num_dropped_tokens
    assert len(ids(two)) == 2 * total // 16
    assert two.num_dropped_tokens == 2 * total % 16


def test_more_ranks_than_shards_fall_back_to_documents_or_are_refused(windows_of):
    assert windows_of(rank=6, world_size=7).state_dict()["stream"]["shard_by"] == "document"
    assert windows_of(rank=4, world_size=5).state_dict()["stream"]["shard_by"] == "shard"
    with pytest.raises(DataError, match=r"5 shard\(s\), too few for 7"):
        windows_of(rank=6, world_size=7, shard_by="shard")


def test_a_worker_process_reads_all_and_several_are_refused(windows_of, monkeypatch):
    monkeypatch.setattr(streaming, "get_worker_info", lambda: SimpleNamespace(num_workers=1, id=0))
    assert ids(windows_of(), 3)
    monkeypatch.setattr(streaming, "get_worker_info", lambda: SimpleNamespace(num_workers=2, id=1))
    with pytest.raises(ConfigError, match="dataloader_num_workers=2"):
        next(iter(windows_of()))


# -- order -----------------------------------------------------------------------------------------------------


def test_order_depends_on_seed_and_epoch_alone(windows_of):
    first = ids(windows_of(), 40)
    assert first == ids(windows_of(), 40)
    assert first != ids(windows_of(seed=4), 40)
    assert first != ids(windows_of(block_size=0), 40)
    second = windows_of(num_epochs=1)
    second.set_epoch(1)
    assert ids(second, 40) != first
    again = windows_of(num_epochs=1)
    assert ids(again, 40) == first
    assert ids(again, 40) == first, "each iteration begins at the beginning"


def test_shuffling_reaches_across_shards(windows_of, tokenizer):
    text = tokenizer.decode([t for window in ids(windows_of(num_epochs=1, block_size=1000)) for t in window])
    order = [int(part.split()[1]) for part in text.split("<|endoftext|>") if part.startswith("document")]
    assert sorted(order) != order
    assert len({i // 20 for i in order[:10]}) > 1


# -- resuming --------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    stop=st.integers(0, 90),
    block_size=st.sampled_from([0, 1, 7, 1000]),
    part=st.sampled_from([(0, 1), (1, 2), (2, 3), (5, 6)]),
    isolate=st.booleans(),
)
def test_a_resumed_stream_equals_an_uninterrupted_one(stream, tokenizer, stop, block_size, part, isolate):
    def build():
        options = {"block_size": block_size, "isolate_documents": isolate, "rank": part[0], "world_size": part[1]}
        return StreamedWindows(stream, tokenizer, 16, seed=3, **options)

    uninterrupted = list(itertools.islice(iter(build()), stop + 15))
    first = build()
    for _ in itertools.islice(iter(first), stop):
        pass
    resumed = build()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for expected, found in zip(uninterrupted[stop:], iter(resumed), strict=False):
        assert expected.keys() == found.keys()
        for name in expected:
            assert np.array_equal(expected[name], found[name])


def test_resuming_reads_one_block_again_and_tokenises_no_used_document(windows_of, monkeypatch):
    first = windows_of()
    ids(first, 90)
    position = first.state_dict()["position"]
    assert position["epoch"] == 0
    assert position["num_documents"] > 21
    resumed = windows_of()
    resumed.load_state_dict(first.state_dict())
    read, encoded = [], []
    holds, encode = DocumentStream.holds, resumed.encoder.encode
    monkeypatch.setattr(DocumentStream, "holds", lambda self, *row: read.append(row) or holds(self, *row))
    monkeypatch.setattr(resumed.encoder, "encode", lambda texts: encoded.extend(texts) or encode(texts))
    assert len(ids(resumed, 1)) == 1
    assert len(read) <= 2 * 7
    assert len(encoded) <= 2 * 7 - position["taken"]


def test_a_position_further_back_is_remembered(windows_of):
    windows = windows_of()
    taken = ids(windows, 30)
    resumed = windows_of()
    resumed.load_state_dict(windows.state_dict(num_windows=21))
    assert ids(resumed, 9) == taken[21:]
    with pytest.raises(DataError, match="num_windows=31 is not among the windows 0 to 30"):
        windows.state_dict(num_windows=31)


def test_a_resumed_stream_ends_where_the_uninterrupted_one_does(windows_of):
    whole = ids(windows_of(num_epochs=2))
    first = windows_of(num_epochs=2)
    stop = len(whole) - 5
    ids(first, stop)
    resumed = windows_of(num_epochs=2)
    resumed.load_state_dict(first.state_dict())
    assert ids(resumed) == whole[stop:]


@pytest.mark.parametrize("change", [{"seed": 4}, {"seq_len": 8}, {"rank": 1, "world_size": 2}, {"block_size": 0}])
def test_the_position_of_another_stream_is_refused(windows_of, change):
    state = windows_of().state_dict()
    with pytest.raises(CheckpointError, match=next(iter(change))):
        windows_of(**change).load_state_dict(state)
    with pytest.raises(CheckpointError, match="no position of a stream"):
        windows_of().load_state_dict({"position": {}})


@pytest.mark.parametrize("position", [None, 7, {}, {"waiting": ["x"]}, {"waiting": [-1]}, {"waiting": [], "epok": 3}])
def test_a_damaged_position_is_refused(windows_of, position):
    state = windows_of().state_dict() | {"position": position}
    with pytest.raises(CheckpointError, match="saved position of this stream is damaged"):
        windows_of().load_state_dict(state)


# -- documents apart, and the trainer --------------------------------------------------------------------------


def test_positions_restart_and_targets_pause_where_a_document_begins(windows_of, tokenizer):
    seen = 0
    for window in itertools.islice(iter(windows_of(isolate_documents=True)), 50):
        starts = [0, *(np.flatnonzero(window["input_ids"][:-1] == tokenizer.eos_token_id) + 1)]
        assert np.flatnonzero(window["position_ids"] == 0).tolist() == starts
        assert np.isin(np.diff(window["position_ids"])[np.diff(window["position_ids"]) < 1], range(-15, 1)).all()
        assert np.flatnonzero(window["labels"] == -100).tolist() == starts[1:]
        seen += len(starts) - 1
    assert seen > 5


@pytest.mark.parametrize("isolate", [False, True])
def test_transformers_trainer_trains_on_a_stream(windows_of, tokenizer, tmp_path, isolate):
    model = tiny_model("flt", vocab_size=len(tokenizer))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=3, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    before = model.lm_head.weight.detach().clone()
    trainer = Trainer(model, arguments, train_dataset=windows_of(isolate_documents=isolate))
    assert trainer.train().global_step == 3
    assert not torch.equal(before, model.lm_head.weight)


def test_the_default_collator_makes_batches(windows_of):
    loader = DataLoader(windows_of(isolate_documents=True), batch_size=3, collate_fn=default_data_collator)
    batch = next(iter(loader))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (3, 16)
    )


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "at least 2"),
        ({"seed": -1}, "seed=-1"),
        ({"block_size": -1}, "block_size=-1"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 of world_size=2"),
        ({"shard_by": "shards"}, "did you mean 'shard'"),
    ],
)
def test_arguments_out_of_range_are_refused(windows_of, options, message):
    with pytest.raises(ConfigError, match=message):
        windows_of(**options)


def test_a_part_without_documents_is_an_error_and_no_endless_loop(tokenizer):
    rows = Dataset.from_dict({"text": ["only one", " "]}).to_iterable_dataset(num_shards=2)
    windows = StreamedWindows(
        DocumentStream(DatasetShards(rows, "x"), "source 'x'"), tokenizer, 4, rank=1, world_size=2, block_size=0
    )
    with pytest.raises(DataError, match="no document for rank 1 of 2"):
        next(iter(windows))
