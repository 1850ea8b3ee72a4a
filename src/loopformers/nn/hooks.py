"""Forward hooks that a later call of the same function sees again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

__all__ = ["with_present_hooks"]

Result = TypeVar("Result")

KINDS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Where torch keeps a module's forward hooks, and which of them it calls how."""


def with_present_hooks(root: nn.Module, function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that does what `function` does, with the forward hooks that the modules have now.

    Activation checkpointing calls a function again in the backward pass. Hooks that exist only during the forward pass, such
    as those with which PEFT tells activated LoRA where it begins, are gone by then, and the second run would compute
    something else.

    Args:
        root: Holds the modules that `function` runs.
        function: What is run twice.
    """
    present = [
        (module, {kind: getattr(module, kind).copy() for kind in KINDS})
        for module in root.modules()
        if module._forward_pre_hooks or module._forward_hooks
    ]
    if not present:
        return function

    def run(*args: Any) -> Result:
        with _installed(present):
            return function(*args)

    return run


@contextmanager
def _installed(hooks: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Give modules these hooks where they have others, and take them away again."""
    changed = [
        (module, kinds) for module, kinds in hooks if any(getattr(module, kind) != kinds[kind] for kind in KINDS)
    ]
    others = [(module, {kind: getattr(module, kind) for kind in KINDS}) for module, _ in changed]
    for module, kinds in changed:
        vars(module).update(kinds)
    try:
        yield
    finally:
        for module, kinds in others:
            vars(module).update(kinds)
