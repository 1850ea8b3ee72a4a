from __future__ import annotations

import os
import shutil

import pytest

from loopformers.data import fingerprints
from loopformers.data.fingerprints import corpus_fingerprint
from loopformers.errors import DataError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "corpus"
    (path / "deep").mkdir(parents=True)
    (path / "a.txt").write_text("one")
    (path / "deep" / "b.jsonl").write_text('{"text": "two"}\n')
    return path


def test_equal_content_has_an_equal_fingerprint_wherever_and_whenever_it_was_written(folder, tmp_path):
    before = corpus_fingerprint([folder])
    shutil.copytree(folder, tmp_path / "elsewhere")
    os.utime(folder / "a.txt", (1, 1))
    assert corpus_fingerprint([folder]) == corpus_fingerprint([str(tmp_path / "elsewhere")]) == before
    assert len(before) == 40


def test_every_change_of_the_text_changes_it(folder):
    def change(path, text):
        path.write_text(text)

    before = [corpus_fingerprint([folder])]
    for do in (
        lambda: change(folder / "a.txt", "eno"),
        lambda: (folder / "a.txt").rename(folder / "z.txt"),
        lambda: change(folder / "new.txt", "three"),
        lambda: (folder / "new.txt").unlink() or (folder / "deep" / "b.jsonl").unlink(),
    ):
        do()
        before.append(corpus_fingerprint([folder]))
    assert len(set(before)) == len(before)


def test_it_depends_on_columns_and_on_the_order_of_sources(folder):
    sources = [folder / "a.txt", folder / "deep"]
    found = {
        corpus_fingerprint(sources),
        corpus_fingerprint(sources[::-1]),
        corpus_fingerprint(sources, text_column="body"),
        corpus_fingerprint(sources, id_column=None),
        corpus_fingerprint(["bundled"]),
        corpus_fingerprint(["bundled/sotu"]),
        corpus_fingerprint(["someone/corpus"]),
    }
    assert len(found) == 7


@pytest.mark.parametrize("at", [0, 100, 4095, "added"])
def test_a_large_file_is_known_by_blocks_from_its_beginning_to_its_end(folder, monkeypatch, at):
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "BLOCK_BYTES", 256)
    content = bytearray(b"abcdefgh" * 512)
    (folder / "big.txt").write_bytes(content)
    before = corpus_fingerprint([folder])
    if at == "added":
        content += b"x"
    else:
        content[at] ^= 1
    (folder / "big.txt").write_bytes(content)
    assert corpus_fingerprint([folder]) != before


def test_a_pipe_and_a_folder_without_text_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt' is not a regular file"):
        corpus_fingerprint([tmp_path / "pipe.txt"])
    with pytest.raises(DataError, match="contains no file that can be read"):
        corpus_fingerprint([tmp_path])
