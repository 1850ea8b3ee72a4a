"""Makes transformers' Auto classes and pipelines know our models, without importing transformers.

`import loopformers` must stay cheap, and `AutoModelForCausalLM.from_pretrained` must work after it in either order of
import. So registration happens when both are there: at once if transformers' Auto classes are loaded already, else by an
import hook at the end of their loading.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install", "register"]

AUTO_MODULE = "transformers.models.auto.modeling_auto"
"""The last of transformers' Auto modules to load: configurations and models are both known after it."""


def register() -> None:
    """Enter our configuration and model into the Auto classes."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM, LoopedModel

    AutoConfig.register(LoopConfig.model_type, LoopConfig, exist_ok=True)
    AutoModel.register(LoopConfig, LoopedModel, exist_ok=True)
    AutoModelForCausalLM.register(LoopConfig, LoopedForCausalLM, exist_ok=True)


def install() -> None:
    """Register now, or when transformers' Auto classes are loaded."""
    if AUTO_MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, _AutoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoFinder())


class _AutoFinder(importlib.abc.MetaPathFinder):
    """Finds the Auto module as everyone does, and has registration follow its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
