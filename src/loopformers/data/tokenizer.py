"""The byte-level BPE tokenizer of this package, and what runs make of anybody's tokenizer.

Any text has an encoding and decodes to itself, as the 256 bytes are in the vocabulary (byte-level BPE as in GPT-2). One
special token, `<|endoftext|>`, ends documents and stands for bos, eos and pad alike.

The shipped one is made by this command, from the train split of the bundled corpus alone:

    python -m loopformers.data.tokenizer --output-dir src/loopformers/data/bundled/tokenizer
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loopformers.boundary import run_command
from loopformers.errors import ConfigError, DataError
from loopformers.model.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "BUNDLED_TOKENIZER_DIR",
    "BUNDLED_VOCAB_SIZE",
    "END_OF_TEXT",
    "bundled_tokenizer",
    "plain_backend",
    "run_tokenizer",
    "train_tokenizer",
]

END_OF_TEXT = "<|endoftext|>"
"""The only special token; its id is 0."""

BUNDLED_TOKENIZER_DIR = Path(__file__).parent / "bundled" / "tokenizer"
"""The shipped tokenizer: `AutoTokenizer.from_pretrained` reads this folder."""

BUNDLED_VOCAB_SIZE = 2048

MIN_VOCAB_SIZE = 257
"""256 bytes and the special token."""

CAUSAL_SETTINGS: dict[str, Any] = {
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
    "model_input_names": [
        "input_ids",
        "attention_mask",
    ],  # the default adds token_type_ids, which no causal model takes
}
"""How tokenizers of causal models are set up."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

ADDS_NOTHING = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
"""The template of a tokenizer that adds no token, as transformers writes it."""


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    """Load the tokenizer that ships with this package (2048 entries)."""
    tokenizer: PreTrainedTokenizerFast = open_tokenizer(BUNDLED_TOKENIZER_DIR)
    return tokenizer


def run_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a run trains and is saved with: the same tokens, with the conventions of training.

    Training text is documents with the end token behind each and nothing else (`loopformers.data.packing.DocumentEncoder`).
    So that whoever opens the trained model's folder encodes prompts in the same way, what is returned

    - adds no token to texts, whatever the template of the given one does;
    - pads on the left, as generation from batches needs; with the end token where the given one has no pad token. No
      window of training holds padding, and the end token stays a target;
    - returns `input_ids` and `attention_mask`, which is what a causal model takes.

    Args:
        tokenizer: A fast tokenizer with an eos token; it is left as it is.

    Raises:
        DataError: A tokenizer without eos token or backend.
    """
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(plain_backend(tokenizer))
    special = {name: token for name in SPECIAL_TOKENS if (token := getattr(tokenizer, name, None)) is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": tokenizer.eos_token, **special},
        extra_special_tokens=[token for token in tokenizer.all_special_tokens if token not in special.values()],
        chat_template=tokenizer.chat_template,
        model_max_length=tokenizer.model_max_length,
        name_or_path=tokenizer.name_or_path,
        **CAUSAL_SETTINGS,
    )


def plain_backend(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what `Tokenizer.from_str` makes a backend of that encodes as a tokenizer's does, and adds, cuts and pads nothing.

    Raises:
        DataError: A tokenizer without eos token, or without a backend that can be copied.
    """
    name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise DataError(f"tokenizer {name!r} has no backend of the tokenizers library; use its fast version")
    if tokenizer.eos_token_id is None:
        known = ", ".join(repr(token) for token in tokenizer.all_special_tokens[:5])
        raise DataError(
            f"tokenizer {name!r} has no eos token, which ends each document; set tokenizer.eos_token and save it again, or "
            f"write eos_token in its tokenizer_config.json{f' (its special tokens: {known})' if known else ''}"
        )
    try:
        serialised = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # the library's own type of error; parts written in Python have no serialised form
        raise DataError(
            f"tokenizer {name!r} has a part that cannot be copied ({error}); use one whose parts all come from the tokenizers "
            "library"
        ) from error
    serialised |= {"truncation": None, "padding": None, "post_processor": ADDS_NOTHING}
    return json.dumps(serialised)


def train_tokenizer(texts: Iterable[str], vocab_size: int = BUNDLED_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; equal texts give an equal tokenizer.

    Args:
        texts: What to learn merges from: training text only, or validation figures flatter.
        vocab_size: Number of entries, the 256 bytes and `<|endoftext|>` included.

    Returns:
        A tokenizer without a limit of length, which pads on the left, as generation from batches needs.

    Raises:
        ConfigError: `vocab_size` is below 257.
        DataError: The texts repeat too little for so many entries.
    """
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size={vocab_size} does not hold the 256 bytes and {END_OF_TEXT}; give at least {MIN_VOCAB_SIZE}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocab_size:
        raise DataError(
            f"vocab_size={vocab_size} is out of reach: the texts yield only {backend.get_vocab_size()} entries; "
            "give more text or a smaller vocab_size"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        **CAUSAL_SETTINGS,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train the bundled tokenizer and save it: the command that made the shipped one."""
    from loopformers.data.corpora import BUNDLED, load_documents

    parser = argparse.ArgumentParser(prog="python -m loopformers.data.tokenizer", description=main.__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write the tokenizer to")
    output_dir: Path = parser.parse_args(argv).output_dir
    tokenizer = train_tokenizer(load_documents(BUNDLED, "train")["text"], BUNDLED_VOCAB_SIZE)
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir) as aside:
        tokenizer.save_pretrained(aside)
        for file in Path(aside).iterdir():
            os.replace(file, output_dir / file.name)
    print(f"saved {len(tokenizer)} entries to {output_dir}")


if __name__ == "__main__":
    sys.exit(run_command(main))
