"""A stream reads exactly what a load reads, from every source, and fails with the same error."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopformers.data import documents as reader
from loopformers.data import unpack
from loopformers.data.corpora import load_documents, load_splits
from loopformers.data.stream_sources import stream_documents
from loopformers.data.streaming import StreamedWindows
from loopformers.errors import DataError

COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
            ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}  # fmt: skip

NAMES = ["a", "b [1]", "c*?", "d e", "it's", 'say "x"', "new\nline", "é日本", "%41", "{x,y}", "-n", "~", "a.b"]

TEXTS = ["one", "two\r\nlines\n", " padded ", "", " \n\t", "Über 日本 🙂", "nul\0", "\u2028 and \x85", "2020-01-01T00:00:00",
         "one", "12", "\ufeffmark", '"quoted\\"', "null"]  # fmt: skip


def by_load(source, cache, split=None, **options):
    try:
        return [(row["id"], row["text"]) for row in load_documents(source, split, cache_dir=cache, **options)]
    except DataError as error:
        return str(error)


def by_stream(source, split=None, **options):
    try:
        return list(stream_documents(source, split, **options).documents())
    except DataError as error:
        return str(error)


def write(draw, folder, name, rows):
    """Write rows as a file of a random kind."""
    kind = draw.choice(["text", "jsonl", "json", "pretty", "parquet", "arrow", "stream"])
    match kind:
        case "text":
            mark = draw.choice(["", "\ufeff"])
            content = (mark + draw.choice(["\n", "\r\n", "\r"]).join(row["text"] for row in rows)).encode()
            suffix = draw.choice([".txt", ".md", ".TXT"])
        case "jsonl":
            blank = draw.choice(["", "\n", " \r\n"])
            lines = (json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows)
            content = (draw.choice(["", "\ufeff"]) + "".join(line + "\r\n" + blank for line in lines)).encode()
            suffix = draw.choice([".jsonl", ".ndjson", ".json"])
        case "json":
            content, suffix = json.dumps(rows).encode(), ".json"
        case "pretty":
            content, suffix = json.dumps(rows, indent=1).encode(), ".json"
        case _:
            columns = {"text": pa.array([row["text"] for row in rows], draw.choice([pa.string(), pa.large_string()]))}
            columns["id"] = pa.array([row.get("id") for row in rows])
            columns["n [x]"] = pa.array([row.get("n") for row in rows])
            table = pa.table(columns)
            path = folder / f"{name}.{'parquet' if kind == 'parquet' else 'arrow'}"
            if kind == "parquet":
                pq.write_table(table, path, row_group_size=3)
            else:
                with (pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream)(str(path), table.schema) as writer:
                    writer.write_table(table, max_chunksize=3)
            return
    packed = draw.choice(list(COMPRESS))
    (folder / f"{name}{suffix}{packed}").write_bytes(COMPRESS[packed](content))


def corpus(draw, folder):
    """Files of all kinds, in folders of odd names; returns how many rows there are."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(draw.randint(1, 6)):
        place = folder / "/".join(draw.sample(NAMES, draw.randint(0, 2)))
        place.mkdir(parents=True, exist_ok=True)
        rows = []
        for _ in range(draw.randint(1, 8)):
            row = {"text": draw.choice(TEXTS), "id": draw.choice([None, 7, 8]), "n": draw.choice([1, None])}
            rows.append(row)
        write(draw, place, f"{number}{draw.choice(NAMES)}", rows)
    if draw.random() < 0.3:
        (folder / "empty.jsonl").touch()
        (folder / "empty.txt").touch()
        (folder / ".hidden.txt").write_text("no")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_folder_gives_the_same_documents_either_way(tmp_path_factory, seed):
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("corpus") / draw.choice(NAMES)
    corpus(draw, folder)
    for source in [folder, *(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")]:
        loaded = by_load(source, folder.parent / "cache")
        assert by_stream(source) == loaded
        assert not isinstance(loaded, str) or "contains no text" in loaded


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_damage_gives_the_same_error_that_names_the_file(tmp_path_factory, seed):
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("corpus")
    corpus(draw, folder)
    victim = draw.choice([path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size])
    content = bytearray(victim.read_bytes())
    match draw.choice(["cut", "flip", "bytes", "foreign"]):
        case "cut":
            del content[draw.randrange(len(content)) :]
        case "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case "bytes":
            content[draw.randrange(len(content)) :] = b"\xff\xfe\x00"
        case _:
            content[:0] = b"PK\x03\x04"
    victim.write_bytes(content)
    loaded = by_load(folder, folder.parent / "cache")
    assert by_stream(folder) == loaded
    if isinstance(loaded, str) and "contains no text" not in loaded:
        assert repr(str(victim)) in loaded


@pytest.mark.parametrize("split_by", ["document", "id"])
def test_splits_are_the_same_either_way(tmp_path, split_by):
    rows = [{"text": f"text {i % 70}", "id": i % 90} for i in range(200)]
    (tmp_path / "a [1].jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:120]))
    pq.write_table(pa.Table.from_pylist(rows[120:]), tmp_path / "b.parquet")
    options = {"fractions": (0.5, 0.25, 0.25), "split_by": split_by}
    splits = load_splits(tmp_path, cache_dir=tmp_path / "cache", **options)
    for name, split in splits.items():
        assert [text for _, text in stream_documents(tmp_path, name, **options).documents()] == list(split["text"])
    key = "text" if split_by == "document" else "id"
    seen = [set(split[key]) for split in splits.values()]
    assert sum(map(len, seen)) == len(set().union(*seen))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow"])
def test_a_stream_of_any_kind_resumes_within_a_file(tmp_path, tokenizer, suffix):
    rows = [{"text": f"document {i} of the sea" if i % 5 else " ", "id": str(i)} for i in range(150)]
    path = tmp_path / f"a{suffix}"
    match suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=11)
        case ".arrow":
            with pa.ipc.new_file(str(path), pa.Table.from_pylist(rows).schema) as writer:
                writer.write_table(pa.Table.from_pylist(rows), max_chunksize=13)
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case _:
            lines = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
            path.write_bytes(COMPRESS[suffix.removeprefix(".jsonl")](lines))

    def windows():
        return StreamedWindows(stream_documents(path), tokenizer, 8, block_size=4, num_epochs=2)

    whole = [window["input_ids"].tolist() for window in windows()]
    for stop in (0, 1, 40, 97, len(whole) - 1):
        first, resumed = windows(), windows()
        for _, _ in zip(range(stop), first, strict=False):
            pass
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict(stop))))
        assert [window["input_ids"].tolist() for window in resumed] == whole[stop:]


