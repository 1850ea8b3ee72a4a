"""A text in pieces has the ids of the whole, with tokenizers of every style, or is not cut."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from loopformers.data import pieces
from loopformers.data.pieces import PieceCutter
from loopformers.errors import DataError

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TRAINING = [
    "It was 1234567 dark nights, wasn't it?\n\nÜber alles — naïve  cafés; 日本語、本。\n    def f(x): return x"
] * 30


def trained(model, trainer, *, pre_tokenizer=None, normalizer=None, **options):
    backend = Tokenizer(model)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(TRAINING, trainer(vocab_size=400, show_progress=False, **options))
    return backend


BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

STYLES = {
    "GPT-2": lambda: trained(models.BPE(), trainers.BpeTrainer, pre_tokenizer=BYTE_LEVEL, **BYTES),
    "RoBERTa": lambda: trained(
        models.BPE(), trainers.BpeTrainer, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True), **BYTES
    ),
    "Llama 3": lambda: trained(
        models.BPE(),
        trainers.BpeTrainer,
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(CL100K), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        normalizer=normalizers.NFC(),
        **BYTES,
    ),
    "Llama 2": lambda: llama_2(),
    "T5": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer,
        pre_tokenizer=pre_tokenizers.Metaspace(),
        normalizer=normalizers.NFKC(),
        unk_token="<unk>",
        special_tokens=["<unk>"],
    ),
    "BERT": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
        special_tokens=["[UNK]"],
    ),
    "words": lambda: trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer,
        pre_tokenizer=pre_tokenizers.Whitespace(),
        special_tokens=["<unk>"],
    ),
}


def llama_2():
    """BPE over whole texts: a vocabulary whose merges keep within words, and no pre-tokenizer."""
    learned = trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"),
        special_tokens=["<unk>"],
    )
    learned.pre_tokenizer = pre_tokenizers.Sequence([])
    learned.normalizer = SPACES
    learned.add_tokens([AddedToken("dark nights", normalized=False)])
    return learned


@pytest.fixture(scope="module")
def backends():
    built = {}

    def get(style):
        if style not in built:
            built[style] = STYLES[style]()
        return built[style]

    return get


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 24)
    monkeypatch.setattr(pieces, "REGION", 64)
    monkeypatch.setattr(pieces, "CONTEXT", 60)


def ids(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


def joined(backend, text):
    parts = list(PieceCutter(backend).pieces(text))
    return [i for part in parts for i in ids(backend, part)], len(parts)


WORDS = ["It", "was", "1234567", "dark nights", ",", "wasn't", " ", "  ", "\n", "\n\n", "\r\n", "Über", "naïve", "café", "日本",
         "語、", "。", "—", "don't", "0", "_", "e\u0301", "ﬁ", "\t", "x", "dark", " nights", "\u00a0", "…", "🙂"]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_pieces_have_the_ids_of_the_whole(backends, style, seed):
    draw = random.Random(seed)
    text = "".join(draw.choice(WORDS) + draw.choice(["", " ", " ", " "]) for _ in range(draw.randint(5, 200)))
    backend = backends(style)
    found, _ = joined(backend, text)
    assert found == ids(backend, text)


@pytest.mark.parametrize("style", STYLES)
def test_prose_is_cut_with_every_style(backends, style):
    text = "It was a dark night, and the sea was calm. " * 40
    found, count = joined(backends(style), text)
    assert found == ids(backends(style), text)
    assert count > len(text) // 100


@pytest.mark.parametrize("style", ["GPT-2", "Llama 3"])
def test_text_without_spaces_is_cut_at_its_signs_and_lines(backends, style):
    for text in ("日本語、本日本。日本語" * 60, "日本語本日本日本語\n" * 60):
        found, count = joined(backends(style), text)
        assert found == ids(backends(style), text)
        assert count > 3


def test_a_vocabulary_that_joins_words_is_not_cut_between_them(backends):
    backend = trained(models.BPE(), trainers.BpeTrainer, normalizer=normalizers.Replace(" ", "▁"))
    assert any("t▁" in token for token in backend.get_vocab()), "tokens span words"
    text = "It was 1234567 dark nights, wasn't it? " * 9
    assert joined(backend, text)[0] == ids(backend, text)


def test_what_cannot_be_cut_is_encoded_whole_up_to_a_limit(backends, monkeypatch):
    backend = backends("GPT-2")
    text = "a" * 500
    assert joined(backend, text) == (ids(backend, text), 1)
    monkeypatch.setattr(pieces, "MAX_WHOLE", 400)
    with pytest.raises(
        DataError, match=r"begins 'aaaa.*400 or more characters that this tokenizer can only encode together.*split"
    ):
        joined(backend, text)
    found, _ = joined(backend, "b" * 300 + " and so on" * 90)
    assert found == ids(backend, "b" * 300 + " and so on" * 90)


def test_a_tokenizer_that_strips_its_text_is_cut_where_nothing_is_lost(backends):
    backend = trained(
        models.BPE(), trainers.BpeTrainer, normalizer=normalizers.Strip(), pre_tokenizer=BYTE_LEVEL, **BYTES
    )
    text = "It was dark, and, well, wasn't it? " * 20
    assert joined(backend, text)[0] == ids(backend, text)


def test_a_long_document_takes_little_memory():
    """A subprocess, as the memory is the tokenizers library's and only the process as a whole is measured."""
    program = """
import resource
from loopformers.data import pieces
from loopformers.data.packing import DocumentEncoder
from loopformers.data.tokenizer import bundled_tokenizer
pieces.PIECE = 1 << 16
encoder = DocumentEncoder(bundled_tokenizer())
list(encoder.encode(["warm up"]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(ids,) = encoder.encode(["It was a dark night, and the sea was calm. " * 50_000])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(ids))
"""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    kibibytes, count = map(int, found.stdout.split())
    assert count > 500_000
    assert kibibytes < 130 * 1024, "2 MB encoded at once take about 280 MB"


def test_the_bundled_tokenizer_encodes_its_corpus_alike_in_pieces(tokenizer, bundled_splits, monkeypatch):
    from loopformers.data.packing import DocumentEncoder

    monkeypatch.setattr(pieces, "PIECE", 3000)
    texts = bundled_splits["validation"]["text"][-3:]
    whole, cut = DocumentEncoder(tokenizer), DocumentEncoder(tokenizer)
    in_pieces = list(cut.encode(texts))
    monkeypatch.setattr(pieces, "PIECE", 1 << 30)
    for expected, found in zip(whole.encode(texts), in_pieces, strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
