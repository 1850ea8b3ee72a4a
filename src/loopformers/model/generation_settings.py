"""Checks the generation configuration of a checkpoint, whose values transformers reads and uses unchecked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from loopformers.errors import CheckpointError, ConfigError, LoopformersError, first_line, shorten
from loopformers.model.inherited import check_tokens
from loopformers.model.saved_schedule import GENERATION_CONFIG_FILE
from loopformers.readers import read_json

__all__ = ["blame_generation_settings", "check_generation_file", "check_generation_settings"]

NUMBERS = {
    # smallest, largest, whether whole
    "repetition_penalty": (1e-6, 1e6, False),
    "encoder_repetition_penalty": (1e-6, 1e6, False),
    "temperature": (0, 1e6, False),
    "top_p": (0, 1, False),
    "min_p": (0, 1, False),
    "typical_p": (0, 1, False),
    "epsilon_cutoff": (0, 1, False),
    "eta_cutoff": (0, 1, False),
    "length_penalty": (-1e6, 1e6, False),
    "guidance_scale": (-1e6, 1e6, False),
    "top_k": (0, 2**31, True),
    "num_beams": (1, 2**16, True),
    "num_return_sequences": (1, 2**16, True),
    "max_length": (0, 2**31, True),
    "max_new_tokens": (0, 2**31, True),
    "min_length": (0, 2**31, True),
    "min_new_tokens": (0, 2**31, True),
    "no_repeat_ngram_size": (0, 2**31, True),
}
SWITCHES = ("do_sample", "use_cache", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_BLAMED = {*NUMBERS, *SWITCHES, *TOKENS, "schedule", "transformers_version"}
"""Settings that are checked when a checkpoint is opened, or that generate does not read."""


def check_generation_file(folder: Any) -> None:
    """Raise CheckpointError where a folder has a generation configuration that is no JSON object; transformers passes over it."""
    file = Path(str(folder)) / GENERATION_CONFIG_FILE
    if file.exists():
        read_json(file)


def check_generation_settings(settings: GenerationConfig, source: object, vocab_size: int) -> None:
    """Raise CheckpointError where a checkpoint's generation configuration holds a value that generate cannot use."""
    for name, (smallest, largest, is_whole) in NUMBERS.items():
        value = getattr(settings, name, None)
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and smallest <= value <= largest):
            kind = "a whole number" if is_whole else "a number"
            raise CheckpointError(
                f"the generation configuration of {source} says {name}={shorten(value)}, which must be {kind} from {smallest:g} "
                f"to {largest:g}; mend or delete {GENERATION_CONFIG_FILE}"
            )
    for name in SWITCHES:
        if not isinstance(value := getattr(settings, name, None), bool | None):
            raise CheckpointError(
                f"the generation configuration of {source} says {name}={shorten(value)}, which must be true or false; mend or "
                f"delete {GENERATION_CONFIG_FILE}"
            )
    for name in TOKENS:
        try:
            check_tokens(name, getattr(settings, name, None), vocab_size, several=name == "eos_token_id")
        except ConfigError as error:
            raise CheckpointError(f"the generation configuration of {source}: {error}") from error


@contextmanager
def blame_generation_settings(settings: GenerationConfig, source: object) -> Iterator[None]:
    """Let transformers' errors be about a checkpoint's generation configuration, where it holds settings that may cause them.

    transformers has dozens of rare settings (`bad_words_ids`, `max_time`, `constraints`), which it first looks at while it
    generates. Only a caller whose own arguments are known to be right can use this.

    Args:
        settings: The model's.
        source: Where the model comes from, for the error.

    Raises:
        CheckpointError: generate failed, and the configuration sets something beyond what `check_generation_settings` checks.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        suspects = sorted(settings.to_diff_dict().keys() - NOT_BLAMED)
        if isinstance(error, LoopformersError | UnicodeError) or "memory" in str(error) or not suspects:
            raise
        raise CheckpointError(
            f"generate cannot use the generation configuration of {source}, which sets {', '.join(suspects)} "
            f"({first_line(error)}); mend or delete {GENERATION_CONFIG_FILE}"
        ) from error
