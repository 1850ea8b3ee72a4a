"""Exit rules: how many loops a token gets when it is generated. The public names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopformers.generation.adaptive import exit_logits
    from loopformers.generation.rules import (
        EXIT_RULES,
        ArgmaxExit,
        EntropyExit,
        ExitRule,
        KLExit,
        StateChangeExit,
        parse_exit_rule,
    )

_LAZY = {
    "EXIT_RULES": "loopformers.generation.rules",
    "ArgmaxExit": "loopformers.generation.rules",
    "EntropyExit": "loopformers.generation.rules",
    "ExitRule": "loopformers.generation.rules",
    "KLExit": "loopformers.generation.rules",
    "StateChangeExit": "loopformers.generation.rules",
    "exit_logits": "loopformers.generation.adaptive",
    "parse_exit_rule": "loopformers.generation.rules",
}

__all__ = [
    "EXIT_RULES",
    "ArgmaxExit",
    "EntropyExit",
    "ExitRule",
    "KLExit",
    "StateChangeExit",
    "exit_logits",
    "parse_exit_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'loopformers.generation' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
