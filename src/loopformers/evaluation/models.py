"""Opens what is to be evaluated: checkpoints of ours, and any causal language model that transformers opens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from loopformers.errors import CheckpointError, ConfigError, LoopformersError, first_line
from loopformers.evaluation.gguf import check_gguf
from loopformers.model.config import LoopConfig
from loopformers.model.quiet import quiet_transformers
from loopformers.model.tokenizer import open_tokenizer, vocabulary_size
from loopformers.model.weight_files import check_finite, check_weight_index
from loopformers.readers import read_json

__all__ = [
    "check_tokenizer",
    "is_looped",
    "load_any_model",
    "looped_config",
    "model_hash",
    "training_flops",
]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
"""What weights can be turned into; auto leaves them as they were saved."""

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")

PADDING_ROWS = 128
"""Vocabularies are padded to a multiple of at most so many rows; a tokenizer that is smaller by more is another one."""


def is_looped(model: Any) -> bool:
    """Whether a model is one of ours, and so takes a number of loops."""
    return isinstance(model.config, LoopConfig)


def looped_config(folder: str) -> bool:
    """Whether a folder holds a checkpoint of ours, judged by its config.json."""
    try:
        fields = read_json(Path(folder) / "config.json", dict)
    except LoopformersError:
        return False
    return bool(fields.get("model_type") == LoopConfig.model_type)


def load_any_model(
    name: str, *, tokenizer: str | None = None, device: str | None = None, dtype: str = "auto"
) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its tokenizer. Code that a checkpoint brings is never run.

    Args:
        name: Folder of a checkpoint, ours or another's; a `.gguf` file; or a name on the hub.
        tokenizer: Folder or name of the tokenizer; default: the model's own.
        device: Such as `cuda`; default: `cuda` where there is one, else `cpu`.
        dtype: Such as `float32`; `auto`: as the weights were saved.

    Raises:
        CheckpointError: Nothing of this name can be opened, it needs code of its own, a weight is not finite, or it has no
            tokenizer.
        ConfigError: An unknown dtype or device, or a tokenizer that is not the model's.
    """
    from transformers import AutoModelForCausalLM

    path = Path(name)
    is_gguf = path.suffix == ".gguf"
    source = str(path.parent) if is_gguf else name
    extra = {"gguf_file": path.name} if is_gguf else {}
    if is_gguf and not path.is_file():
        raise CheckpointError(f"{name} is no file; give a GGUF file, a folder or a name on the hub")
    if is_gguf:
        check_gguf(path)
    elif path.is_dir():
        check_weight_index(path)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not a type for weights; choose one of: {', '.join(DTYPES)}")
    where = _device(device)
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False, **extra)
        except (LoopformersError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a damaged or hostile file makes transformers raise anything
            raise CheckpointError(_cannot_open(name, error)) from error
    if not is_looped(model):  # ours has been checked while it was loaded
        check_finite(name, model)
    gguf_file = path.name if is_gguf and tokenizer is None else None
    opened = open_tokenizer(tokenizer or source, gguf_file=gguf_file, remedy="name one with --tokenizer")
    check_tokenizer(model, opened, name)
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
        flops = read_json(Path(folder) / "result.json", dict).get("training_flops")
    except LoopformersError:
        return None
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < 1e300:
        return None
    return float(flops)


def _device(name: str | None) -> torch.device:
    """Return the device of a name; by default cuda where there is one, else cpu.

    Raises:
        ConfigError: No such device, or none of its kind in this machine.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a torch device; write cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device; leave it out, or give cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r}, but torch sees {torch.cuda.device_count()} CUDA device(s); they are numbered from cuda:0"
        )
    if device.type not in DEVICE_TYPES or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"device={name!r} cannot run a model here; write cpu, cuda or cuda:0")
    return device


def _cannot_open(name: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"{name} needs its own Python code (auto_map in its config.json), which never runs here; give a model that "
            "transformers itself supports"
        )
    if Path(name).exists():
        return (
            f"{name} is not a checkpoint that transformers opens ({first_line(error)}); give a folder with config.json and "
            "weights"
        )
    return (
        f"{name} is neither a folder here nor a model that can be downloaded ({first_line(error)}); check the name, or give the "
        "folder of a checkpoint"
    )
