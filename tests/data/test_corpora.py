from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from functools import partial

import datasets
import pytest
from datasets import Dataset, DatasetDict

from loopformers.data import corpora
from loopformers.data.corpora import BUNDLED_CORPORA, load_documents, load_splits
from loopformers.data.documents import text_id
from loopformers.data.splits import SPLITS, split_documents
from loopformers.errors import ConfigError, DataError


@pytest.fixture
def load(tmp_path):
    """load_documents with a cache of this test's own."""
    return partial(load_documents, cache_dir=tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "corpus"
    path.mkdir()
    return path


def records(documents):
    return [(row["id"], row["text"]) for row in documents]


def json_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- the bundled corpus ----------------------------------------------------------------------------------------


def test_the_bundled_corpus_is_complete_and_split_without_loss(bundled_splits):
    counts = [len(bundled_splits[name]) for name in SPLITS]
    assert sum(counts) == len({i for name in SPLITS for i in bundled_splits[name]["id"]}) == 240
    assert sum(len(text) for name in SPLITS for text in bundled_splits[name]["text"]) == 15_975_125


def test_held_out_splits_of_the_bundled_corpus_are_small_and_mixed(bundled_splits):
    """Peer-fault 21: validation and test the same file."""
    sizes = {name: sum(map(len, bundled_splits[name]["text"])) for name in SPLITS}
    for name in ("validation", "test"):
        assert 0.03 <= sizes[name] / sum(sizes.values()) <= 0.06
        lengths = {row["id"]: len(row["text"]) for row in bundled_splits[name]}
        assert len(lengths) >= 10
        assert max(lengths.values()) <= 0.62 * sizes[name]
        assert {i.split("/")[0] for i in lengths} == {"austen", "sotu"}


def test_a_part_of_the_bundled_corpus_is_split_like_the_whole(bundled_splits, load):
    part = load("bundled/sotu", "validation")
    assert part["id"] == [i for i in bundled_splits["validation"]["id"] if i.startswith("sotu/")]


def test_each_part_of_the_bundled_corpus_is_a_source(load):
    assert [len(load(f"bundled/{name}")) for name in BUNDLED_CORPORA] == [6, 1, 233]


def test_an_unknown_part_is_refused_with_the_nearest(load):
    with pytest.raises(DataError, match="did you mean 'bundled/austen'"):
        load("bundled/austin")


# -- files -----------------------------------------------------------------------------------------------------


def test_a_text_file_is_one_document(folder, load):
    (folder / "novel.txt").write_text("Chapter 1\n\n  Über allem\n", encoding="utf-8")
    assert records(load(folder / "novel.txt")) == [("novel.txt", "Chapter 1\n\n  Über allem\n")]


def test_ones_own_text_file_is_split_by_its_tail(folder, tmp_path):
    text = "".join(f"line {i}\n" for i in range(300))
    (folder / "novel.txt").write_text(text)
    with pytest.raises(DataError, match='split_by="tail"'):
        load_splits(folder / "novel.txt", cache_dir=tmp_path / "cache")
    splits = load_splits(str(folder / "novel.txt"), split_by="tail", cache_dir=tmp_path / "cache")
    assert "".join(splits[name]["text"][0] for name in SPLITS) == text


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_json_lines_and_text_are_read_compressed_too(folder, load, suffix, compress):
    (folder / f"a.jsonl{suffix}").write_bytes(compress(b'{"id": "x", "text": "one"}\n{"id": "y", "text": "two"}\n'))
    (folder / f"b.txt{suffix}").write_bytes(compress(b"three"))
    assert records(load(folder / f"a.jsonl{suffix}")) == [("x", "one"), ("y", "two")]
    assert records(load(folder / f"b.txt{suffix}")) == [(f"b.txt{suffix}", "three")]


def test_a_json_array_is_read(folder, load):
    (folder / "a.json").write_text('[{"text": "one", "id": 7}, {"text": "two", "id": 8}]')
    assert records(load(folder / "a.json")) == [("7", "one"), ("8", "two")]


def test_a_parquet_file_is_read_with_columns_of_any_name(folder, load):
    rows = {"body": ["one", "two"], "key": ["x", None], "meta": [1.5, 2.5]}
    Dataset.from_dict(rows).to_parquet(folder / "a.parquet")
    found = load(folder / "a.parquet", text_column="body", id_column="key")
    assert records(found) == [("x", "one"), (text_id("two"), "two")]
    assert found.column_names == ["id", "text"]


def test_rows_without_an_id_take_it_from_their_text(folder, load):
    json_lines(folder / "a.jsonl", {"text": "one"}, {"text": "two"}, {"text": "one"})
    ids = load(folder / "a.jsonl")["id"]
    assert ids[0] == ids[2] != ids[1], "copies of a text share their id"
    json_lines(folder / "b.jsonl", {"text": "new"}, {"text": "two"})
    assert load(folder / "b.jsonl")["id"][1] == ids[1], "neither the file nor the row has a part in it"


def test_rows_without_text_are_no_documents(folder, load):
    json_lines(folder / "a.jsonl", {"text": ""}, {"text": "one"}, {"text": " \n\t"}, {"text": " two "})
    assert load(folder / "a.jsonl")["text"] == ["one", " two "]


def test_a_changed_file_is_read_again(folder, load):
    path = json_lines(folder / "a.jsonl", {"text": "old"})
    assert load(path)["text"] == ["old"]
    json_lines(path, {"text": "new"})
    os.utime(path, (1, 1))
    assert load(path)["text"] == ["new"]


def test_reading_a_local_file_prints_nothing_and_restores_the_library(folder, load, capfd):
    verbosity = datasets.utils.logging.get_verbosity()
    json_lines(folder / "a.jsonl", {"text": "one"})
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"te')
    load(folder / "a.jsonl")
    with pytest.raises(DataError):
        load(folder / "broken.jsonl")
    assert capfd.readouterr() == ("", "")
    assert datasets.utils.logging.get_verbosity() == verbosity
    assert not datasets.utils.are_progress_bars_disabled()


# -- folders ---------------------------------------------------------------------------------------------------


def test_a_folder_of_every_kind_is_one_corpus(folder, load):
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "z.txt").write_text("plain")
    (folder / "deep" / "er" / "notes.md").write_text("# marked")
    json_lines(folder / "b.jsonl", {"text": "lines", "id": 1, "only here": 3})
    json_lines(folder / "deep" / "c.jsonl", {"id": "s", "text": "other columns"})
    Dataset.from_dict({"text": ["packed"]}).to_parquet(folder / "deep" / "d.parquet")
    assert sorted(records(load(folder))) == sorted(
        [
            ("z.txt", "plain"),
            ("deep/er/notes.md", "# marked"),
            ("1", "lines"),
            ("s", "other columns"),
            (text_id("packed"), "packed"),
        ]
    )


