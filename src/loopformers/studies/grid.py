"""Grids: the cells of a study, each a recipe, from a YAML file.

    title: Learning rates
    base: quickstart-flt                       # a recipe's name or file; or a mapping of fields, `recipe` among them or not
    blocks:
      - model.preset: [lt, flt]                # a list is an axis, and the product of a block's axes gives its cells
        optimizer.matrix_lr: [0.01, 0.03]
        training.seed: [0, 1, 2]
        training.steps: 400                    # a single value holds for the whole block
      - attention: {gqa: {model.num_key_value_heads: 1}, mla: {model.kv_lora_rank: 16}}
        model.num_loops: [3, 12]               # above: an axis by name, whose values are named sets of fields

An axis named `system` stands in the place of `model.preset`: it names what is compared. Cells with equal recipes are one cell,
the first. Importing this module loads no torch; reading a grid does.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformers.errors import ConfigError, check_count, shorten, unknown_name
from loopformers.limits import MAX_CELLS, MAX_SEED
from loopformers.readers import read_yaml
from loopformers.training.recipe import Recipe, differences, flatten
from loopformers.training.recipe_file import find_yaml, load, override, read_value, yaml_names

__all__ = ["GRIDS_DIR", "Cell", "Grid", "Label", "bundled_grids", "expand_grid", "load_grid"]

GRIDS_DIR = Path(__file__).parent / "grids"
"""The grids that ship with this package."""

KEYS = ("title", "base", "blocks")

SEED = "training.seed"

SYSTEM = "system"
"""The axis that names what is compared; without it, a cell's system is its preset."""

CANONICAL = ("model.preset", "model.num_loops", SEED)
"""Fields that every cell is named by: as system, loops and seed."""

Label = str | int | float | bool | None
"""What an axis is at, in one cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run of a study."""

    id: str
    """Its name, also of its folder: `flt_T12_seed0`, further axes in between."""
    axes: Mapping[str, Label]
    """`system`, `loops`, `seed`, and the further axes of its block: a field's value, or the name of a named set."""
    recipe: Recipe
    """What is trained."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a study, in the order of the file."""

    name: str
    """Of the file, without its ending."""
    title: str
    """For reports."""
    cells: tuple[Cell, ...]


def bundled_grids() -> tuple[str, ...]:
    """Return the names of the grids that ship with this package."""
    return yaml_names(GRIDS_DIR)


def load_grid(name: str | os.PathLike[str], *, seeds: Sequence[int] | None = None) -> Grid:
    """Read a grid by path or bundled name, and check every cell of it. A file that exists wins over a name.

    Args:
        name: The grid.
        seeds: Seeds to run in the place of those that the file lists, in every block.

    Raises:
        ConfigError: No such file, no YAML, an unknown field, system or axis, a grid without cells, or a cell that is not legal.
    """
    path = find_yaml("grid", name, GRIDS_DIR)
    content: dict[str, Any] = read_yaml(path, as_text=True)
    return expand_grid(content, name=path.stem, seeds=seeds)


def expand_grid(content: Mapping[str, Any], *, name: str, seeds: Sequence[int] | None = None) -> Grid:
    """Return the cells of a grid file's content, each checked. Arguments and errors as in `load_grid`."""
    origin = f"grid {name!r}"
    if seeds is not None:
        _check_seeds(seeds)
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{origin}: " + unknown_name("key", key, KEYS))
    base = _base(content.get("base"), origin)
    blocks = content.get("blocks")
    if not isinstance(blocks, list) or not blocks:
        raise ConfigError(f"{origin} has no blocks, so no cells; list at least one mapping from axis to values")
    cells: dict[str, Cell] = {}
    if (count := sum(_num_cells(block, seeds) for block in blocks)) > MAX_CELLS:
        raise ConfigError(
            f"{origin} has {count:,} cells, more than the {MAX_CELLS:,} that a study takes; give fewer values, or split the grid"
        )
    for number, block in enumerate(blocks, start=1):
        for cell in _cells_of(block, base, seeds, f"{origin}, block {number}"):
            known = cells.setdefault(cell.id, cell)
            if changed := differences(known.recipe, cell.recipe):
                key, (one, other) = next(iter(changed.items()))
                raise ConfigError(
                    f"{origin}, block {number}: two cells are named {cell.id!r} and differ, {key}={one!r} and {other!r}; "
                    f"write {key} as a list in both blocks, so that it is an axis"
                )
    kept: dict[str, Cell] = {}
    for cell in cells.values():
        kept.setdefault(cell.recipe.fingerprint(), cell)
    return Grid(name, str(content.get("title") or name), tuple(kept.values()))


# -- parts -----------------------------------------------------------------------------------------------------


