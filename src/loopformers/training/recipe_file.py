"""Recipes on disk: YAML files, shipped ones by name, with overrides from the environment and the command line.

What is said later wins: recipe files in order, then environment variables (`LOOPFORMERS_MODEL__NUM_LOOPS=12`), then
arguments (`--model.num_loops 12`). What is written means the same in all three: see `field_types`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loopformers.environment import CONFIG, PREFIX, check_variables
from loopformers.errors import ConfigError, shorten, unknown_name
from loopformers.files import write_whole
from loopformers.paths import expand_path
from loopformers.readers import read_yaml
from loopformers.training.field_types import argument_value, convert, type_name
from loopformers.training.recipe import CHOICES, DEFAULT_CHOICE, SECTIONS, Recipe, flatten, from_fields, to_fields

__all__ = [
    "RECIPES_DIR",
    "Field",
    "default_configs",
    "dump",
    "find",
    "find_yaml",
    "load",
    "override",
    "read_value",
    "recipe_fields",
    "resolve",
    "save",
    "shipped",
    "type_name",
    "yaml_names",
]

RECIPES_DIR = Path(__file__).parent.parent / "recipes"
"""The recipes that ship with this package."""

SUFFIXES = (".yaml", ".yml")


def shipped() -> tuple[str, ...]:
    """Return the names of the recipes that ship with this package."""
    return yaml_names(RECIPES_DIR)


def find(name: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped recipe. A file that exists wins over a name.

    Raises:
        ConfigError: There is none.
    """
    return find_yaml("recipe", name, RECIPES_DIR)


def find_yaml(kind: str, name: str | os.PathLike[str], shipped_in: Path) -> Path:
    """Return the YAML file of a path, or of the name of one that ships with this package.

    Args:
        kind: What it holds, for errors.
        name: A path, or a name; a file that exists wins over a name.
        shipped_in: Folder of those that ship.

    Raises:
        ConfigError: There is none, or a path that `expand_path` refuses.
    """
    path = Path(expand_path(name, kind))
    if path.is_file():
        return path
    names = yaml_names(shipped_in)
    if str(name) in names:
        return shipped_in / f"{name}.yaml"
    if path.suffix in SUFFIXES or path.exists() or path.name != str(name):
        found = "a folder" if path.is_dir() else "no file"
        raise ConfigError(
            f"{kind}={str(name)!r} is {found} (working folder {os.getcwd()!r}); give a {kind}'s YAML file"
        )
    raise ConfigError(unknown_name(kind, str(name), names) + "; or give the path of a YAML file")