def test_a_folder_reads_in_the_order_of_its_paths(folder, load):
    for name in ("b.txt", "a.txt", "c.txt"):
        (folder / name).write_text(name)
    assert load(str(folder))["id"] == ["a.txt", "b.txt", "c.txt"]


def test_what_is_no_corpus_in_a_folder_is_left_out(folder, load):
    (folder / ".git").mkdir()
    for name in (".git/a.txt", ".hidden.txt", "README.md", "picture.png", "empty.txt", "empty.jsonl"):
        (folder / name).write_text("" if name.startswith("empty") else "not a document")
    (folder / "broken-link.txt").symlink_to(folder / "gone.txt")
    (folder / "a.txt").write_text("a document")
    assert records(load(folder)) == [("a.txt", "a document")]


def test_names_with_pattern_characters_are_names(folder, load):
    (folder / "a[1]*?.txt").write_text("itself")
    (folder / "a1xy.txt").write_text("another")
    assert records(load(folder / "a[1]*?.txt")) == [("a[1]*?.txt", "itself")]


def test_the_broken_file_of_a_folder_is_named(folder, load):
    (folder / "a.txt").write_text("fine")
    (folder / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"b\.txt', line 1, is not UTF-8 text \(byte 0xff\).*iconv"):
        load(folder)


# -- datasets by name ------------------------------------------------------------------------------------------


def test_a_name_that_cannot_be_reached_is_refused_with_the_ways_out(load):
    with pytest.raises(DataError, match=r"'someone/corpus:en' is no local path.*while online, or give a local file"):
        load("someone/corpus:en")


@pytest.mark.parametrize(
    "cause", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied", "/hf/x")]
)
def test_a_cache_that_cannot_be_written_is_named_and_not_the_dataset(load, monkeypatch, cause):
    def refuse(*_, **options):
        try:
            raise cause
        except OSError as error:
            raise RuntimeError("while generating the dataset") from error

    monkeypatch.setattr(corpora, "load_dataset", refuse)
    with pytest.raises(DataError, match=rf"cannot be kept in .*cache' \({cause.strerror}.*writable cache_dir"):
        load("someone/corpus")


