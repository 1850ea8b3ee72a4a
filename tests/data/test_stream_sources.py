from __future__ import annotations

import json

import pytest
from datasets import Dataset

from loopformers.data.corpora import load_documents
from loopformers.data.stream_sources import STREAMED_CORPORA, DatasetShards, DocumentStream, stream_documents
from loopformers.errors import DataError


def texts(stream):
    return [text for _, text in stream.documents()]


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for k in range(3):
        rows = {"text": [f"text {k} {i}" for i in range(9)], "id": [f"{k}-{i}" for i in range(9)], "score": [1.0] * 9}
        Dataset.from_dict(rows).to_parquet(folder / f"{k}.parquet")
    return folder


@pytest.mark.parametrize("name", STREAMED_CORPORA)
def test_named_corpora_read_local_shards_of_their_schema(shards, tmp_path, name):
    if STREAMED_CORPORA[name].id_column is None:
        Dataset.from_dict({"text": [f"text {i}" for i in range(5)]}).to_parquet(tmp_path / "a.parquet")
        shards = tmp_path
    stream = stream_documents(name, data_files=shards)
    assert stream.num_shards == len(list(shards.iterdir()))
    assert texts(stream)[0].startswith("text")


def test_a_published_corpus_out_of_reach_says_how_to_read_local_shards():
    with pytest.raises(DataError, match=r"'pile-deduplicated' cannot be streamed .* data_files="):
        stream_documents("pile-deduplicated")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_streamed_split_holds_the_documents_of_the_loaded_one(shards, tmp_path, split):
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(40)))
    fractions = (0.5, 0.25, 0.25)
    for source in (shards, jsonl):
        from loopformers.data.corpora import load_splits

        expected = load_splits(source, fractions=fractions, cache_dir=tmp_path / "cache")[split]["text"]
        assert texts(stream_documents(source, split, fractions=fractions)) == list(expected)


@pytest.mark.parametrize("source", ["bundled/sotu", "folder"])
def test_text_and_the_bundled_corpus_come_in_shards_too(tmp_path, source):
    if source == "folder":
        source = tmp_path / "texts"
        source.mkdir()
        for i in range(5):
            (source / f"{i}.txt").write_text(f"file {i}")
    stream = stream_documents(source, cache_dir=tmp_path / "cache")
    assert 1 < stream.num_shards <= 64
    assert texts(stream) == list(load_documents(source, cache_dir=tmp_path / "cache")["text"])


def test_rows_without_text_are_no_documents_and_rows_of_other_types_are_errors():
    rows = Dataset.from_dict({"text": ["a", "", " \n", "b"]}).to_iterable_dataset()
    assert texts(DocumentStream(DatasetShards(rows, "source 'x'"), "source 'x'")) == ["a", "b"]
    for column, message in (("body", "no column 'body'"), ("n", "type int in column 'n'")):
        rows = Dataset.from_dict({"text": ["a"], "n": [1]}).to_iterable_dataset()
        with pytest.raises(DataError, match=message):
            texts(DocumentStream(DatasetShards(rows, "source 'x'", column), "source 'x'"))


def test_missing_files_unknown_splits_and_folders_without_shards_are_refused(shards, tmp_path):
    with pytest.raises(DataError, match="no file at"):
        stream_documents("fineweb-edu", data_files=tmp_path / "none.parquet")
    with pytest.raises(DataError, match="did you mean 'validation'"):
        stream_documents(shards, "validatoin")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"no \.parquet file"):
        stream_documents("fineweb-edu", data_files=tmp_path)
    with pytest.raises(DataError, match="no file or folder"):
        stream_documents(tmp_path / "nowhere")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(DataError, match=r"bad\.parquet' is damaged or incomplete"):
        texts(stream_documents("fineweb-edu", data_files=tmp_path / "bad.parquet"))
