from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from loopformers.data import packing
from loopformers.data.packing import DocumentEncoder, PackedTokens, pack_documents, pack_tokens, tokenize_documents
from loopformers.data.tokenizer import run_tokenizer
from loopformers.errors import ConfigError, DataError
from loopformers.model.tokenizer import encode_prompt, open_tokenizer, vocabulary_size
from tests.tokenizer_styles import STYLES, every_style, space_marking_tokenizer

TEXTS = ["It was a dark night.", "Über — 日本\n", "<|endoftext|> is spelled out", "the end, " * 40]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


def documents_in(tokens, eos):
    """Cut a stream after each eos; the list ends with what follows the last."""
    ends = np.flatnonzero(tokens == eos)
    return [part.tolist() for part in np.split(tokens, ends + 1)]


# -- conservation ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=7), seq_len=st.integers(2, 11))
def test_packing_conserves_tokens_and_documents_exactly(tokenizer, make_documents, cache, texts, seq_len):
    stream = tokenize_documents(make_documents(texts), tokenizer, cache_dir=cache)
    expected = [[*tokenizer(text, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert documents_in(stream.tokens, tokenizer.eos_token_id) == [*expected, []], (
        "each document once, in order, with its end"
    )
    assert stream.num_documents == len(texts)
    assert stream.num_characters == sum(map(len, texts))
    assert stream.num_bytes == sum(len(text.encode()) for text in texts)
    if seq_len > stream.num_tokens:
        with pytest.raises(DataError, match="longer than the data"):
            pack_tokens(stream, seq_len)
        return
    packed = pack_tokens(stream, seq_len)
    windows = [window["input_ids"] for window in packed]
    assert all(window.shape == (seq_len,) for window in windows)
    assert np.array_equal(np.concatenate([*windows, packed.dropped_tokens]), stream.tokens)
    assert len(windows) == len(packed) == packed.num_windows
    assert packed.num_windows * seq_len + packed.num_dropped_tokens == packed.num_tokens == stream.num_tokens
    assert packed.num_dropped_tokens == len(packed.dropped_tokens) < seq_len
    assert packed.num_targets == len(windows) * (seq_len - 1)
    assert packed.num_documents == len(texts)


def test_the_stream_decodes_to_the_documents(tokenizer, make_documents, cache):
    stream = tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=cache)
    assert tokenizer.decode(stream.tokens) == "".join(text + "<|endoftext|>" for text in TEXTS)


def test_there_is_no_padding_and_one_end_a_document(tokenizer, make_documents, cache):
    """Peer-fault 11: token files with up to 41 % zero padding counted as text."""
    stream = tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=cache)
    assert np.count_nonzero(stream.tokens == tokenizer.pad_token_id) == len(TEXTS)


def test_batches_of_any_size_give_one_stream(tokenizer, make_documents, tmp_path, monkeypatch):
    one = tokenize_documents(make_documents(TEXTS * 20), tokenizer, cache_dir=tmp_path / "one")
    monkeypatch.setattr(packing, "BATCH_CHARACTERS", 50)
    many = tokenize_documents(make_documents(TEXTS * 20), tokenizer, cache_dir=tmp_path / "many")
    assert np.array_equal(one.tokens, many.tokens)


# -- foreign tokenizers ----------------------------------------------------------------------------------------


def word_tokenizer(num_words, **special):
    vocab = {"<unk>": 0, "</s>": 1, **{f"w{i}": i + 2 for i in range(num_words)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=5, **special)


@pytest.mark.parametrize(("num_words", "dtype"), [(65_534, np.uint16), (65_535, np.uint32)])
def test_ids_take_two_bytes_where_the_vocabulary_fits(make_documents, cache, num_words, dtype):
    tokenizer = word_tokenizer(num_words, eos_token="</s>", unk_token="<unk>")
    stream = tokenize_documents(make_documents([f"w{num_words - 1} w0"]), tokenizer, cache_dir=cache)
    assert stream.tokens.dtype == dtype
    assert stream.tokens.tolist() == [num_words + 1, 2, 1]


def test_a_limit_of_length_and_settings_of_earlier_calls_change_nothing(make_documents, cache, caplog):
    tokenizer = word_tokenizer(9, eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    documents = make_documents(["w1 w2 w3 w4 w5 w6 w7", "w8"])
    tokenizer(["w1 w2", "w3"], padding=True, truncation=True)
    before = tokenizer.backend_tokenizer.to_str()
    stream = tokenize_documents(documents, tokenizer, cache_dir=cache)
    assert stream.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 1, 10, 1]
    assert tokenizer.backend_tokenizer.to_str() == before, "the caller's tokenizer is left as it was"
    assert caplog.records == []
    tokenizer("w1")
    assert tokenize_documents(documents, tokenizer, cache_dir=cache).path == stream.path


def test_a_tokenizer_without_eos_is_refused(make_documents, cache):
    with pytest.raises(DataError, match=r"no eos token.*set tokenizer\.eos_token"):
        tokenize_documents(make_documents(["w1"]), word_tokenizer(3), cache_dir=cache)


def test_a_tokenizer_without_backend_is_refused(make_documents, cache):
    with pytest.raises(DataError, match="'object' has no backend"):
        tokenize_documents(make_documents(["w1"]), object(), cache_dir=cache)


# -- the cache -------------------------------------------------------------------------------------------------


def test_the_second_call_opens_what_the_first_left(tokenizer, make_documents, tmp_path, monkeypatch):
    first = pack_documents(make_documents(TEXTS), tokenizer, 7, cache_dir=tmp_path)
    monkeypatch.setattr(packing, "write_stream", None)
    second = pack_documents(make_documents(TEXTS), tokenizer, 5, cache_dir=tmp_path)
    assert second.stream.path == first.stream.path, "the stream does not depend on the length of a window"
    assert np.array_equal(second.stream.tokens, first.stream.tokens)
    assert (second.stream.num_documents, second.stream.num_bytes) == (
        first.stream.num_documents,
        first.stream.num_bytes,
    )


@pytest.mark.parametrize("texts", [TEXTS[::-1], TEXTS[:-1], [*TEXTS, ""], [TEXTS[0] + TEXTS[1], "", *TEXTS[2:]]])
def test_other_documents_have_another_stream(tokenizer, make_documents, cache, texts):
    one = tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=cache)
    assert tokenize_documents(make_documents(texts), tokenizer, cache_dir=cache).path != one.path


def test_another_tokenizer_has_another_stream(make_documents, cache):
    paths = {
        tokenize_documents(make_documents(["w1 w2"]), tokenizer, cache_dir=cache).path
        for tokenizer in (
            word_tokenizer(5, eos_token="</s>"),
            word_tokenizer(6, eos_token="</s>"),
            word_tokenizer(5, eos_token="<unk>"),
        )
    }
    assert len(paths) == 3


@pytest.mark.parametrize("damage", ["cut ids", "no ids", "cut description", "other description"])
def test_a_damaged_cache_is_made_again(tokenizer, make_documents, tmp_path, damage):
    stream = tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=tmp_path)
    expected, path = stream.tokens.tolist(), stream.path
    del stream
    match damage:
        case "cut ids":
            path.with_suffix(".bin").write_bytes(path.with_suffix(".bin").read_bytes()[:-2])
        case "no ids":
            path.with_suffix(".bin").unlink()
        case "cut description":
            path.write_text(path.read_text()[:-5])
        case _:
            path.write_text(json.dumps({"num_tokens": 3}))
    assert tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=tmp_path).tokens.tolist() == expected


