"""Analysis: what loops do to states, and what a training run's curves say. Importing this loads nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopformers.analysis.record import LoopTrace, record_loops

__all__ = ["LoopTrace", "record_loops"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'loopformers.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module("loopformers.analysis.record"), name)
