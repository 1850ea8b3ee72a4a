"""What the models tell transformers about themselves: loading, resizing, initialisation, checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from loopformers.errors import CheckpointError, ConfigError
from loopformers.model.config import LoopConfig
from loopformers.nn.init import as_role, initialize

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

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, which here reads safetensors alone, so that no pickle is ever opened.

        Raises:
            CheckpointError: The checkpoint is missing, truncated or foreign, or a tensor's shape does not fit.
            ConfigError: Its configuration, with the overrides among `kwargs`, is not legal.
        """
        source = pretrained_model_name_or_path
        wants_info = kwargs.pop("output_loading_info", False)
        may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        asked = {"use_safetensors": True, **kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = super().from_pretrained(source, *args, **asked)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source} is no readable checkpoint, perhaps missing or truncated: {error}; give a folder of config.json and "
                "model.safetensors, as save_pretrained writes it, or convert an official one with `loopformers convert`"
            ) from error
        if info["mismatched_keys"] and not may_mismatch:
            name, found, expected = min(info["mismatched_keys"])
            raise CheckpointError(
                f"{source} holds {name} of shape {tuple(found)}, and its configuration asks for {tuple(expected)}; leave "
                "overrides of sizes out, or pass ignore_mismatched_sizes=True to start such tensors anew"
            )
        if {name for name, _ in model.named_parameters() if "layers." in name} <= set(info["missing_keys"]):
            raise CheckpointError(
                f"{source} holds none of the model's layers, but {', '.join(sorted(info['unexpected_keys'])[:3]) or 'nothing'}; "
                "it is of another architecture, or an official file that `loopformers convert` takes"
            )
        return (model, info) if wants_info else model

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Change the vocabulary, as transformers' method; rows stay padded, and vocab_size counts tokens without padding.

        Args:
            new_num_tokens: Tokens of the new vocabulary; default: as many as now.
            pad_to_multiple_of: New multiple of the rows; default: the configuration's.
            mean_resizing: Whether new rows start near the mean of the old ones, or as the model's initialiser has it.
        """
        config, head = self.config, self.get_output_embeddings()
        tokens = new_num_tokens or config.vocab_size
        multiple = pad_to_multiple_of or config.pad_vocab_size_multiple
        rows = config.padded_vocab_size
        embedding = super().resize_token_embeddings(tokens, multiple, mean_resizing)
        config.vocab_size, config.pad_vocab_size_multiple = tokens, multiple
        if head is not None:
            head = as_role("head", self.get_output_embeddings())  # it may be a new module, made without its role
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
