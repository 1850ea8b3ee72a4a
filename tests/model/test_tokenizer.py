from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from loopformers.data.tokenizer import BUNDLED_TOKENIZER_DIR, bundled_tokenizer
from loopformers.errors import CheckpointError, ConfigError
from loopformers.model.tokenizer import continuation_text, encode_prompt, framing, open_tokenizer, vocabulary_size
from tests.tokenizer_styles import STYLES, every_style, save_style, space_marking_tokenizer

# -- opening ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled tokenizer, to be damaged."""
    return Path(shutil.copytree(BUNDLED_TOKENIZER_DIR, tmp_path / "damaged"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **fields}))


@every_style
def test_a_folder_opens_as_what_was_saved(style: str, tmp_path: Path) -> None:
    opened, original = open_tokenizer(save_style(style, tmp_path), local_only=True), STYLES[style]()
    assert opened.get_vocab() == original.get_vocab()
    assert (opened.pad_token_id, opened.eos_token_id) == (original.pad_token_id, original.eos_token_id)
    assert opened("It was")["input_ids"] == original("It was")["input_ids"]


@pytest.mark.parametrize("tokenizer_class", ["Nope", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["evil.T", "evil.T"]}, ["evil.T", None]])
def test_code_of_a_folder_never_runs_whatever_stdin_says(
    folder: Path,
    tokenizer_class: str,
    auto_map: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass T: pass\n")
    change(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class, auto_map=auto_map)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(CheckpointError, match=r"asks for code of its own.*never run") as caught:
        open_tokenizer(folder)
    assert "trust_remote_code" not in str(caught.value)
    assert capsys.readouterr() == ("", "")
    assert sys.stdin.read() == "y\n" * 9, "nothing was asked"
    assert not ran.exists()


def test_code_that_the_configuration_of_a_model_asks_for_does_not_run_for_its_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass C: pass\n")
    change(folder / "config.json", model_type="nope", auto_map={"AutoConfig": "evil.C"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    assert open_tokenizer(folder)("It was")["input_ids"] == bundled_tokenizer()("It was")["input_ids"]
    assert capsys.readouterr().out == ""
    assert not (folder / "ran").exists()


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0", "mod'),
        ("tokenizer.json", DEEP),
        ("tokenizer.json", b"\xff\xfe{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", ""),
        ("tokenizer_config.json", DEEP),
        ("special_tokens_map.json", '"eos"'),
        ("added_tokens.json", "[1]"),
        ("config.json", "[]"),
        ("config.json", DEEP),
    ],
)
def test_a_damaged_file_is_named(folder: Path, file: str, content: str | bytes) -> None:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"^the tokenizer in .*does not load: ") as caught:
        open_tokenizer(folder, remedy="name another")
    assert str(folder / file) in str(caught.value)
    assert str(caught.value).endswith("name another")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("eos_token", 5, "a string"),
        ("pad_token", True, "a string"),
        ("bos_token", ["<s>"], "a string"),
        ("unk_token", {"text": "<unk>"}, "an object whose content is one"),
        ("model_max_length", "x", "a number of at least 1"),
        ("model_max_length", -3, "a number of at least 1"),
        ("tokenizer_class", 5, "a string"),
        ("auto_map", 5, "an object"),
        ("padding_side", "up", "left or right"),
        ("chat_template", 7, "a string"),
        ("model_input_names", 5, "a list of strings"),
        ("added_tokens_decoder", [1], "an object of tokens by id"),
        ("add_bos_token", "yes", "true or false"),
        ("eos_token", "x" * 10_000, None),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_file(
    folder: Path, field: str, value: Any, rule: str | None
) -> None:
    change(folder / "tokenizer_config.json", **{field: value})
    if rule is None:
        assert open_tokenizer(folder).eos_token == value
        return
    with pytest.raises(CheckpointError, match=rf"{field}=.* in .*tokenizer_config\.json must be .*{rule}"):
        open_tokenizer(folder)


