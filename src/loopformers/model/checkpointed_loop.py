"""One loop under activation checkpointing, as the kind of layer that transformers and PEFT look for.

It has a file of its own because it cannot be imported at once: transformers' module of layers imports the Auto classes,
whose import registers our models, which must be defined by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

__all__ = ["CheckpointedLoop"]


class CheckpointedLoop(GradientCheckpointingLayer):
    """Calls one loop; where activation checkpointing is on, its activations are made again in the backward pass."""

    def forward(self, loop: Callable[..., tuple[Tensor, Tensor]], *given: Any) -> tuple[Tensor, Tensor]:
        """Return what the loop returns for these arguments."""
        return loop(*given)
