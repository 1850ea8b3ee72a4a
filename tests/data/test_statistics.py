from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformers.data import statistics
from loopformers.data.packing import pack_tokens, tokenize_documents
from loopformers.data.sources import BUNDLED_DIR
from loopformers.data.statistics import bits_per_byte, bytes_per_token, token_counts, unigram_cross_entropy
from loopformers.errors import DataError


def ids(values):
    return np.array(values, dtype=np.uint16)


def test_unigram_cross_entropy_of_a_case_done_by_hand():
    # counts 2, 1, 0 of 3 tokens, smoothed: 3/6, 2/6, 1/6
    expected = -(math.log(3 / 6) + math.log(1 / 6)) / 2
    assert unigram_cross_entropy(ids([0, 0, 1]), ids([0, 2]), 3) == pytest.approx(expected, rel=1e-15)


@given(train=st.lists(st.integers(0, 6)), held_out=st.lists(st.integers(0, 6), min_size=1))
def test_unigram_cross_entropy_equals_the_loop_over_tokens(train, held_out):
    slow = [-math.log((train.count(x) + 1) / (len(train) + 7)) for x in held_out]
    assert unigram_cross_entropy(ids(train), ids(held_out), 7) == pytest.approx(sum(slow) / len(slow), rel=1e-12)


def test_without_training_tokens_it_is_the_uniform_level():
    assert unigram_cross_entropy(ids([]), ids([3, 1]), 11) == pytest.approx(math.log(11), rel=1e-15)


def test_counting_in_chunks_counts_all(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 13, 1000).astype(np.uint16)
    whole = token_counts(tokens, 13)
    monkeypatch.setattr(statistics, "CHUNK_TOKENS", 7)
    assert np.array_equal(token_counts(tokens, 13), whole)
    assert whole.sum() == 1000


def test_no_evaluation_tokens_are_refused():
    with pytest.raises(DataError, match="0 evaluation tokens"):
        unigram_cross_entropy(ids([1]), ids([]), 3)


@pytest.mark.parametrize(("train", "held_out"), [([5], [1]), ([1], [5])])
def test_tokens_of_another_vocabulary_are_refused(train, held_out):
    with pytest.raises(DataError, match="token id 5 does not exist in a vocabulary of vocab_size=5"):
        unigram_cross_entropy(ids(train), ids(held_out), 5)


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight():
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert bits_per_byte(math.log(256), 2.0) == pytest.approx(4)


def test_bytes_per_token_counts_utf8_bytes_and_every_token(tokenizer, make_documents, tmp_path):
    stream = tokenize_documents(make_documents(["añb", "—"]), tokenizer, cache_dir=tmp_path)
    assert stream.num_bytes == 4 + 3
    assert bytes_per_token(stream) == bytes_per_token(pack_tokens(stream, 2)) == 7 / stream.num_tokens


def test_the_command_prints_a_row_a_split(tmp_path, capsys):
    text = tmp_path / "texts"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"document number {i}")
    statistics.main([str(text), "--cache-dir", str(tmp_path / "cache")])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| train", "| validation", "| test"]
    assert sum(int(row.split(" | ")[1]) for row in rows[2:]) == 40


@pytest.mark.slow
def test_the_numbers_of_the_bundled_readme_are_what_its_command_prints(tmp_path, capsys):
    statistics.main(["bundled", "--cache-dir", str(tmp_path)])
    assert capsys.readouterr().out in (BUNDLED_DIR / "README.md").read_text(encoding="utf-8")
