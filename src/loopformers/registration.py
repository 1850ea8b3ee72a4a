"""Makes transformers' Auto classes and pipelines know our models, without importing transformers.

`import loopformers` must stay cheap, and `AutoModelForCausalLM.from_pretrained` must work after it in either order of
import. So registration happens when both are there: at once if transformers' Auto modules are loaded already, else by an
import hook at the end of their loading. AutoConfig has a module of its own, which is often loaded without the models'.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]


def register_config() -> None:
    """Enter our configuration into AutoConfig."""
    from transformers import AutoConfig

    from loopformers.model.config import LoopConfig

    AutoConfig.register(LoopConfig.model_type, LoopConfig, exist_ok=True)


def register_models() -> None:
    """Enter our models into the Auto classes for models."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.model.trunk import LoopedModel

    AutoModel.register(LoopConfig, LoopedModel, exist_ok=True)
    AutoModelForCausalLM.register(LoopConfig, LoopedForCausalLM, exist_ok=True)
    # Trainer looks the class's name up here; without it, label smoothing would score each token against its own logits.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LoopConfig.model_type] = LoopedForCausalLM.__name__


AUTO_MODULES: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": register_config,
    "transformers.models.auto.modeling_auto": register_models,
}
"""transformers' Auto modules, in the order in which they load, and what to do once they have."""


def install() -> None:
    """Register now, or when transformers' Auto modules are loaded."""
    for module, register in AUTO_MODULES.items():
        if module in sys.modules:
            register()
        elif not any(isinstance(finder, _AutoFinder) and finder.module == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _AutoFinder(module, register))


class _AutoFinder(importlib.abc.MetaPathFinder):
    """Finds an Auto module as everyone does, and has registration follow its execution."""

    def __init__(self, module: str, register: Callable[[], None]) -> None:
        self.module = module
        self.register = register

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            self.register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
