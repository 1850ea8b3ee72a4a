from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from loopformers.data import tokenizer as tokenizer_module
from loopformers.data.tokenizer import BUNDLED_TOKENIZER_DIR, END_OF_TEXT, bundled_tokenizer, train_tokenizer
from loopformers.errors import ConfigError, DataError

SAMPLE = ["the cat sat on the mat, and the dog sat on the cat\n" * 3, "Über die Brücke — 日本", "x = 12345\n\n\tend"]


@given(text=st.text())
def test_any_text_decodes_to_itself(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@given(text=st.text(max_size=30))
def test_a_tokenizer_of_bytes_and_few_merges_round_trips(small_tokenizer, text):
    assert small_tokenizer.decode(small_tokenizer(text)["input_ids"]) == text


@pytest.fixture(scope="module")
def small_tokenizer():
    return train_tokenizer(SAMPLE, vocab_size=270)


def test_training_twice_gives_one_tokenizer(small_tokenizer):
    again = train_tokenizer(iter(SAMPLE), vocab_size=270)
    assert again.backend_tokenizer.to_str() == small_tokenizer.backend_tokenizer.to_str()
    assert len(again) == 270


def test_one_special_token_is_bos_eos_and_pad(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 2048
    assert tokenizer.all_special_tokens == [END_OF_TEXT]
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_it_adds_no_tokens_and_gives_what_a_causal_model_takes(tokenizer):
    assert tokenizer("").input_ids == []
    assert list(tokenizer("a b", return_tensors="pt")) == ["input_ids", "attention_mask"]
    assert tokenizer(["a b c", "a"], padding=True)["attention_mask"][1][0] == 0, "pads on the left"


def test_a_long_document_gives_no_warning(tokenizer, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tokenizer("word " * 50_000)["input_ids"]) > 10_000
    assert caplog.records == []


def test_saving_and_loading_gives_the_same_tokenizer(small_tokenizer, tmp_path):
    small_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == small_tokenizer.backend_tokenizer.to_str()
    assert (loaded.eos_token, loaded.padding_side) == (END_OF_TEXT, "left")
    assert loaded.model_input_names == ["input_ids", "attention_mask"]


def test_the_bundled_tokenizer_is_a_plain_transformers_folder(tokenizer):
    assert {file.name for file in BUNDLED_TOKENIZER_DIR.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert AutoTokenizer.from_pretrained(BUNDLED_TOKENIZER_DIR).get_vocab() == tokenizer.get_vocab()


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"vocab_size=256 .* at least 257"):
        train_tokenizer(SAMPLE, vocab_size=256)


def test_a_vocabulary_that_the_texts_do_not_fill_is_refused():
    with pytest.raises(DataError, match=r"vocab_size=5000 is out of reach: the texts yield only \d+"):
        train_tokenizer(SAMPLE, vocab_size=5000)


def test_the_command_writes_a_whole_folder_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("loopformers.data.corpora.load_documents", lambda source, split: {"text": SAMPLE})
    monkeypatch.setattr(tokenizer_module, "BUNDLED_VOCAB_SIZE", 263)
    tokenizer_module.main(["--output-dir", str(tmp_path / "made")])
    assert {file.name for file in (tmp_path / "made").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert "saved 263 entries" in capsys.readouterr().out


@pytest.mark.slow
def test_the_shipped_tokenizer_is_what_its_command_makes(bundled_splits):
    made = train_tokenizer(bundled_splits["train"]["text"])
    shipped = bundled_tokenizer()
    made_json, shipped_json = (json.loads(each.backend_tokenizer.to_str()) for each in (made, shipped))
    assert made_json["model"]["merges"] == shipped_json["model"]["merges"]
    assert made_json == shipped_json
