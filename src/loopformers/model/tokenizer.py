"""Opens tokenizers, and turns prompts into the tokens that training text would have become.

Every tokenizer of this package is opened by `open_tokenizer`, which runs no code that a folder or a repository brings along.
Every prompt, context and scored text is encoded by `encode_prompt`: it begins as the tokenizer begins its texts, and no end
token closes it, because a model continues what is still open. Tokenizers that a run has trained with add nothing at all
(`loopformers.data.tokenizer.run_tokenizer`), as their training text had nothing added either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopformers.errors import CheckpointError, ConfigError, first_line, shorten
from loopformers.model.quiet import quiet_transformers
from loopformers.readers import read_json

__all__ = ["continuation_text", "encode_prompt", "framing", "open_tokenizer", "vocabulary_size"]

TOKENIZER_FILES = ("tokenizer*.json", "tokenizer.model", "vocab*", "merges.txt", "*.model", "tekken.json", "*.gguf")
"""What a folder with a tokenizer holds at least one of."""

TOKENIZER_JSON = "tokenizer.json"
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

MAX_TOKENIZER_BYTES = 2**29
"""Largest tokenizer.json that is read to say what is wrong with it; vocabularies of 250,000 entries take about 35 MB."""

PROBE = "a"
"""The text that shows what a tokenizer adds to texts."""

CONTEXT_TOKENS = 8
"""Tokens of a prompt that its continuation is decoded behind; a character takes at most four."""


def open_tokenizer(
    source: str | os.PathLike[str],
    *,
    local_only: bool = False,
    gguf_file: str | None = None,
    remedy: str = "give the folder of a tokenizer",
) -> Any:
    """Open a tokenizer with the code of transformers alone: no question is asked, and no code of its folder runs.

    Args:
        source: Folder, or a name on the hub.
        local_only: Whether it must be on this disk: a folder, or in the cache.
        gguf_file: Name of a GGUF file in `source` that holds the tokenizer.
        remedy: Ends the text of every error: what its reader can do.

    Raises:
        CheckpointError: There is no tokenizer, a file of it is damaged or holds a value of the wrong type, or it needs
            code of its own.
    """
    from transformers import AutoTokenizer

    name = os.fspath(source)
    folder = Path(name)
    is_folder = folder.is_dir()
    if is_folder:
        _check_folder(folder, remedy)
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                name,
                trust_remote_code=False,
                local_files_only=local_only or is_folder,
                **({} if gguf_file is None else {"gguf_file": gguf_file}),
            )
            known = vocabulary_size(tokenizer)
            tokenizer(PROBE)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as cause:  # parsers raise errors without a common base, and a panic of Rust is no Exception
            if isinstance(cause, OSError) and not is_folder:
                raise CheckpointError(
                    f"{name} holds no tokenizer that opens ({first_line(cause)}); {remedy}"
                ) from cause
            if "trust_remote_code" in str(cause):
                raise _own_code(name, remedy) from cause
            for file in (folder / TOKENIZER_JSON, folder / "config.json"):  # transformers reads both, and names neither
                if is_folder and file.exists():
                    _read(file, name, remedy)
            raise CheckpointError(f"the tokenizer in {name} does not load: {first_line(cause)}; {remedy}") from cause
    if _asks_for_code(getattr(tokenizer, "init_kwargs", {}).get("auto_map")):
        raise _own_code(name, remedy)
    if known == 0:
        raise CheckpointError(f"{name} holds no tokenizer that opens (its vocabulary is empty); {remedy}")
    return tokenizer


def vocabulary_size(tokenizer: Any) -> int:
    """Return one more than the largest id of a tokenizer: the rows that an embedding needs.

    Ids may have gaps, and added tokens may lie beyond them, so that `len(tokenizer)` is smaller.
    """
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def framing(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer puts before and behind each text, whether by its template or by its settings.

    Raises:
        ConfigError: It changes texts in another way when it adds special tokens, or adds ids that it does not know.
    """
    bare = _ids(tokenizer, PROBE, add_special_tokens=False)
    full = _ids(tokenizer, PROBE, add_special_tokens=True)
    places = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
    name = _name(tokenizer)
    if not places:
        raise ConfigError(
            f"tokenizer {name!r} encodes {PROBE!r} as {bare} without special tokens and as {full} with them, so what begins "
            "its texts cannot be told; give a tokenizer whose template only adds tokens before and behind"
        )
    begin, end = tuple(full[: places[0]]), tuple(full[places[0] + len(bare) :])
    known = vocabulary_size(tokenizer)
    if unknown := [i for i in (*begin, *end) if not 0 <= i < known]:
        raise ConfigError(
            f"the template of tokenizer {name!r} adds token {unknown[0]}, and its vocabulary ends at {known - 1}; correct "
            f"post_processor in its {TOKENIZER_JSON}"
        )
    return begin, end


