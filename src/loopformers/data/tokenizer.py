"""The byte-level BPE tokenizer of this package: how it was made, and how to load it.

Any text has an encoding and decodes to itself, as the 256 bytes are in the vocabulary (byte-level BPE as in GPT-2). One
special token, `<|endoftext|>`, ends documents and stands for bos, eos and pad alike.

The shipped one is made by this command, from the train split of the bundled corpus alone:

    python -m loopformers.data.tokenizer --output-dir src/loopformers/data/bundled/tokenizer
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loopformers.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["BUNDLED_TOKENIZER_DIR", "BUNDLED_VOCAB_SIZE", "END_OF_TEXT", "bundled_tokenizer", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
"""The only special token; its id is 0."""

BUNDLED_TOKENIZER_DIR = Path(__file__).parent / "bundled" / "tokenizer"
"""The shipped tokenizer: `AutoTokenizer.from_pretrained` reads this folder."""

BUNDLED_VOCAB_SIZE = 2048

MIN_VOCAB_SIZE = 257
"""256 bytes and the special token."""


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    """Load the tokenizer that ships with this package (2048 entries)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BUNDLED_TOKENIZER_DIR)


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
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=[
            "input_ids",
            "attention_mask",
        ],  # the default adds token_type_ids, which no causal model takes
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
    main()