def test_the_position_in_text_that_has_changed_is_refused(tmp_path, tokenizer):
    from loopformers.errors import CheckpointError

    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one and two"}\n{"text": "three"}\n')
    state = StreamedWindows(stream_documents(path), tokenizer, 2).state_dict()
    path.write_text('{"text": "one and too"}\n{"text": "three"}\n')
    with pytest.raises(CheckpointError, match=r"position of another stream .corpus="):
        StreamedWindows(stream_documents(path), tokenizer, 2).load_state_dict(state)


# -- rows that are refused, with their lines -------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n\n{"text": ' + DEEP.encode() + b"}\n", r"line 3, is nested too deeply"),
        ("a.json", DEEP.encode(), r"line 1, is nested too deeply"),
        ("a.json", b'[\n{"a":' * 60_000, r"line 1, is nested too deeply|perhaps cut off"),
        ("a.jsonl", b'{"text": "a", "id": ' + b"9" * 5000 + b"}", r"line 1, is not readable JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}\n', r"line 2, has the key 'text' twice"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"line 2, has no column 'text'.* its columns are body"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', r"line 2, has no string in column 'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"line 2, has a value of type int"),
        ("a.jsonl", b'{"text": "a"}\n7\n', r"line 2, holds int, and each row must be an object"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"line 2, is an array among other values"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', r"line 1, holds half of a surrogate pair"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"line 2, is not UTF-8 text \(byte 0xe9\).*iconv"),
        ("a.txt", b"one\ntwo\r\n\xe9", r"line 3, is not UTF-8 text \(byte 0xe9\).*iconv"),
        ("a.txt", "one".encode("utf-16"), r"line 1, is not UTF-8 text \(byte 0xff\)"),
        ("a.txt.gz", gzip.compress(b"one" * 99, mtime=0)[:-9], r"is damaged or incomplete \(Compressed file ended"),
        ("a.txt.bz2", b"BZh9nothing", r"is damaged or incomplete"),
        ("a.txt.xz", b"nothing", r"is damaged or incomplete"),
        ("a.txt.zst", b"nothing", r"is damaged or incomplete"),
        ("a.parquet", b"PAR1nothing", r"is damaged or incomplete"),
        ("a.arrow", b"nothing", r"is damaged or incomplete"),
    ],
)
def test_a_row_that_is_no_document_is_refused_with_its_file_and_line(tmp_path, name, content, message):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    loaded = by_load(tmp_path / "corpus", tmp_path / "cache")
    assert by_stream(tmp_path / "corpus") == loaded
    with pytest.raises(DataError, match=rf"corpus/{name}'.* ?{message}"):
        load_documents(tmp_path / "corpus", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl.xz", ".jsonl.zst", ".parquet", ".arrow"])
def test_an_empty_shard_of_any_kind_holds_no_document(tmp_path, suffix):
    (tmp_path / f"a{suffix}").touch()
    (tmp_path / "b.txt").write_text("text")
    loaded = by_load(tmp_path, tmp_path / "cache")
    assert loaded == by_stream(tmp_path) == [("b.txt", "text")]


def test_a_compressed_file_that_grows_without_end_is_refused_before_it_fills_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "ALWAYS_UNPACKED", 1 << 20)
    for suffix, compress in list(COMPRESS.items())[1:]:
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(compress(b"a" * (3 << 20)))
        with pytest.raises(DataError, match=r"grows to more than 200 times its .* bytes"):
            load_documents(path, cache_dir=tmp_path / "cache")
        path.write_bytes(compress(b"a" * (1 << 20)))
        assert len(load_documents(path, cache_dir=tmp_path / "cache")["text"][0]) == 1 << 20


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst", ".jsonl.xz"])
def test_memory_stays_small_while_a_file_that_grows_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(unpack, "ALWAYS_UNPACKED", 1 << 20)
    monkeypatch.setattr(unpack, "MAX_EXPANSION", 20)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESS[suffix[suffix.rindex(".") :]](b" " * (24 << 20)))
    tracemalloc.start()
    try:
        assert "grows to more than 20 times" in by_stream(path)
        assert tracemalloc.get_traced_memory()[1] < 14 << 20, "of which xz needs 8 for its dictionary"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".arrow", ".parquet"])
