"""Opens what is to be evaluated: checkpoints of ours, and any causal language model that transformers opens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from loopformers.errors import CheckpointError, ConfigError
from loopformers.model.config import LoopConfig
from loopformers.model.quiet import quiet_transformers
from loopformers.model.tokenizer import open_tokenizer, vocabulary_size

__all__ = ["check_tokenizer", "is_looped", "load_any_model", "looped_config", "model_hash", "training_flops"]

PADDING_ROWS = 128
"""Vocabularies are padded to a multiple of at most so many rows; a tokenizer that is smaller by more is another one."""


def is_looped(model: Any) -> bool:
    """Whether a model is one of ours, and so takes a number of loops."""
    return isinstance(model.config, LoopConfig)


def looped_config(folder: str) -> bool:
    """Whether a folder holds a checkpoint of ours, judged by its config.json."""
    try:
        fields = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and fields.get("model_type") == LoopConfig.model_type


def load_any_model(
    name: str, *, tokenizer: str | None = None, device: str | None = None, dtype: str = "auto"
) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its tokenizer.

    Args:
        name: Folder of a checkpoint, ours or another's; a `.gguf` file; or a name on the hub.
        tokenizer: Folder or name of the tokenizer; default: the model's own.
        device: Such as `cuda`; default: `cuda` where there is one, else `cpu`.
        dtype: Such as `float32`; `auto`: as the weights were saved.

    Raises:
        CheckpointError: Nothing of this name can be opened, or it has no tokenizer.
        ConfigError: An unknown dtype, or a tokenizer that is not the model's.
    """
    from transformers import AutoModelForCausalLM

    path = Path(name)
    is_gguf = path.suffix == ".gguf"
    source = str(path.parent) if is_gguf else name
    extra = {"gguf_file": path.name} if is_gguf else {}
    if is_gguf and not path.is_file():
        raise CheckpointError(f"{name} is no file; give a GGUF file, a folder or a name on the hub")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is no type of torch; write float32, bfloat16, float16 or auto")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} and torch sees no CUDA device; leave it out, or give cpu")
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
        except CheckpointError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(_cannot_open(name, error)) from error
    gguf_file = path.name if is_gguf and tokenizer is None else None
    opened = open_tokenizer(tokenizer or source, gguf_file=gguf_file, remedy="name one with --tokenizer")
    check_tokenizer(model, opened, name)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(where).eval(), opened


def check_tokenizer(model: Any, tokenizer: Any, name: str) -> None:
    """Check that a tokenizer fits a model, and that it has an end token.

    Raises:
        ConfigError: More entries than the model has, so many fewer that it must be another's, or no end token.
    """
    entries, known = vocabulary_size(tokenizer), model.get_input_embeddings().num_embeddings
    known = model.config.vocab_size if is_looped(model) else known
    if entries > known:
        raise ConfigError(
            f"the tokenizer of {name} has {entries} entries and the model knows {known} tokens; give the model's own with "
            "--tokenizer"
        )
    if is_looped(model) and entries <= known - PADDING_ROWS:
        raise ConfigError(
            f"the tokenizer of {name} has {entries} entries and the model knows {known} tokens, more than padding explains; "
            "give the model's own with --tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {name} has no end token, which starts a text without context and ends an answer; set one, for "
            "example tokenizer.eos_token = '<|endoftext|>', and save the tokenizer again"
        )


def model_hash(model: Any, tokenizer: Any) -> str:
    """Return a hash of all that decides a model's answers: weights, configuration and vocabulary."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in UNIMPORTANT}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


UNIMPORTANT = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that change no answer (the weights' own dtype is hashed with them)."""


def training_flops(folder: str) -> float | None:
    """Return the operations that training a checkpoint took, where its folder records them (`result.json`)."""
    try:
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        return float(result["training_flops"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cannot_open(name: str, error: Exception) -> str:
    if Path(name).exists():
        return f"{name} is no checkpoint that transformers opens ({_first_line(error)}); give a folder of config.json and weights"
    return (
        f"{name} is neither a folder here nor a model that can be had ({_first_line(error)}); check the name, or give the "
        "folder of a checkpoint"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
