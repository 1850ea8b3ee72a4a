"""What the models tell transformers about themselves: loading, resizing, initialisation, checkpointing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from loopformers.errors import (
    CheckpointError,
    ConfigError,
    LoopformersError,
    WriteError,
    check_count,
    shorten,
    unknown_name,
)
from loopformers.model.config import LoopConfig
from loopformers.model.generation_settings import check_generation_file, check_generation_settings
from loopformers.model.inherited import INHERITED, LOADER_ARGUMENTS, check_inherited
from loopformers.model.weight_files import StoredTensor, check_file_name, check_finite, check_floating, stored_tensors
from loopformers.nn.head import VocabularyHead
from loopformers.nn.init import initialize

__all__ = ["LoopedPreTrainedModel"]


class LoopedPreTrainedModel(PreTrainedModel):
    """What both models tell transformers about themselves."""

    config_class = LoopConfig
    config: LoopConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = False
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        if not isinstance(config, LoopConfig):
            raise ConfigError(
                f"config={shorten(config)} must be a LoopConfig; a preset's is LoopConfig.from_preset('flt')"
            )
        config.check()
        try:
            super().__init__(config, *inputs, **kwargs)
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"the configuration cannot be used: {error}") from error

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, which here reads only safetensors, so that no pickle is ever opened.

        Its arguments mean what they mean for any model of transformers, and None means that one is left out. A caller who
        asks for `output_loading_info` is told of missing and foreign tensors; for any other they are errors.

        Raises:
            CheckpointError: The checkpoint is missing, truncated or foreign, holds numbers that are not floating point or
                not finite, or a tensor's shape does not fit.
            ConfigError: An argument that is not known or cannot be honoured, or a configuration, with the overrides among
                `kwargs`, that is not legal.
        """
        source = pretrained_model_name_or_path
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        _check_arguments(kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        asked = {**kwargs, "use_safetensors": True, "trust_remote_code": False}
        asked |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            check_generation_file(source)
            tensors = _look(source, kwargs)
            model, info = super().from_pretrained(source, *args, **asked)
        except LoopformersError:
            raise
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source} is no readable checkpoint, perhaps missing or truncated: {error}; give a folder of config.json and "
                "model.safetensors, as save_pretrained writes it, or convert an official one with `loopformers convert`"
            ) from error
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"{source} cannot be loaded with {_named(kwargs)}: {error}") from error
        is_quantized = getattr(model, "hf_quantizer", None) is not None
        if not is_quantized:
            check_floating(source, {name: tensors[name] for name in tensors.keys() - set(info["unexpected_keys"])})
        model._refuse_offloaded_padding(tensors)
        mismatched = [found for found in info["mismatched_keys"] if not model._cut_stored_rows(*found, tensors)]
        info["mismatched_keys"] = type(info["mismatched_keys"])(mismatched)
        if mismatched and not may_mismatch:
            name, found, expected = min(mismatched)
            raise CheckpointError(
                f"{source} holds {name} of shape {tuple(found)}, and its configuration asks for {tuple(expected)}; leave "
                "overrides of sizes out, or pass ignore_mismatched_sizes=True to start such tensors anew"
            )
        if not wants_info:
            _check_names(source, model, info, is_quantized, tensors)
        check_finite(source, model)
        if model.can_generate() and model.generation_config is not None:
            check_generation_settings(model.generation_config, source, model.config.vocab_size)
        return (model, info) if wants_info else model

    def _cut_stored_rows(self, name: str, found: Any, expected: Any, tensors: dict[str, StoredTensor]) -> bool:
        """Load the rows that count of a vocabulary that is stored with padding; return False where it is another mismatch."""
        rows = self.config.padded_vocab_size
        stored = next((full for full in tensors if full == name or full.endswith(f".{name}")), None)
        is_vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if not is_vocabulary or stored is None or list(found) != [rows, *expected[1:]]:
            return False
        weight = self.get_parameter(name)
        with torch.no_grad():
            weight.copy_(tensors[stored].rows(stored, len(weight)))
        return True

    def _refuse_offloaded_padding(self, tensors: dict[str, StoredTensor]) -> None:
        """Raise CheckpointError where a vocabulary that is stored with padding stays on disk, where it can't be cut."""
        for module in (self.get_input_embeddings(), self.get_output_embeddings()):
            weight = None if module is None else module.weight
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                if weight is not None and weight.is_meta and name in tensors and len(weight) < tensors[name].shape[0]:
                    raise CheckpointError(
                        f"{name} is stored with {tensors[name].shape[0] - len(weight)} rows of padding, which cannot be cut off "
                        "while it stays on disk; load the checkpoint once without off-loading, and save it anew"
                    )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' method; files of weights are as readable as the configuration beside them.

        Raises:
            ConfigError: The configuration has been changed to one that could not be loaded; nothing is written.
            WriteError: The folder is a file, which transformers only logs.
        """
        if os.path.isfile(save_directory):
            raise WriteError(f"{save_directory} is a file, and a model is saved to a folder; give another path")
        self.config.check_writable()
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        if (folder / "config.json").exists():
            for file in folder.glob("*.safetensors"):  # safetensors writes them for their owner alone
                shutil.copymode(folder / "config.json", file)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: Any = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Change the vocabulary, as transformers' method; there is one row for each token, and none for padding.

        Args:
            new_num_tokens: Tokens of the new vocabulary; default: as many as now.
            pad_to_multiple_of: New `pad_vocab_size_multiple`: a GPU multiplies by the head as if it had so many rows, and no
                token is added. Default: the configuration's.
            mean_resizing: Whether new rows start near the mean of the old ones, or as the model's initialiser has it.
        """
        config = self.config
        if new_num_tokens is not None:
            check_count("new_num_tokens", new_num_tokens)
        if pad_to_multiple_of is not None and not isinstance(pad_to_multiple_of, int):
            return super().resize_token_embeddings(
                new_num_tokens, pad_to_multiple_of, mean_resizing
            )  # which refuses it
        tokens, rows = new_num_tokens or config.vocab_size, config.vocab_size
        config.pad_vocab_size_multiple = pad_to_multiple_of or config.pad_vocab_size_multiple
        embedding = super().resize_token_embeddings(tokens, None, mean_resizing)
        config.vocab_size = tokens
        embedding.drawn_rows = config.padded_vocab_size
        old = self.get_output_embeddings()
        if old is not None:  # transformers makes a plain one
            with torch.device("meta"):
                head = VocabularyHead(config.hidden_size, tokens, drawn_rows=config.padded_vocab_size)
            head.weight = old.weight
            head._is_hf_initialized = True  # type: ignore[assignment]
            self.set_output_embeddings(head)
            if not mean_resizing and not config.tie_word_embeddings:
                torch.nn.init.normal_(head.weight.data[rows:], std=config.head_std)
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        initialize(
            module,
            scheme=config.init_scheme,
            modulation=config.modulation_init,
            std=config.initializer_range,
            num_layers=config.num_hidden_layers,
            head_std=config.head_std,
        )

    def _set_gradient_checkpointing(self, *args: Any, every_n_layers: int = 1, **kwargs: Any) -> None:
        if every_n_layers != 1:
            raise ConfigError(
                f"every_n_layers={every_n_layers}: a looped model checkpoints whole loops, not layers; leave it out"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)


