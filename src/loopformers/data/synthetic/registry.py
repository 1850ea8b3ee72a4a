"""The tasks by name. Add one: write a module with the contract of `contract.Task`, and enter its class here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loopformers.errors import ConfigError, unknown_name
from loopformers.extensions import load_extensions

if TYPE_CHECKING:
    from loopformers.data.synthetic.contract import Task

__all__ = ["TASKS", "make_task"]

TASKS: dict[str, str] = {
    "pointer_chasing": "loopformers.data.synthetic.pointer_chasing:PointerChasing",
    "modular_arithmetic": "loopformers.data.synthetic.modular_arithmetic:ModularArithmetic",
    "addition": "loopformers.data.synthetic.addition:Addition",
}
"""Where the class of each task lives, `module:Class`; recipes name it in `task.name`."""


def make_task(name: str, **fields: Any) -> Task:
    """Return a task by name.

    Args:
        name: A key of `TASKS`.
        fields: Fields of its class.

    Raises:
        ConfigError: No task of that name, or a value that breaks its rule.
    """
    load_extensions()
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    module, _, attribute = TASKS[name].partition(":")
    task: Task = getattr(importlib.import_module(module), attribute)(**fields)
    return task
