"""How commands open a checkpoint folder: from this disk alone, and with our own errors where it is none of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.errors import CheckpointError, LoopformersError, first_line
from loopformers.readers import read_json

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["load_config", "load_model", "load_tokenizer"]

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def load_config(folder: str) -> LoopConfig:
    """Return the configuration of a checkpoint.

    Raises:
        CheckpointError: No such folder, no configuration in it, one of another model, or one without num_loops.
    """
    from loopformers.model.config import LoopConfig

    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; give the folder of a checkpoint, which holds config.json and weights"
        )
    file = path / "config.json"
    if not file.exists():
        raise CheckpointError(
            f"{folder} holds no config.json, so it is no checkpoint of ours; official checkpoints are turned into one by "
            "loopformers convert"
        )
    fields = read_json(file, dict, remedy="save the model again, or copy config.json from its source")
    model_type = fields.get("model_type")
    if model_type != LoopConfig.model_type:
        raise CheckpointError(
            f"{file} describes a model of type {model_type!r}, and this command opens {LoopConfig.model_type!r}; give a "
            "checkpoint that save_pretrained or loopformers convert wrote"
        )
    if "num_loops" not in fields:
        raise CheckpointError(
            f"{file} does not say num_loops, the number of loops that the model was trained with, on which budgets and "
            "schedules rest; add it there, or save the model again"
        )
    with _blaming(file):
        return LoopConfig.from_pretrained(folder, local_files_only=True)


@contextlib.contextmanager
def _blaming(file: Path) -> Iterator[None]:
    """Turn what transformers raises on a field of a wrong type, which may be anything, into an error of ours."""
    try:
        yield
    except (LoopformersError, OSError, MemoryError):
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, ImportError) as error:
        raise CheckpointError(
            f"{file} has a field that cannot be used ({first_line(error)}); save the model again, or copy the file again"
        ) from error


def load_model(folder: str) -> LoopedForCausalLM:
    """Return the model of a checkpoint in evaluation mode, in the precision that it was saved in.

    Raises:
        CheckpointError: See `load_config`; or weights that are missing, truncated, not finite, or of another shape.
    """
    config = load_config(folder)
    if not any((Path(folder) / name).exists() for name in WEIGHTS):
        raise CheckpointError(f"{folder} holds no {WEIGHTS[0]}; copy the weights there, or save the model again")
    from loopformers.model.memory_check import check_weights
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.model.quiet import quiet_transformers
    from loopformers.model.weight_files import check_weight_index

    check_weight_index(folder)
    check_weights(folder, config)
    with quiet_transformers(), _blaming(Path(folder) / "config.json"):
        model, report = LoopedForCausalLM.from_pretrained(
            folder, config=config, local_files_only=True, dtype="auto", output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys"):
        if names := sorted(map(str, report[kind])):
            raise CheckpointError(
                f"the weights in {folder} do not fit its config.json: {len(names)} {kind.replace('_', ' ')}, the first "
                f"{names[0]}; save the model again with its own configuration"
            )
    loaded: LoopedForCausalLM = model.eval()
    return loaded


def load_tokenizer(folder: str) -> Any:
    """Return the tokenizer in a folder.

    Raises:
        CheckpointError: There is none, or it is damaged or needs code of its own.
    """
    from loopformers.model.tokenizer import open_tokenizer

    if not (Path(folder) / "tokenizer_config.json").exists():
        raise CheckpointError(f"{folder} holds no tokenizer; name the folder of one with --tokenizer")
    return open_tokenizer(folder, local_only=True, remedy="name the folder of one with --tokenizer")