def test_a_network_that_is_closed_is_no_full_cache(load, monkeypatch):
    def refuse(*_, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(corpora, "load_dataset", refuse)
    with pytest.raises(DataError, match="must be reachable or already in the cache"):
        load("someone/corpus")


def test_a_folder_that_datasets_saved_is_read_without_its_descriptions(folder, load):
    Dataset.from_dict({"text": ["one", "two"], "id": ["x", "y"]}).save_to_disk(folder / "saved")
    DatasetDict({"train": Dataset.from_dict({"text": ["three"]})}).save_to_disk(folder / "dict")
    assert sorted(records(load(folder))) == sorted([("x", "one"), ("y", "two"), (text_id("three"), "three")])


def test_copies_in_several_sources_and_under_several_ids_share_their_split(folder, tmp_path):
    json_lines(folder / "a.jsonl", *({"id": i, "text": f"text {i % 40}"} for i in range(120)))
    json_lines(folder / "b.jsonl", *({"id": f"b{i}", "text": f"text {i}"} for i in range(40)))
    parts = [load_splits(folder / name, cache_dir=tmp_path / "cache") for name in ("a.jsonl", "b.jsonl")]
    texts = [{text for part in parts for text in part[name]["text"]} for name in SPLITS]
    assert sum(map(len, texts)) == 40


def test_no_text_of_the_bundled_corpus_is_there_twice(bundled_splits):
    """Its splits go by id, which would put copies on both sides."""
    texts = [text for name in SPLITS for text in bundled_splits[name]["text"]]
    assert len(set(texts)) == len(texts)


def test_a_local_path_wins_over_a_name(folder, load, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "wikitext").mkdir()
    (folder / "wikitext" / "a.txt").write_text("local")
    assert load("wikitext")["text"] == ["local"]


@pytest.fixture
def publish(monkeypatch):
    """Let every dataset's name lead to these splits; returns the calls made."""
    calls = []

    def publish(**splits):
        def load_dataset(*arguments, **options):
            calls.append(arguments)
            return DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()})

        monkeypatch.setattr(corpora, "load_dataset", load_dataset)
        return calls

    return publish


def test_a_name_may_carry_a_configuration(publish, load):
    calls = publish(train=["one"])
    load("someone/corpus:en-2.0")
    load("corpus")
    assert calls == [("someone/corpus", "en-2.0"), ("corpus", None)]


def test_published_splits_are_kept_where_all_three_are(publish, load, tmp_path):
    publish(train=["a", "b"], validation=["c"], test=["d"], extra=["e"])
    splits = load_splits("corpus", cache_dir=tmp_path)
    assert {name: splits[name]["text"] for name in splits} == {"train": ["a", "b"], "validation": ["c"], "test": ["d"]}
    assert load("corpus", "validation")["text"] == ["c"]
    assert load("corpus", "extra")["text"] == ["e"]
    assert load("corpus")["text"] == ["a", "b", "c", "d", "e"]


def test_incomplete_published_splits_are_divided_anew(publish, load, tmp_path):
    train, validation = [f"t{i}" for i in range(80)], [f"v{i}" for i in range(30)]
    publish(train=train, validation=validation)
    splits = load_splits("corpus", cache_dir=tmp_path)
    assert sorted(text for name in SPLITS for text in splits[name]["text"]) == sorted(train + validation)
    for name in SPLITS:
        assert load("corpus", name)["text"] == splits[name]["text"]


def test_a_split_that_nobody_publishes_is_refused(publish, load):
    publish(train=["a"], unsupervised=["b"])
    with pytest.raises(DataError, match="did you mean 'unsupervised'"):
        load("corpus", "unsupervized")


# -- splits of files -------------------------------------------------------------------------------------------


def test_splits_of_a_file_are_those_of_its_documents(folder, load, tmp_path):
    path = json_lines(folder / "a.jsonl", *({"id": i, "text": f"text {i}"} for i in range(90)))
    expected = split_documents(load(path))
    for name in SPLITS:
        assert records(load(path, name)) == records(expected[name])
    other = load_splits(path, fractions=(0.5, 0.3, 0.2), seed=3, cache_dir=tmp_path / "cache")
    assert records(other["test"]) == records(split_documents(load(path), (0.5, 0.3, 0.2), seed=3)["test"])


