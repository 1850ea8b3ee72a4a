"""The runs that both papers publish, as shipped recipes and what changes from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopformers.training.recipe import Recipe
from loopformers.training.recipe_file import resolve

__all__ = ["PublishedRun", "published_runs"]

FLT_SYSTEMS = ("lt", "lt-input", "lt-query", "flt-residual", "flt")
FLT_SIZES = {"flt-small": "127 M", "flt-base": "318 M"}
FLT_LOOPS = (3, 6, 9, 12)

LOOPFORMER_SYSTEMS = ("base-loop", "base-loop-exit", "tmlt", "tmlt-exit", "loopformer")
LOOPFORMER_SHAPES = ((3, 8), (2, 12), (1, 24))
BASE_DEPTHS = (24, 12, 6)

STATED_PARAMETERS = {("loopformer", 3): "278,169,600"}
"""Parameters that LoopFormer's paper states, by system and layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """One run of a paper.

    Example:
        >>> run = published_runs()[0]
        >>> run.recipe, run.arguments[:4]
        ('flt-small', ('--model.preset', 'lt', '--model.num_loops', '3'))
    """

    recipe: str
    """Shipped recipe."""
    overrides: Mapping[str, Any]
    """Fields that differ from it."""
    stated_parameters: str | None
    """What the paper states: all digits, or millions with the unit M; None where it states nothing."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows `loopformers train --config RECIPE`."""
        return tuple(part for key, value in self.overrides.items() for part in (f"--{key}", str(value)))

    def load(self) -> Recipe:
        """Return its recipe."""
        return resolve([self.recipe], self.arguments, environ={})


def published_runs() -> tuple[PublishedRun, ...]:
    """Return every run of both papers: FLT Small and Base by loops and system, LoopFormer's shapes by system, and base."""
    runs = [
        _run(size, f"{system}-t{loops}", stated, system, {"model.num_loops": loops})
        for size, stated in FLT_SIZES.items()
        for loops in FLT_LOOPS
        for system in FLT_SYSTEMS
    ]
    runs += [
        _run(f"loopformer-{layers}x{loops}", system, STATED_PARAMETERS.get((system, layers)), system, {})
        for layers, loops in LOOPFORMER_SHAPES
        for system in LOOPFORMER_SYSTEMS
    ]
    for depth in BASE_DEPTHS:
        once = {"model.num_hidden_layers": depth, "model.num_loops": 1, "evaluation.budgets": "[]"}
        runs.append(_run("loopformer-3x8", f"base-{depth}", None, "base", once))
    return tuple(runs)


def _run(recipe: str, label: str, stated: str | None, system: str, changes: Mapping[str, Any]) -> PublishedRun:
    overrides = {"model.preset": system, **changes, "training.output_dir": f"runs/{recipe}/{label}"}
    return PublishedRun(recipe=recipe, overrides=overrides, stated_parameters=stated)