def test_reading_takes_the_memory_of_a_few_rows(tmp_path, suffix):
    rows = [{"text": "word " * 400} for _ in range(6000)]
    path = tmp_path / f"a{suffix}"
    match suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".arrow":
            with pa.ipc.new_file(str(path), pa.Table.from_pylist(rows).schema) as writer:
                writer.write_table(pa.Table.from_pylist(rows))
        case _:
            path.write_bytes(
                COMPRESS[suffix.removeprefix(".jsonl")]("".join(json.dumps(row) + "\n" for row in rows).encode())
            )
    del rows
    stream = stream_documents(path)
    tracemalloc.start()
    try:
        assert sum(len(text) for _, text in stream.documents()) == 12_000_000
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_document_beyond_the_limit_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reader, "MAX_DOCUMENT_BYTES", 3000)
    text = "word " * 700
    (tmp_path / name).write_text({"a.txt": text, "a.json": json.dumps([text], indent=1)}.get(name, json.dumps(text)))
    loaded = by_load(tmp_path / name, tmp_path / "cache")
    assert "more than 3,000 bytes" in loaded
    assert by_stream(tmp_path / name) == loaded


# -- the file system -------------------------------------------------------------------------------------------


def test_pipes_devices_and_folders_with_a_suffix_are_refused_by_what_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    for name, message in (("pipe", "not a regular file"), ("zero", "not a regular file"), ("gone", "does not exist")):
        loaded = by_load(tmp_path / f"{name}.txt", tmp_path / "cache")
        assert f"{name}.txt' " in loaded
        assert message in loaded
        assert by_stream(tmp_path / f"{name}.txt") == loaded