_GONE = {
    "use_auth_token": "give token",
    "resume_download": "downloads always go on where they stopped",
    "user_agent": "leave it out",
}


def _named(kwargs: dict[str, Any]) -> str:
    """Return the arguments of a call for an error."""
    return ", ".join(f"{name}={shorten(value)}" for name, value in sorted(kwargs.items())) or "these files"


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError at an argument of from_pretrained that is not known, or that cannot be honoured."""
    known = {name for name in LoopConfig.own_fields().keys() | INHERITED | LOADER_ARGUMENTS if not name.startswith("_")}
    if unknown := sorted(name for name in kwargs.keys() - known if not name.startswith("_")):
        raise ConfigError(unknown_name("argument", unknown[0], known))
    check_file_name(kwargs.get("variant"))
    check_inherited({name: value for name, value in kwargs.items() if value != "auto"})
    if not isinstance(kwargs.get("generation_config", GenerationConfig()), GenerationConfig):
        raise ConfigError(f"generation_config={shorten(kwargs['generation_config'])} must be a GenerationConfig")
    for name, remedy in _GONE.items():
        if name in kwargs:
            raise ConfigError(f"{name}={shorten(kwargs[name])}: transformers no longer takes it; {remedy}")
    refused = {
        "use_safetensors": kwargs.get("use_safetensors") is False,
        "weights_only": kwargs.get("weights_only") is False,
        "gguf_file": bool(kwargs.get("gguf_file")),
        "from_tf": bool(kwargs.get("from_tf")),
        "from_flax": bool(kwargs.get("from_flax")),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{name}={shorten(kwargs[name])}: a looped model is read only from safetensors files, never from a pickle or "
                "another program's format; leave it out"
            )


def _look(source: Any, kwargs: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return what a checkpoint's files say of its tensors; none where a folder of another kind is left to transformers."""
    if source is None and "state_dict" not in kwargs:
        return {}
    where = {name: value for name, value in kwargs.items() if name not in ("state_dict", "variant")}
    return stored_tensors(source, kwargs.get("state_dict"), kwargs.get("variant"), **where)


def _check_names(
    source: Any,
    model: LoopedPreTrainedModel,
    info: dict[str, Any],
    is_quantized: bool,
    tensors: Mapping[str, StoredTensor],
) -> None:
    """Raise CheckpointError where a checkpoint holds none of a model's layers, or tensors that the model has no place for."""
    foreign = sorted(set(info["unexpected_keys"]) - {"lm_head.weight"})  # the trunk leaves the head out
    foreign += sorted(name for name in tensors if f"model.{name}" in tensors)  # one tensor with and without the prefix
    if {name for name, _ in model.named_parameters() if "layers." in name} <= set(info["missing_keys"]):
        raise CheckpointError(
            f"{source} holds none of the model's layers, but {', '.join(foreign[:3]) or 'nothing'}; "
            "it is of another architecture, or an official file that `loopformers convert` takes"
        )
    if foreign and not is_quantized:
        raise CheckpointError(
            f"{source} holds {len(foreign)} tensors that this model has no place for, the first {', '.join(foreign[:3])}; its "
            "config.json is of another model, or the file is. output_loading_info=True loads the rest and lists them"
        )