def test_a_failure_on_the_way_leaves_nothing(tokenizer, make_documents, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.os, "replace", full)
    with pytest.raises(DataError, match=r"No space left on device.*give a writable cache_dir"):
        tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_dir_that_is_a_file_is_refused(tokenizer, make_documents, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="give a writable cache_dir"):
        tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=tmp_path / "file")


def test_the_default_cache_lies_in_the_hugging_face_home(tokenizer, make_documents, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    path = tokenize_documents(make_documents(TEXTS), tokenizer).path
    assert path.parent == tmp_path / "loopformers" / "tokens"


def test_tokens_are_mapped_read_only_and_pickled_by_path(tokenizer, make_documents, cache):
    packed = pack_documents(make_documents(TEXTS * 50), tokenizer, 7, cache_dir=cache)
    assert isinstance(packed.stream.tokens, np.memmap)
    assert not packed.stream.tokens.flags.writeable
    pickled = pickle.dumps(packed)
    assert len(pickled) < 1000 < packed.stream.tokens.nbytes
    assert np.array_equal(pickle.loads(pickled).windows, packed.windows)


# -- what a trainer sees ---------------------------------------------------------------------------------------


def test_labels_are_the_inputs_unshifted_and_apart(tokenizer, make_documents, cache):
    packed = pack_documents(make_documents(TEXTS), tokenizer, 7, cache_dir=cache)
    window = packed[2]
    assert window["input_ids"].dtype == window["labels"].dtype == np.int64
    assert window["input_ids"].tolist() == window["labels"].tolist() == packed.stream.tokens[14:21].tolist()
    window["labels"][0] = -100
    assert window["input_ids"][0] != -100
    assert packed[-1]["input_ids"].tolist() == packed.windows[-1].tolist()
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_both_collators_that_trainer_chooses_from_make_batches(tokenizer, make_documents, cache):
    packed = pack_documents(make_documents(TEXTS), tokenizer, 7, cache_dir=cache)
    for collate in (default_data_collator, DataCollatorWithPadding(tokenizer)):
        batch = collate([packed[i] for i in range(3)])
        assert batch["input_ids"].shape == batch["labels"].shape == (3, 7)
        assert torch.equal(batch["input_ids"], torch.tensor(packed.windows[:3].astype(np.int64)))


def test_transformers_trainer_trains_and_evaluates_on_windows(tokenizer, make_documents, cache, tmp_path):
    packed = pack_documents(make_documents(TEXTS), tokenizer, 7, cache_dir=cache)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=7,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=3,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=packed, eval_dataset=packed)
    assert np.isfinite(trainer.train().training_loss)
    # A fresh model is near the uniform level. transformers 5.0 counts the first label of a window in its mean, hence 1/7.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(np.log(len(tokenizer)), rel=0.15)


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [1, 0, -3, 7.0, True, "7", None])
def test_a_window_without_a_target_is_refused(tokenizer, make_documents, cache, seq_len):
    stream = tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=cache)
    with pytest.raises(ConfigError, match="at least 2"):
        PackedTokens(stream, seq_len)