@pytest.mark.parametrize(
    ("number", "cause"), [(13, "Permission denied"), (5, "Input/output error"), (2, "does not exist")]
)
def test_a_file_that_cannot_be_read_is_named_with_its_cause(tmp_path, monkeypatch, number, cause):
    path = tmp_path / "closed.txt"
    path.write_text("text")

    def refuse(self, *arguments, **options):
        if self == path:
            raise OSError(number, os.strerror(number), str(self))
        return whole_open(self, *arguments, **options)

    whole_open = Path.open

    monkeypatch.setattr("pathlib.Path.open", refuse)
    loaded = by_load(path, tmp_path / "cache")
    assert loaded.startswith(f"file {str(path)!r}")
    assert cause in loaded
    assert "UTF-8" not in loaded
    assert by_stream(path) == loaded


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", str(folder)))
        return iter(())

    monkeypatch.setattr("os.walk", walk)
    loaded = by_load(tmp_path, tmp_path / "cache")
    assert "cannot be listed (Permission denied)" in loaded
    assert by_stream(tmp_path) == loaded


def test_a_file_that_is_removed_after_the_folder_was_listed_is_named(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    stream = stream_documents(tmp_path)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt' does not exist, or was removed"):
        list(stream.documents())


@pytest.mark.parametrize("number", [28, 13, 30])
def test_a_cache_that_cannot_be_written_is_named_and_not_the_text(tmp_path, monkeypatch, number):
    (tmp_path / "a.txt").write_text("text")

    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("loopformers.data.document_cache.os.replace", full)
    with pytest.raises(
        DataError, match=rf"cannot be kept in .*cache.*{os.strerror(number)}.*writable cache_dir"
    ) as found:
        load_documents(tmp_path / "a.txt", cache_dir=tmp_path / "cache")
    assert "a.txt" not in str(found.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_cache_dir_that_is_a_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be kept in '.*file' \(Not a directory"):
        load_documents(tmp_path / "a.txt", cache_dir=tmp_path / "file")


@pytest.mark.parametrize("damage", ["cut", "no description", "other description"])
def test_kept_documents_that_are_damaged_are_read_again(tmp_path, damage):
    (tmp_path / "a.txt").write_text("text of the file")
    expected = by_load(tmp_path / "a.txt", tmp_path / "cache")
    (kept,) = (tmp_path / "cache").rglob("*.documents")
    match damage:
        case "cut":
            kept.write_bytes(kept.read_bytes()[:-20])
        case "no description":
            kept.with_suffix(".bytes").unlink()
        case _:
            kept.with_suffix(".bytes").write_text("[]")
    assert by_load(tmp_path / "a.txt", tmp_path / "cache") == expected


# -- bytes -----------------------------------------------------------------------------------------------------


def test_bytes_are_counted_one_way(tmp_path, tokenizer):
    """Byte-order marks are no text and every line end is one byte, for each that counts."""
    from loopformers.data.packing import tokenize_documents
    from loopformers.evaluation.perplexity import read_stream

    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffÜber\r\nalles\rund\nweg".encode())
    text = "Über\nalles\nund\nweg"
    stream = tokenize_documents(load_documents(path, cache_dir=tmp_path / "cache"), tokenizer, cache_dir=tmp_path)
    assert stream.num_bytes == len(text.encode())
    assert read_stream(str(path)).text == text
    windows = StreamedWindows(stream_documents(path), tokenizer, 2, num_epochs=1)
    assert windows.bytes_per_token is None
    list(windows)
    assert windows.bytes_per_token == stream.num_bytes / stream.num_tokens


def test_a_streamed_split_has_the_bytes_per_token_of_the_loaded_one(tmp_path, tokenizer):
    from loopformers.data.packing import tokenize_documents
    from loopformers.data.statistics import bytes_per_token

    (tmp_path / "corpus").mkdir()
    rows = [{"text": f"Straße {i}\r\n" * (i % 4 + 1)} for i in range(90)]
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_documents(tmp_path / "corpus", "validation", cache_dir=tmp_path / "cache")
    windows = StreamedWindows(stream_documents(tmp_path / "corpus", "validation"), tokenizer, 3, num_epochs=1)
    list(windows)
    assert windows.bytes_per_token == bytes_per_token(tokenize_documents(loaded, tokenizer, cache_dir=tmp_path))
