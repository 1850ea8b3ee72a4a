"""Tokenizers as users bring them, made offline from the bundled one: what differs is what each adds, pads and names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from loopformers.data.tokenizer import bundled_tokenizer

__all__ = ["STYLES", "every_style", "save_style", "space_marking_tokenizer"]


def gpt2_style() -> Any:
    """As GPT-2's: one token for begin and end, none for padding, which would go to the right."""
    model = json.loads(bundled_tokenizer().backend_tokenizer.to_str())["model"]
    return GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def llama_style() -> Any:
    """As Llama's and Mistral's can be: `<s>` before and `</s>` behind each text by the template, two ids beyond vocab_size."""
    backend = Tokenizer.from_str(bundled_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<s>")


STYLES: dict[str, Callable[[], Any]] = {
    "bundled": bundled_tokenizer,
    "gpt2": gpt2_style,
    "llama": llama_style,
}

every_style = pytest.mark.parametrize("style", sorted(STYLES))


def save_style(style: str, folder: Path) -> str:
    """Write a style's tokenizer to a folder, and return the folder."""
    STYLES[style]().save_pretrained(folder)
    return str(folder)


def space_marking_tokenizer() -> Any:
    """As SentencePiece's: a word holds the space before it, and decoding drops the first one of a text.

    Words that it does not know, such as a spelled out `</s>`, it splits into characters.
    """
    words = ["▁It", "▁was", "▁a", "▁cold", "▁day", "▁", *"abcdefghijklmnopqrstuvwxyzIt</s>."]
    vocab = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        *((word, -1.0 - len(words) / 99) for word in dict.fromkeys(words)),
    ]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