def test_a_window_longer_than_the_data_is_refused(tokenizer, make_documents, cache):
    stream = tokenize_documents(make_documents(["one", "two"]), tokenizer, cache_dir=cache)
    assert len(pack_tokens(stream, stream.num_tokens)) == 1
    with pytest.raises(DataError, match=rf"seq_len={stream.num_tokens + 1} is longer than the data: 2 document"):
        pack_tokens(stream, stream.num_tokens + 1)


def test_no_documents_are_refused(tokenizer, cache):
    with pytest.raises(DataError, match="0 documents"):
        tokenize_documents(Dataset.from_dict({"id": [], "text": []}), tokenizer, cache_dir=cache)


def test_documents_without_text_are_refused(tokenizer, cache):
    with pytest.raises(DataError, match=r"columns body.*text_column="):
        tokenize_documents(Dataset.from_dict({"body": ["a"]}), tokenizer, cache_dir=cache)


# -- documents apart -------------------------------------------------------------------------------------------


def test_documents_apart_restart_positions_and_have_no_target_at_their_start(tokenizer, make_documents, cache):
    stream = tokenize_documents(make_documents(TEXTS), tokenizer, cache_dir=cache)
    assert stream.eos_token_id == tokenizer.eos_token_id
    together, apart = pack_tokens(stream, 9), PackedTokens(stream, 9, isolate_documents=True)
    assert len(together) == len(apart)
    for plain, window in zip(together, apart, strict=True):
        assert set(plain) == {"input_ids", "labels"}
        assert np.array_equal(plain["input_ids"], window["input_ids"])
        position = 0
        for i, token in enumerate(window["input_ids"]):
            begins = i > 0 and window["input_ids"][i - 1] == tokenizer.eos_token_id
            position = 0 if i == 0 or begins else position + 1
            assert window["position_ids"][i] == position
            assert window["labels"][i] == (-100 if begins else token)
    assert apart.num_targets == sum(int((window["labels"][1:] != -100).sum()) for window in apart)
    assert apart.num_targets < together.num_targets


def test_a_window_of_documents_apart_gives_the_loss_of_its_documents(tokenizer, make_documents, cache):
    from loopformers.testing import tiny_model

    packed = pack_documents(make_documents(TEXTS), tokenizer, 31, isolate_documents=True, cache_dir=cache)
    model = tiny_model("flt", vocab_size=len(tokenizer)).double().eval()
    window = {name: torch.from_numpy(value)[None] for name, value in packed[0].items()}
    pieces = [torch.tensor(piece)[None] for piece in documents_in(packed[0]["input_ids"], tokenizer.eos_token_id)]
    with torch.no_grad():
        together = model(**window).loss * (window["labels"][:, 1:] != -100).sum()
        separate = sum(model(piece, labels=piece).loss * (piece.shape[1] - 1) for piece in pieces if piece.shape[1] > 1)
    assert len(pieces) >= 3
    torch.testing.assert_close(together, separate, rtol=1e-10, atol=1e-10)