def test_illegal_fractions_are_refused_through_every_door(folder, tmp_path):
    path = json_lines(folder / "a.jsonl", {"text": "one"})
    with pytest.raises(ConfigError, match="three positive shares"):
        load_splits(path, fractions=(1.0, 0.0, 0.0), cache_dir=tmp_path / "cache")


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["gone.txt", "some/data/folder", "./gone", "/gone", "gone.jsonl.xz", "~/gone/there/x"]
)
def test_a_missing_file_or_folder_is_refused(load, source):
    with pytest.raises(DataError, match=r"no file or folder at .*check the path"):
        load(source)


@pytest.mark.parametrize("source", ["", None, 3, ["a.txt"]])
def test_what_is_no_source_at_all_is_refused(load, source):
    with pytest.raises(DataError, match="is neither a path nor a name"):
        load(source)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "b.jsonl"])
def test_an_empty_corpus_is_refused(folder, load, name):
    (folder / name).write_text('{"text": " "}\n' if name == "b.jsonl" else "")
    with pytest.raises(DataError, match=r"contains no text.*at least one document"):
        load(folder / name)
    with pytest.raises(DataError, match=r"contains no text.*at least one document"):
        load(folder)


def test_a_folder_without_files_is_refused(folder, load):
    with pytest.raises(DataError, match=r"contains no file that can be read; files that can be read end in \.txt"):
        load(folder)


@pytest.mark.parametrize("name", ["table.csv", "noend", "a.parquet.gz"])
def test_a_file_of_another_kind_is_refused(folder, load, name):
    (folder / name).write_text("a,b\n")
    with pytest.raises(DataError, match=r"an unknown suffix.*rename a plain text file"):
        load(folder / name)


def test_a_missing_text_column_is_refused_with_those_that_are_there(folder, load):
    json_lines(folder / "a.jsonl", {"body": "one", "key": 1})
    with pytest.raises(
        DataError, match=r"a\.jsonl', line 1, has no column 'text'.*its columns are body, key.*text_column="
    ):
        load(folder / "a.jsonl")


@pytest.mark.parametrize("values", [[3, 4], [["a", "b"]], [{"en": "a"}], [None, None]])
def test_text_that_is_no_string_is_refused(folder, load, values):
    json_lines(folder / "a.jsonl", *({"text": value} for value in values))
    with pytest.raises(DataError, match=r"line 1, has .* in column 'text', but text must be a string"):
        load(folder / "a.jsonl")


def test_numbers_among_strings_are_refused(folder, load):
    json_lines(folder / "a.jsonl", {"text": 3}, {"text": "four"})
    with pytest.raises(DataError, match=r"line 1, has a value of type int in column 'text'"):
        load(folder / "a.jsonl")


def test_a_row_whose_text_is_missing_is_named(folder, load):
    json_lines(folder / "a.jsonl", {"text": "one"}, {"text": "two"}, {"text": None})
    with pytest.raises(DataError, match="line 3, has no string in column 'text'"):
        load(folder / "a.jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.xz", "jsonl.gz", "parquet"])
def test_a_truncated_file_is_refused_and_leaves_no_half_written_cache(folder, load, kind):
    lines = b"".join(b'{"id": %d, "text": "text %d"}\n' % (i, i * i) for i in range(500))
    Dataset.from_dict({"text": ["one", "two"] * 200}).to_parquet(folder / "whole.parquet")
    whole = {
        "jsonl": lines,
        "jsonl.xz": lzma.compress(lines),
        "jsonl.gz": gzip.compress(lines),
        "parquet": (folder / "whole.parquet").read_bytes(),
    }[kind]
    path = folder / f"a.{kind}"
    path.write_bytes(whole[:-9])
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\..*(line 500, is not JSON|is damaged or incomplete)"):
            load(path)
    path.write_bytes(whole)
    assert len(load(path)) in (400, 500)


def test_a_folder_where_a_file_lacks_the_column_names_that_file(folder, load):
    json_lines(folder / "a.jsonl", {"text": "one"})
    json_lines(folder / "b.jsonl", {"body": "two"})
    with pytest.raises(DataError, match=r"b\.jsonl', line 1, has no column 'text'"):
        load(folder)


# -- imports ---------------------------------------------------------------------------------------------------


def test_reading_and_packing_import_neither_torch_nor_transformers():
    program = (
        "import sys; from loopformers.data import corpora, packing, splits, statistics, tokenizer; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_package_alone_imports_nothing():
    program = "import sys, loopformers.data; print('datasets' in sys.modules or 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
