"""Compilation of a looped model: each layer by itself, with the loop outside.

A compiled whole model is compiled again for every new number of loops. A compiled layer does not know how often it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["compile_layers"]


def compile_layers(model: LoopedForCausalLM, **options: Any) -> int:
    """Compile every layer of prelude, core and coda in place, and return how many there are.

    Parameters keep their names and modules their classes, so checkpoints and sharding stay as they are. Layers of equal
    shapes share their compiled code. What differs between calls of one layer (with or without a recurrent signal)
    compiles once each, however many loops there are.

    Args:
        model: The model.
        options: Passed to `torch.compile`.
    """
    trunk = model.model
    layers = [*trunk.prelude, *trunk.layers, *trunk.coda]
    for layer in layers:
        layer.compile(**options)
    return len(layers)