# -- tokenizers of many styles ---------------------------------------------------------------------------------


@every_style
def test_a_run_trains_on_the_tokens_that_its_tokenizer_would_give_without_template(style, make_documents, cache):
    original = STYLES[style]()
    before = original.backend_tokenizer.to_str()
    made = run_tokenizer(original)
    texts = ["It was", "", " a cold day </s><s> <|endoftext|>"]
    streams = [tokenize_documents(make_documents(texts), each, cache_dir=cache) for each in (original, made)]
    assert streams[0].path == streams[1].path
    expected = [[*original(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]] for text in texts]
    assert documents_in(streams[0].tokens, original.eos_token_id) == [
        *([*e, original.eos_token_id] for e in expected),
        [],
    ]
    assert original.backend_tokenizer.to_str() == before
    for text in ("It was", " a"):
        assert made(text)["input_ids"] == next(DocumentEncoder(original).encode([text])).tolist()[:-1]
        assert encode_prompt(made, text) == made(text)["input_ids"]


@every_style
def test_what_a_run_makes_of_a_tokenizer_survives_saving(style, tmp_path):
    made = run_tokenizer(STYLES[style]())
    made.chat_template = "{{ messages }}"
    made.save_pretrained(tmp_path)
    loaded = open_tokenizer(tmp_path)
    for name in ("bos_token", "eos_token", "pad_token", "padding_side", "model_input_names", "chat_template"):
        assert getattr(loaded, name) == getattr(made, name)
    assert loaded.all_special_tokens == made.all_special_tokens
    assert loaded("It was")["input_ids"] == made("It was")["input_ids"]
    assert DocumentEncoder(loaded).fingerprint == DocumentEncoder(made).fingerprint


def test_a_pad_token_of_its_own_is_kept():
    tokenizer = STYLES["gpt2"]()
    tokenizer.add_special_tokens({"pad_token": "<pad>", "extra_special_tokens": ["<|im_end|>"]})
    made = run_tokenizer(tokenizer)
    assert (made.pad_token, made.pad_token_id) == ("<pad>", 2048)
    assert "<|im_end|>" in made.all_special_tokens
    assert vocabulary_size(made) == 2050 > made.vocab_size


def test_no_document_forges_its_end_where_words_of_the_vocabulary_spell_it(make_documents, cache):
    tokenizer = space_marking_tokenizer()
    texts = ["It was </s> a day", "</s>", "It </s></s>", "a </s"]
    stream = tokenize_documents(make_documents(texts), tokenizer, cache_dir=cache)
    documents = documents_in(stream.tokens, tokenizer.eos_token_id)
    assert len(documents) == len(texts) + 1
    assert documents[0][:2] == tokenizer("It was", add_special_tokens=False)["input_ids"]
    assert "</s>" in tokenizer.decode(documents[0][:-1]).replace(" ", "")
    again = pickle.loads(pickle.dumps(DocumentEncoder(tokenizer)))
    assert [ids.tolist() for ids in again.encode(texts)] == documents[:-1]


def test_an_eos_token_that_stands_for_unknown_words_is_refused_where_it_would_end_a_document(make_documents, cache):
    tokenizer = word_tokenizer(5, eos_token="<unk>")
    assert tokenize_documents(make_documents(["w1 w2"]), tokenizer, cache_dir=cache).tokens.tolist() == [3, 4, 0]
    with pytest.raises(DataError, match=r"encodes words of the text as its eos token \(0\)"):
        tokenize_documents(make_documents(["w1 stranger w2"]), tokenizer, cache_dir=cache)


def test_ids_beyond_a_gap_in_the_vocabulary_are_kept(make_documents, cache):
    vocab = {"<unk>": 0, "</s>": 1, "far": 70_000}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenize_documents(make_documents(["far"]), tokenizer, cache_dir=cache).tokens.tolist() == [70_000, 1]


def test_a_tokenizer_with_a_part_in_python_is_refused(make_documents, cache):
    class Halves:
        def pre_tokenize(self, text):
            text.split(lambda i, part: [part[:1], part[1:]])

    tokenizer = word_tokenizer(3, eos_token="</s>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Halves())
    with pytest.raises(DataError, match="has a part that cannot be copied"):
        tokenize_documents(make_documents(["w1"]), tokenizer, cache_dir=cache)
