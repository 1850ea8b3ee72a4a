"""Looped transformer language models: train, run, evaluate and study them.

The public names are imported on first use, so `import loopformers` loads neither torch nor transformers.
"""

from __future__ import annotations

from loopformers.startup import silence_early_interrupts

silence_early_interrupts()

import importlib  # noqa: E402  what follows takes long enough to be interrupted
from typing import TYPE_CHECKING, Any  # noqa: E402

from loopformers import registration  # noqa: E402
from loopformers.errors import (  # noqa: E402
    CacheError,
    CheckpointError,
    ConfigError,
    DataError,
    LoopformersError,
    MissingExtraError,
    NonFiniteError,
)
from loopformers.schedule import Schedule  # noqa: E402

if TYPE_CHECKING:
    from loopformers.model.cache import LoopedCache
    from loopformers.model.config import LoopConfig
    from loopformers.model.convert import from_official
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.model.trunk import LoopedModel

__version__ = "0.1.0"

_LAZY = {
    "LoopConfig": "loopformers.model.config",
    "LoopedCache": "loopformers.model.cache",
    "LoopedForCausalLM": "loopformers.model.modeling",
    "LoopedModel": "loopformers.model.trunk",
    "from_official": "loopformers.model.convert",
}

__all__ = [
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LoopConfig",
    "LoopedCache",
    "LoopedForCausalLM",
    "LoopedModel",
    "LoopformersError",
    "MissingExtraError",
    "NonFiniteError",
    "Schedule",
    "from_official",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'loopformers' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


registration.install()