def _base(given: Any, origin: str) -> Recipe:
    if isinstance(given, str):
        return load(given)
    if given is None or not isinstance(given, Mapping):
        raise ConfigError(
            f"{origin}: base={shorten(given)} must be a recipe's name or file, or a mapping of a recipe's fields"
        )
    fields = flatten(given)
    recipe = fields.pop("recipe", None)
    return override(Recipe() if recipe is None else load(recipe), fields, origin=f"{origin}, base")


def _num_cells(block: Any, seeds: Sequence[int] | None) -> int:
    """Return the product of a block's axes, before any of its values is read."""
    if not isinstance(block, Mapping):
        return 0
    block = block if seeds is None else {**block, SEED: list(seeds)}
    return math.prod(len(values) for values in block.values() if isinstance(values, list | Mapping) and values)


def _cells_of(block: Any, base: Recipe, seeds: Sequence[int] | None, origin: str) -> Iterator[Cell]:
    if not isinstance(block, Mapping) or not block:
        raise ConfigError(f"{origin} is {shorten(block)} but must be a mapping from axis to values")
    if seeds is not None:
        block = {**block, SEED: list(seeds)}
    axes: dict[str, list[tuple[Label, Mapping[str, Any]]]] = {}
    fixed: dict[str, Any] = {}
    for axis, values in block.items():
        if not isinstance(axis, str):
            raise ConfigError(f"{origin}: axis {axis!r} is not text; write the name of an axis or of a field")
        points = _points(axis, values, origin)
        if points is None:
            fixed[axis] = values
        else:
            axes[axis] = points
    _check_apart(axes, origin)
    for chosen in itertools.product(*axes.values()):
        fields = {**fixed, **{key: value for _, point in chosen for key, value in point.items()}}
        labels = {axis: label for axis, (label, _) in zip(axes, chosen, strict=True)}
        yield _cell(override(base, fields, origin=origin), labels, origin)


def _check_apart(axes: Mapping[str, Sequence[tuple[Label, Mapping[str, Any]]]], origin: str) -> None:
    """Refuse a field that two axes of a block set: cells would be named by one value and trained with the other."""
    owner: dict[str, str] = {}
    for axis, points in axes.items():
        for key in {key for _, fields in points for key in fields}:
            if (other := owner.setdefault(key, axis)) != axis:
                raise ConfigError(f"{origin}: the axes {other} and {axis} both set {key}; let one of them do so")


def _points(axis: str, values: Any, origin: str) -> list[tuple[Label, Mapping[str, Any]]] | None:
    """Return the labels of an axis and the fields that each sets, or None where a field has one value for all cells."""
    if "." in axis:
        if not isinstance(values, list):
            return None
        if not values:
            raise ConfigError(f"{origin}: {axis}=[] has no values, so the block has no cells; give at least one")
        read = [read_value(axis, value, origin=origin) for value in values]
        return [(_label(value), {axis: value}) for value in read]
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(
            f"{origin}: {axis}={shorten(values)} is not an axis; write section.field with a list of values, or a mapping from "
            "names to the recipe fields that each sets"
        )
    for name, fields in values.items():
        if fields is not None and not isinstance(fields, Mapping):
            raise ConfigError(
                f"{origin}: {axis}.{name}={shorten(fields)} must be a mapping of recipe fields, empty for none"
            )
    return [(_label(name), flatten(fields or {})) for name, fields in values.items()]


def _label(value: Any) -> Label:
    return value if isinstance(value, Label) else str(list(value))


def _cell(recipe: Recipe, labels: Mapping[str, Label], origin: str) -> Cell:
    """Name a cell, and check its recipe before any cell has begun."""
    from loopformers.training.recipe import build_law, check_budgets
    from loopformers.training.run import model_config

    try:
        config = model_config(recipe)
        build_law(recipe, config)
        check_budgets(recipe.evaluation.budgets, config)
    except ConfigError as error:
        place = ", ".join(f"{axis}={label}" for axis, label in labels.items())
        raise ConfigError(f"{origin}, cell {place}: {error}") from error
    axes: dict[str, Label] = {
        "system": labels.get(SYSTEM, recipe.model.preset),
        "loops": config.num_loops,
        "seed": recipe.training.seed,
    }
    further = {axis: label for axis, label in labels.items() if axis not in (*CANONICAL, SYSTEM)}
    parts = [str(axes["system"]), f"T{config.num_loops}", *(_part(axis, label) for axis, label in further.items())]
    name = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part) for part in (*parts, f"seed{recipe.training.seed}"))
    return Cell(name, {**axes, **further}, recipe)


def _part(axis: str, label: Label) -> str:
    shown = f"{label:g}" if isinstance(label, float) else str(label)
    return f"{axis.rpartition('.')[2]}-{shown}" if "." in axis else shown


def _check_seeds(seeds: Sequence[int]) -> None:
    for seed in seeds:
        check_count("seeds", seed, at_least=0, at_most=MAX_SEED)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds={list(seeds)} must name at least one seed, each once")
