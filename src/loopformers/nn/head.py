"""The head and the embedding: one row for each token, and none for padding.

Rows that pad a vocabulary to a round number would be tokens to everyone who multiplies by the head's matrix, as trainers
that compute their own loss do, and would take probability from the real ones. So no parameter has them. What is left of
padding: random draws are made as if the rows were there, so that a seed gives the weights that it always gave, and a GPU
multiplies by a padded copy, because its matrix units want an even number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from loopformers.errors import ConfigError

__all__ = ["VocabularyEmbedding", "VocabularyHead", "draw_rows", "padded_product"]

MIN_TOKENS = 64
"""Tokens from which on a padded copy of the matrix is cheap beside the product."""


class VocabularyEmbedding(nn.Embedding):
    """An embedding of `vocab_size` rows whose random numbers are drawn for `drawn_rows`."""

    def __init__(self, vocab_size: int, dim: int, *, drawn_rows: int) -> None:
        super().__init__(drawn_rows, dim)
        self.num_embeddings = vocab_size
        self.drawn_rows = drawn_rows
        _cut(self, vocab_size)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        _load_without_padding(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of tokens (..), (.., dim)."""
        if input.is_meta and not self.weight.is_meta:  # torch returns whatever the memory holds
            raise ConfigError(
                f"input_ids are on the meta device and hold no tokens, and the model is on {self.weight.device}; move them there"
            )
        return super().forward(input)


class VocabularyHead(nn.Linear):
    """A head of `vocab_size` rows without bias; random numbers and products on a GPU are made for `drawn_rows`."""

    init_role = "head"

    def __init__(self, dim: int, vocab_size: int, *, drawn_rows: int) -> None:
        super().__init__(dim, drawn_rows, bias=False)
        self.out_features = vocab_size
        self.drawn_rows = drawn_rows
        _cut(self, vocab_size)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        _load_without_padding(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product of hidden states (.., dim) with each row, (.., vocab)."""
        missing = self.drawn_rows - len(self.weight)
        if missing > 0 and hidden.is_cuda and hidden.shape[:-1].numel() >= MIN_TOKENS:
            return padded_product(hidden, self.weight, missing)
        return super().forward(hidden)


def _load_without_padding(module: nn.Module, state_dict: Any, prefix: str) -> None:
    """Cut the padding off a stored matrix that has it, as checkpoints once did."""
    stored = state_dict.get(f"{prefix}weight")
    if stored is not None and len(stored) == module.drawn_rows > len(module.weight):  # type: ignore[arg-type, operator]
        state_dict[f"{prefix}weight"] = stored[: len(module.weight)]  # type: ignore[arg-type]


def padded_product(hidden: Tensor, weight: Tensor, num_missing: int) -> Tensor:
    """Return hidden @ weight^T, (.., rows), computed with `num_missing` rows of zeros below the matrix."""
    return F.linear(hidden, F.pad(weight, (0, 0, 0, num_missing)))[..., : len(weight)]


def draw_rows(module: nn.Embedding | nn.Linear, std: float) -> None:
    """Fill the rows of an embedding or a head with N(0, std), drawn in the order of the padded matrix."""
    rows = len(module.weight)
    drawn = max(rows, getattr(module, "drawn_rows", rows))
    if drawn == rows or module.weight.is_meta or getattr(module.weight, "_is_hf_initialized", False):
        init.normal_(module.weight, std=std)
    else:
        padded = module.weight.new_empty(drawn, module.weight.shape[1])
        init.copy_(module.weight, nn.init.normal_(padded, std=std)[:rows])


def _cut(module: nn.Module, num_rows: int) -> None:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if len(weight) != num_rows:
        with torch.no_grad():
            module.weight = nn.Parameter(weight[:num_rows].clone())