def encode_prompt(tokenizer: Any, text: str, *, begin: Sequence[int] | None = None) -> list[int]:
    """Return the ids of a text that a model is to continue, or to score: it is begun as texts are, and never closed.

    A special token that is spelled out in the text is that token, as chat templates need.

    Args:
        tokenizer: Any tokenizer of transformers.
        text: The text.
        begin: Ids to begin with, unless the text spells them out itself; default: those of `framing`.

    Raises:
        ConfigError: See `framing`.
    """
    first = list(framing(tokenizer)[0] if begin is None else begin)
    ids = _ids(tokenizer, text, add_special_tokens=False)
    return ids if ids[: len(first)] == first else first + ids


def continuation_text(tokenizer: Any, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """Return the text that new tokens add to a prompt, special tokens left out.

    Tokens are decoded behind the prompt's last ones: alone, many tokenizers drop the space that begins a word.
    """
    context = list(prompt_ids[-CONTEXT_TOKENS:])
    before: str = tokenizer.decode(context, skip_special_tokens=True)
    whole: str = tokenizer.decode([*context, *new_ids], skip_special_tokens=True)
    if before and whole.startswith(before):
        return whole[len(before) :]
    alone: str = tokenizer.decode(list(new_ids), skip_special_tokens=True)
    return alone


# -- files -------------------------------------------------------------------------------------------------------


def _check_folder(folder: Path, remedy: str) -> None:
    """Check the small files of a tokenizer: transformers' own errors name neither file nor field."""
    if not any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern)):
        raise CheckpointError(f"{folder} holds no tokenizer that opens (no {TOKENIZER_JSON} in it); {remedy}")
    for file in (folder / name for name in SETTINGS_FILES):
        if not file.exists():
            continue
        fields = _read(file, str(folder), remedy)
        if _asks_for_code(fields.get("auto_map")):
            raise _own_code(str(folder), remedy)
        for field, value in fields.items():
            rule = _rule(field) if file.name != "added_tokens.json" else ADDED_TOKEN
            if rule is not None and not rule[0](value):
                raise CheckpointError(
                    f"the tokenizer in {folder} does not load: {field}={shorten(value)} in {file} must be {rule[1]}; {remedy}"
                )


def _read(file: Path, name: str, remedy: str) -> dict[str, Any]:
    try:
        return read_json(file, remedy=remedy, max_bytes=MAX_TOKENIZER_BYTES)
    except CheckpointError as cause:
        raise CheckpointError(f"the tokenizer in {name} does not load: {cause}") from cause


Rule = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    text = value.get("content") if isinstance(value, Mapping) else value
    return value is None or isinstance(text, str)


def _is_string(value: Any) -> bool:
    return value is None or isinstance(value, str)


FIELD_RULES: dict[str, Rule] = {
    "model_max_length": (lambda value: value is None or (_is_number(value) and value >= 1), "a number of at least 1"),
    "tokenizer_class": (_is_string, "a string"),
    "auto_map": (lambda value: value is None or isinstance(value, Mapping | list), "an object"),
    "padding_side": (lambda value: value in (None, "left", "right"), "left or right"),
    "truncation_side": (lambda value: value in (None, "left", "right"), "left or right"),
    "chat_template": (lambda value: _is_string(value) or isinstance(value, Mapping | list), "a string"),
    "model_input_names": (lambda value: value is None or isinstance(value, list), "a list of strings"),
    "added_tokens_decoder": (lambda value: isinstance(value, Mapping), "an object of tokens by id"),
}

SPECIAL_TOKEN: Rule = (_is_token, "a string, or an object whose content is one")
ADDED_TOKEN: Rule = (lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0, "an id")
FLAG: Rule = (lambda value: value is None or isinstance(value, bool), "true or false")


def _rule(field: str) -> Rule | None:
    if field in FIELD_RULES:
        return FIELD_RULES[field]
    if not field.endswith("_token"):
        return None
    return FLAG if field.startswith("add_") else SPECIAL_TOKEN


def _asks_for_code(auto_map: Any) -> bool:
    """Whether an `auto_map` names a tokenizer class of its own. A list is the form that old versions wrote."""
    return bool(auto_map.get("AutoTokenizer")) if isinstance(auto_map, Mapping) else isinstance(auto_map, list)


def _own_code(name: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer in {name} asks for code of its own (auto_map), and code from a checkpoint is never run here; save "
        f"it with a class of transformers and without auto_map, or {remedy}"
    )


# -- helpers -----------------------------------------------------------------------------------------------------


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return list(ids)


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