def test_values_of_the_other_small_files_are_checked_too(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"eos_token": 5}')
    with pytest.raises(CheckpointError, match=r"eos_token=5 in .*special_tokens_map\.json must be a string"):
        open_tokenizer(folder)
    (folder / "special_tokens_map.json").unlink()
    (folder / "added_tokens.json").write_text('{"<x>": "3"}')
    with pytest.raises(CheckpointError, match=r"<x>='3' in .*added_tokens\.json must be an id"):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    "part",
    [
        {"model": {"type": "Nope"}},
        {"model": {"type": "BPE", "vocab": {"a": -7}, "merges": []}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*b("}, "content": ""}},
        {"added_tokens": 5},
    ],
)
def test_what_the_tokenizers_library_refuses_is_our_error(folder: Path, part: dict[str, Any]) -> None:
    change(folder / "tokenizer.json", **part)
    with pytest.raises(CheckpointError, match=r"the tokenizer in .*does not load: .*give the folder of a tokenizer"):
        open_tokenizer(folder)


def test_a_panic_of_the_library_is_our_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As the bindings of Rust raise it."""

    def panic(*args: Any, **kwargs: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", panic)
    with pytest.raises(CheckpointError, match="does not load: index out of bounds"):
        open_tokenizer(folder)


@pytest.mark.parametrize("missing", ["nowhere", "an/empty", "nul\0"])
def test_a_folder_without_tokenizer_is_refused(missing: str, tmp_path: Path) -> None:
    (tmp_path / "an" / "empty").mkdir(parents=True)
    (tmp_path / "an" / "empty" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"holds no tokenizer that opens|does not load"):
        open_tokenizer(tmp_path / missing, local_only=True)


# -- what begins and ends texts --------------------------------------------------------------------------------


def with_template(template: str, *tokens: str, **special: str) -> Any:
    backend = Tokenizer.from_str(bundled_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens(list(tokens))
    ids = [(token, backend.token_to_id(token)) for token in tokens]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def with_flags() -> Any:
    """Settings that add tokens, without a template in any file."""
    model = json.loads(bundled_tokenizer().backend_tokenizer.to_str())["model"]
    vocab = {**model["vocab"], "<s>": 2048, "</s>": 2049, "<unk>": 2050}
    merges = [tuple(pair) for pair in model["merges"]]
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, add_eos_token=True)


BERT = ("[CLS] $A [SEP]", "[CLS]", "[SEP]")


@pytest.mark.parametrize(
    ("make", "begin", "end"),
    [
        (STYLES["bundled"], [], []),
        (STYLES["gpt2"], [], []),
        (STYLES["llama"], ["<s>"], ["</s>"]),
        (with_flags, ["<s>"], ["</s>"]),
        (lambda: with_template(*BERT, cls_token="[CLS]", sep_token="[SEP]"), ["[CLS]"], ["[SEP]"]),
        (lambda: with_template("[gMASK] <sop> $A", "[gMASK]", "<sop>"), ["[gMASK]", "<sop>"], []),
        (ByT5Tokenizer, [], ["</s>"]),
        (space_marking_tokenizer, [], []),
    ],
)
def test_a_prompt_begins_as_its_tokenizer_begins_texts_and_is_never_closed(
    make: Any, begin: list[str], end: list[str]
) -> None:
    tokenizer = make()
    ids = [tokenizer.convert_tokens_to_ids(tokens) for tokens in (begin, end)]
    assert [list(part) for part in framing(tokenizer)] == ids
    for text in ("It was a", "", " a\n"):
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode_prompt(tokenizer, text) == ids[0] + bare
        assert encode_prompt(tokenizer, text, begin=()) == bare


def test_a_begin_token_that_a_prompt_spells_out_is_not_doubled() -> None:
    tokenizer = STYLES["llama"]()
    assert encode_prompt(tokenizer, "<s>It was") == encode_prompt(tokenizer, "It was")


def test_a_template_that_adds_ids_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    special = {"<s>": {"id": "<s>", "ids": [99_999], "tokens": ["<s>"]}}
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    change(folder / "tokenizer.json", post_processor=template)
    with pytest.raises(ConfigError, match=r"adds token 99999, and its vocabulary ends at 2047"):
        encode_prompt(open_tokenizer(folder), "It was")


# -- sizes and text --------------------------------------------------------------------------------------------


def test_a_vocabulary_is_as_large_as_its_largest_id_asks_for() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 7, "b": 70_000}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert (len(tokenizer), vocabulary_size(tokenizer)) == (3, 70_001)
    tokenizer.add_tokens(["<x>"])
    assert vocabulary_size(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    assert vocabulary_size(bundled_tokenizer()) == 2048
    assert STYLES["llama"]().vocab_size < vocabulary_size(STYLES["llama"]()) == 2050


def test_a_continuation_keeps_the_space_that_its_tokenizer_drops_from_a_text() -> None:
    tokenizer = space_marking_tokenizer()
    prompt, new = tokenizer("It was")["input_ids"], tokenizer.convert_tokens_to_ids(["▁a", "▁cold", "</s>"])
    assert tokenizer.decode(new, skip_special_tokens=True) == "a cold"
    assert continuation_text(tokenizer, prompt, new) == " a cold"
    assert continuation_text(tokenizer, prompt, []) == ""
    assert continuation_text(tokenizer, tokenizer.convert_tokens_to_ids(["<s>"]), new) == "a cold"


@pytest.mark.parametrize("text", ["naïve – 🐋 whale", "It was  a\n\nday"])
def test_any_cut_of_a_text_gives_the_rest_back(text: str) -> None:
    tokenizer = bundled_tokenizer()
    for cut in range(1, len(text)):
        prompt, rest = (tokenizer(part)["input_ids"] for part in (text[:cut], text[cut:]))
        assert continuation_text(tokenizer, prompt, rest) == text[cut:]
