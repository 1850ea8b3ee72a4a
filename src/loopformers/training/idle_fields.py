"""Fields that a recipe sets and that nothing would read: each is refused, with what would make it act.

Only what is set matters: a value that equals its default is as good as left out, so that a recipe with every field named
(`--print_config`, `recipe.yaml`) loads again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopformers.data.stream_sources import STREAMED_CORPORA
from loopformers.errors import ConfigError, shorten
from loopformers.laws import Fixed, ShortTrajectory
from loopformers.model.presets import preset_fields
from loopformers.training.recipe import BUNDLED, Recipe

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig

__all__ = ["check_effects"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """When a field acts."""

    fields: tuple[str, ...]
    """`section.field`."""
    acts: Callable[[Recipe, LoopConfig], bool]
    needs: str
    """What would make it act; ends `It acts only with`."""


def _trains_short(recipe: Recipe, config: LoopConfig) -> bool:
    return config.objective == "shortcut_consistency"


def _has_columns(recipe: Recipe, config: LoopConfig) -> bool:
    data = recipe.data
    is_named = data.streaming and data.sources[0] in STREAMED_CORPORA
    return not is_named and any(source.partition("/")[0] != BUNDLED for source in data.sources)


def _deepest(recipe: Recipe, config: LoopConfig) -> float:
    """Return the largest number of loops that training runs, or infinity where the law draws it."""
    law = recipe.law or config.law
    return law.num_loops if isinstance(law, Fixed | ShortTrajectory) else math.inf


RULES = (
    _Rule(
        ("model.short_weight", "model.consistency_weight", "model.consistency_target"),
        _trains_short,
        "model.objective=shortcut_consistency",
    ),
    _Rule(
        ("model.short_sampler",),
        lambda recipe, config: _trains_short(recipe, config) and recipe.law is None,
        "model.objective=shortcut_consistency and without a law, whose own field is law.sampler",
    ),
    _Rule(
        ("model.loop_seed",),
        lambda recipe, config: not isinstance(recipe.law or config.law, Fixed),
        "a law that draws loops, or model.objective=shortcut_consistency",
    ),
    _Rule(("model.sliding_window",), lambda _, config: "S" in config.window_pattern, "an S in model.window_pattern"),
    _Rule(
        ("model.rope_theta", "model.rope_table_dtype"),
        lambda _, config: config.position_embedding == "rotary",
        "model.position_embedding=rotary",
    ),
    _Rule(
        ("model.time_scale",),
        lambda _, config: config.understands_time,
        "model.conditioning=time or time_and_step",
    ),
    _Rule(
        ("model.modulation_init",),
        lambda _, config: config.conditioning != "none",
        "model.conditioning other than none",
    ),
    _Rule(
        ("data.split_seed",),
        lambda recipe, _: recipe.data.split_by != "tail",
        "data.split_by=document or id",
    ),
    _Rule(
        ("data.text_column", "data.id_column"),
        _has_columns,
        "files or a datasets name as data.sources: the bundled and the published corpora know their columns",
    ),
    _Rule(
        ("training.kept_loops",),
        lambda recipe, _: recipe.training.activation_checkpointing,
        "training.activation_checkpointing=true",
    ),
    _Rule(
        ("training.num_grad_loops",),
        lambda recipe, config: (recipe.training.num_grad_loops or 0) <= _deepest(recipe, config),
        "a number of at most the loops that training runs",
    ),
)


def check_effects(recipe: Recipe, config: LoopConfig) -> None:
    """Raise ConfigError where a recipe sets a field, other than to its default, that has no effect.

    Args:
        recipe: The recipe.
        config: The model's configuration, which follows from it.
    """
    changed = dict(_changed(recipe))
    for rule in RULES:
        for key in rule.fields:
            if key in changed and not rule.acts(recipe, config):
                raise ConfigError(
                    f"{key}={shorten(changed[key])} has no effect in this recipe; leave it out. It acts only with {rule.needs}"
                )


def _changed(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield the fields that differ from their defaults; of the model, from the preset's."""
    from loopformers.model.config import LoopConfig

    usual = {**LoopConfig.own_fields(), **preset_fields(recipe.model.preset, {})}
    for name, value in recipe.model.overrides.items():
        if value != usual.get(name):
            yield f"model.{name}", value
    for section in ("data", "training"):
        part: Any = getattr(recipe, section)
        for field in dataclasses.fields(part):
            if getattr(part, field.name) != field.default:
                yield f"{section}.{field.name}", getattr(part, field.name)