def yaml_names(folder: Path) -> tuple[str, ...]:
    """Return the names of a folder's YAML files."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(name: str | os.PathLike[str]) -> Recipe:
    """Load a recipe by path or shipped name, from the file alone: neither environment nor arguments change it.

    Raises:
        ConfigError: No such file, no YAML mapping, an unknown field, or a value that breaks its rule.
    """
    return resolve([name], [], environ={})


def save(recipe: Recipe, path: str | os.PathLike[str]) -> Path:
    """Save a recipe with every field named, aside and then renamed; `load` gives an equal recipe back."""
    return write_whole(path, dump(recipe))


def dump(recipe: Recipe) -> str:
    """Return a recipe as YAML, every field named."""
    import yaml

    text: str = yaml.safe_dump(to_fields(recipe), sort_keys=False, allow_unicode=True, width=100)
    return text


def resolve(
    configs: Sequence[str | os.PathLike[str]],
    arguments: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> Recipe:
    """Return the recipe that files, environment and arguments come to.

    Args:
        configs: Recipe files or shipped names; fields of later ones win. None: every field at its default.
        arguments: `--section.field value` or `--section.field=value`.
        environ: Default: the process's environment.

    Raises:
        ConfigError: An unknown field (with the nearest known one), a value of a wrong type, or one that breaks its rule.
    """
    flat: dict[str, Any] = {}
    for config in configs:
        _merge(flat, _read_file(find(config)))
    variables = _read_environment(os.environ if environ is None else environ)
    _merge(
        flat, {key: _typed_text(key, text, f"environment variable {_variable(key)}") for key, text in variables.items()}
    )
    given = {key: _typed_text(key, text, f"argument --{key}") for key, text in _read_arguments(arguments).items()}
    _merge(flat, given)
    return from_fields(_nested(flat))


def default_configs(configs: Sequence[str]) -> list[str]:
    """Return the recipes that a command is given, or else the one that the environment names, if any."""
    named = os.environ.get(CONFIG)
    return list(configs) or ([named] if named else [])


def override(recipe: Recipe, fields: Mapping[str, Any], *, origin: str) -> Recipe:
    """Return a recipe with other values of some fields.

    Args:
        recipe: The recipe.
        fields: By `section.field`, as in a file; another name in a section with a choice drops what belonged to the earlier
            one.
        origin: Where the fields were written, for errors.

    Raises:
        ConfigError: An unknown field, a value of a wrong type, or one that breaks its rule.
    """
    flat, typed = flatten(to_fields(recipe)), {}
    for key, value in fields.items():
        typed[key] = read_value(key, value, origin=origin)
    _merge(flat, typed)
    return from_fields(_nested(flat))


def read_value(key: str, value: Any, *, origin: str) -> Any:
    """Return the value of a field, `section.field`, as its type has it; a section with a choice may be None.

    Args:
        key: The field.
        value: As it stands in a file, or a value of Python.
        origin: Where it was written, for errors.

    Raises:
        ConfigError: An unknown field, or a value of a wrong type.
    """
    _check_known(key, origin)
    return _typed(key, value, origin)


def _merge(flat: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Let later values win. Another name in a section with a choice drops the fields that belonged to the earlier one."""
    for key, value in later.items():
        section, _, name = key.partition(".")
        if (name == "name" and section in CHOICES and value != _name_in(flat, section)) or not name:
            for old in [k for k in flat if k.partition(".")[0] == section]:
                del flat[old]
    for key, value in later.items():
        flat.pop(key.partition(".")[0], None)
        flat[key] = value


def _name_in(flat: Mapping[str, Any], section: str) -> Any:
    return flat.get(f"{section}.name", DEFAULT_CHOICE.get(section))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if name:
            fields.setdefault(section, {})[name] = value
        else:
            fields[section] = value
    return fields


# -- the fields ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a recipe, as files, environment and arguments name it."""

    key: str
    """`section.field`."""
    type: Any
    """What its value must be."""
    help: str
    """What it means; for a section with a choice, which choices have it."""


@cache
def recipe_fields() -> Mapping[str, Field]:
    """Return every field of every section by key; imports torch, as the model's are LoopConfig's."""
    from loopformers.model.config import LoopConfig

    found: dict[str, Field] = {}

    def add(section: str, cls: type, *, names: Sequence[str] | None = None, owner: str = "") -> None:
        hints, docs = _own_types(cls), _attribute_docs(cls)
        for name in hints if names is None else names:
            key = f"{section}.{name}"
            note = f"({owner}) {docs.get(name, '')}".strip() if owner else docs.get(name, "")
            kind = hints[name]
            if key in found:  # two choices share a field
                kind = found[key].type if found[key].type == kind else found[key].type | kind
                note = f"{found[key].help} {note}"
            found[key] = Field(key=key, type=kind, help=note)

    for section in (f.name for f in dataclasses.fields(Recipe)):
        if section == "model":
            add(section, SECTIONS[section], names=["preset"])
            add(section, LoopConfig, names=list(LoopConfig.own_fields()))
        elif section in SECTIONS:
            add(section, SECTIONS[section])
        else:
            from loopformers.training.recipe import choice_classes

            names = tuple(CHOICES[section])
            found[f"{section}.name"] = Field(key=f"{section}.name", type=str, help=f"One of {', '.join(names)}.")
            for name, cls in choice_classes(section).items():
                add(section, cls, names=[f.name for f in dataclasses.fields(cls)], owner=name)
    return types.MappingProxyType(found)


