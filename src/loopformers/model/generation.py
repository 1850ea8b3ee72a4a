"""What generate() does otherwise for a looped model: its cache, its budget in every path, and exit rules."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, UnbatchedClassifierFreeGuidanceLogitsProcessor

from loopformers.errors import CacheError, ConfigError
from loopformers.model.pretrained import LoopedPreTrainedModel
from loopformers.model.saved_schedule import check_saved_schedule
from loopformers.model.transformers_range import CACHE_NAME

__all__ = ["LoopedGenerationMixin"]

BUDGET = ("num_loops", "schedule")
"""Arguments of `forward` that say how long to loop."""


class LoopedGenerationMixin(GenerationMixin):
    """transformers' generate(), with every forward call at the budget that was asked for."""

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Let generate() run by the schedule that the generation configuration saves, where the call asks for none.

        Raises:
            ConfigError: The model cannot run it, or a setting of generate() has no meaning for a looped model.
        """
        prepared, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        self._refuse(prepared, kwargs.get("exit_rule"))
        asked = {name: kwargs[name] for name in BUDGET if kwargs.get(name) is not None}
        if not asked:
            saved = getattr(prepared, "schedule", None) or getattr(self.generation_config, "schedule", None)
            run = check_saved_schedule(saved, self.config)
            asked = {} if run is None else {"schedule": run}
        return prepared, model_kwargs | asked

    def _refuse(self, generation_config: Any, exit_rule: Any) -> None:
        early_exit = getattr(generation_config, "assistant_early_exit", None)
        if early_exit is not None:
            raise ConfigError(
                f"assistant_early_exit={early_exit} cuts a stack of layers, and a looped model has one stack that it repeats; "
                "give an assistant_model, or prompt_lookup_num_tokens"
            )
        scale = getattr(generation_config, "guidance_scale", None)
        if exit_rule is not None and scale not in (None, 1):
            raise ConfigError(
                f"guidance_scale={scale} with exit_rule={exit_rule}: the unconditional run has no tokens of its own to count "
                "loops for; leave one of the two out"
            )

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        """Let classifier-free guidance run its unconditional half at the same budget: transformers calls it without."""
        processors = super()._get_logits_processor(*args, **kwargs)
        given = kwargs.get("model_kwargs") or {}
        budget = {name: given[name] for name in BUDGET if given.get(name) is not None}
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) and processor.model is self:
                processor.model = partial(self, **budget)
        return processors

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Give a looped assistant this model's budget, as transformers does with every argument, and another kind none."""
        assistant = kwargs.get("assistant_model")
        if assistant is not None and not isinstance(assistant, LoopedPreTrainedModel):
            given = kwargs["model_kwargs"]
            kwargs["model_kwargs"] = {name: x for name, x in given.items() if name not in (*BUDGET, "exit_rule")}
        return super()._get_candidate_generator(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """transformers' method. The cache goes by its older name, under which PEFT looks for it: it would miss the new one,
        and put a prompt's virtual tokens before every token that is generated."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **_for_forward(kwargs))
        if CACHE_NAME in inputs:
            inputs["past_key_values"] = inputs.pop(CACHE_NAME)
        return inputs

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse transformers' continuous batching, whose pages have one row for each layer.

        Raises:
            CacheError: Always; `generate` does the same work, a batch at a time.
        """
        raise CacheError(
            "generate_batch (continuous batching) keeps keys and values in pages with one row for each layer, and a looped model "
            "needs one for each loop of each layer; call generate() with a padded batch, which gives the same tokens"
        )

    init_continuous_batching = generate_batch

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' greedy and sampling loop, which an exit rule may replace: rows are done with a token at other times."""
        rule: Any = kwargs.get("exit_rule")
        kwargs, output = _for_forward(kwargs), None
        if not args and hasattr(rule, "decode"):
            output = rule.decode(self, input_ids, **{name: x for name, x in kwargs.items() if name != "exit_rule"})
        return super()._sample(input_ids, *args, **kwargs) if output is None else output

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give generate() our cache; transformers' own have one row a layer.

        Raises:
            CacheError: Another kind of cache was asked for.
        """
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise CacheError(
                f"cache_implementation={generation_config.cache_implementation!r} has one row a layer, and a looped model needs "
                "one for each loop of each layer; leave cache_implementation out"
            )
        names = ("past_key_values", "cache")
        given = next((cache for name in names if (cache := model_kwargs.pop(name, None)) is not None), None)
        schedule = self.config.resolve_schedule(model_kwargs.get("num_loops"), model_kwargs.get("schedule"))
        cache = self.model.resolve_cache(given, generation_config.use_cache is not False, schedule)
        if cache is not None:
            model_kwargs[CACHE_NAME] = cache


def _for_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a decoding step's arguments without the tokenizers that stop strings need: transformers leaves them in, and
    forward refuses what it does not know."""
    return {name: x for name, x in arguments.items() if name not in ("tokenizer", "assistant_tokenizer")}