def _typed_text(key: str, text: str, origin: str) -> Any:
    """Return the value of a variable or an argument."""
    try:
        value = argument_value(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {key}={shorten(text)} {error}") from error
    return _typed(key, value, origin)


def _typed(key: str, value: Any, origin: str) -> Any:
    """Return one value as its field's type has it."""
    if "." not in key:  # a whole section
        if value is None:
            return None
        raise ConfigError(
            f"{origin}: {key}={shorten(value)} is a section; give its fields, such as {key}.name, or null"
        )
    field = recipe_fields()[key]
    try:
        return convert(value, field.type)
    except ValueError as error:
        said = f" ({field.help.rstrip('.')})" if field.help else ""
        more = f"; it {text}" if (text := str(error).strip()) else ""
        shown = "null" if value is None else shorten(value)
        raise ConfigError(f"{origin}: {key}={shown} must be {type_name(field.type)}{said}{more}") from error


def _check_known(key: str, origin: str) -> None:
    if key not in recipe_fields() and key not in CHOICES:
        section, _, name = key.partition(".")
        sections = [f.name for f in dataclasses.fields(Recipe)]
        if section not in sections:
            every = [k for k in recipe_fields() if k.partition(".")[2] == section]
            hint = f"; the field {section} is written {' or '.join(every)}" if every else ""
            raise ConfigError(f"{origin}: " + unknown_name("section", section, sections) + hint)
        names = [k.partition(".")[2] for k in recipe_fields() if k.startswith(f"{section}.")]
        raise ConfigError(f"{origin}: " + unknown_name(f"field of {section}", name, names))


# -- where values come from ------------------------------------------------------------------------------------


def _read_file(path: Path) -> dict[str, Any]:
    origin = f"recipe {str(path)!r}"
    content: dict[str, Any] = read_yaml(path, as_text=True)
    flat: dict[str, Any] = {}
    for section, fields in content.items():
        if isinstance(fields, dict):
            for name, value in fields.items():
                flat[f"{section}.{name}"] = read_value(f"{section}.{name}", value, origin=origin)
            if not fields:
                _check_known(f"{section}", origin) if section in CHOICES else _check_section(section, origin)
        else:
            if section not in CHOICES:
                _check_section(section, origin)
                if fields is None:  # a section whose fields are all commented out
                    continue
                raise ConfigError(f"{origin}: {section}={shorten(fields)} must be a mapping from field to value")
            flat[section] = _typed(str(section), fields, origin)
    return flat


def _check_section(section: Any, origin: str) -> None:
    if section not in SECTIONS:
        _check_known(str(section), origin)


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", "__").upper()


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Fields by key; what looks like a field or like another variable of ours, and is none, is refused."""
    sections = {f"{PREFIX}{f.name.upper()}": f.name for f in dataclasses.fields(Recipe)}
    found = {}
    for variable, text in sorted(environ.items()):
        head, separator, name = variable.partition("__")
        if head not in sections:
            continue
        key = f"{sections[head]}.{name.lower()}" if separator else sections[head]
        if not separator and key not in CHOICES:
            raise ConfigError(
                f"environment variable {variable} is a section; give one of its fields, {variable}__FIELD"
            )
        if name != name.upper():
            raise ConfigError(f"environment variable {variable} must be in capitals: {_variable(key)}")
        _check_known(key, f"environment variable {variable}")
        found[key] = text
    fields = [*recipe_fields(), *CHOICES] if any(v.startswith(PREFIX) for v in environ) else []
    check_variables(environ, map(_variable, fields))
    return found


def _read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    found, rest = {}, list(arguments)
    while rest:
        flag, separator, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"argument {flag!r} belongs to no option; write --section.field value")
        key = flag[2:]
        _check_known(key, f"argument {flag}")
        if not separator:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"argument {flag} has no value; write {flag} VALUE")
            value = rest.pop(0)
        found[key] = value
    return found


# -- what classes say of their fields --------------------------------------------------------------------------


def _own_types(cls: type) -> dict[str, Any]:
    """Return the types of a class's own fields: those that it inherits may name modules that are not imported."""
    own = types.SimpleNamespace(__annotations__=cls.__annotations__)
    return typing.get_type_hints(own, vars(sys.modules[cls.__module__]))


def _attribute_docs(cls: type) -> dict[str, str]:
    """Return the docstrings below a class's attributes, one line each."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs
