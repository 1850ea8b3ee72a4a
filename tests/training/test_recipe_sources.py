"""What is written means the same in a recipe file, in an environment variable and as an argument."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml

from loopformers.errors import ConfigError
from loopformers.training.recipe import CHOICES, Recipe, choice_classes
from loopformers.training.recipe_file import default_configs, load, recipe_fields, resolve

TEXTS = (
    "3", "0", "-2", "0.5", "1e-3", "1.", ".25", "1_000", "010", "0o17", "0x10", "12:30:00", "1.50", "1e400", ".inf", "nan",
    "true",
    "True", "yes", "on", "off", "null", "Null", "~", "1,4", "1,4,12", "[1, 4]", "[]", "[a, b]", "0.8,0.1,0.1", "[0.7, 0.2, 0.1]",
    "coarse-first:3", "1/2,1/2", "none", "tail", "document", "bundled", "float32", "2024-01-31", "none,tensorboard",
    "99999999999",
    "a b", "./a", "SL", "every", "+-",
)  # fmt: skip

OPTIONS = {
    "law": {
        "fixed": {"num_loops": 3},
        "uniform_range": {"min_loops": 1, "max_loops": 5},
        "poisson_log_normal": {"mean_loops": 2.5},
        "curriculum": {"start_loops": 1, "end_loops": 4, "num_steps": 7},
        "short_trajectory": {"num_loops": 6},
    }
}


def base_of(key: str) -> dict[str, object]:
    """Return the sections in which a field is legal."""
    section, _, name = key.partition(".")
    if section not in CHOICES:
        return {}
    owners = [n for n, cls in choice_classes(section).items() if name in {f.name for f in dataclasses.fields(cls)}]
    choice = (owners or list(CHOICES[section]))[0]
    return {section: {"name": choice, **OPTIONS.get(section, {}).get(choice, {})}}


def outcome(*sources: object, **environ: str) -> Recipe | str:
    configs, arguments = sources
    try:
        return resolve(configs, arguments, environ=environ)  # type: ignore[arg-type]
    except ConfigError:
        return "refused"


@pytest.mark.parametrize("key", recipe_fields())
def test_a_text_means_the_same_wherever_it_stands(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    base, file = tmp_path / "base.yaml", tmp_path / "file.yaml"
    base.write_text(yaml.safe_dump(base_of(key)), encoding="utf-8")
    accepted = 0
    words = typing.get_args(recipe_fields()[key].type) or ()
    for text in (*TEXTS, *(word for word in words if isinstance(word, str))):
        file.write_text(f"{section}:\n  {name}: {text}\n", encoding="utf-8")
        in_file = outcome([base, file], [])
        if text.startswith("[") and in_file == "refused":  # a file needs quotes where a list is not meant
            continue
        variable = f"LOOPFORMERS_{section.upper()}__{name.upper()}"
        assert outcome([base], [f"--{key}={text}"]) == in_file, text
        assert outcome([base], [], **{variable: text}) == in_file, text
        accepted += in_file != "refused"
    assert accepted or name == "name"


def test_a_list_needs_no_brackets_in_a_file_either(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("evaluation:\n  budgets: 1,2,4\ndata:\n  sources: a,b\n", encoding="utf-8")
    recipe = load(path)
    assert (recipe.evaluation.budgets, recipe.data.sources) == ((1, 2, 4), ("a", "b"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: {num_loops: 3}\ntraining: {steps: 4}\nmodel: {num_loops: 5}", "has the key 'model' twice"),
        ("model:\n  num_loops: 3\n  hidden_size: 64\n  num_loops: 4", "'num_loops' twice in one mapping, in lines 2 and 4"),
        ("model: {window_pattern: [&l0 [x, x], &l1 [*l0, *l0]]}", "model.window_pattern="),
        ("data: {streaming: yes}", "data.streaming='yes' must be true or false"),
        ("training: {clip: 12:30}", "training.clip='12:30' must be a number or null"),
        ("training: {steps: 0x10}", "training.steps='0x10' must be a whole number"),
        ("data: {cache_dir: ~}", "data.cache_dir='~' must be text or null"),
        ("on: {a: 1}", "section='on' is not known"),
        ("training: {output_dir: ''}", "training.output_dir='' must be text"),
        ("training: {output_dir: }", "training.output_dir=null must be text"),
        (f"model: {{window_pattern: {'S' * 100_000}}}", "data"),
    ],
)  # fmt: skip
def test_a_file_with_a_surprise_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content, encoding="utf-8")
    if said == "data":  # long, and of no other fault: the model refuses it
        assert len(load(path).model.overrides["window_pattern"]) == 100_000
        return
    with pytest.raises(ConfigError) as error:
        load(path)
    assert said in str(error.value)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"LOOPFORMERS_MODLE__NUM_LOOPS": "3"},
            "LOOPFORMERS_MODLE__NUM_LOOPS has no effect.*LOOPFORMERS_MODEL__NUM_LOOPS",
        ),
        (
            {"LOOPFORMERS_OPTIMISER__NAME": "x"},
            "LOOPFORMERS_OPTIMISER__NAME has no effect.*LOOPFORMERS_OPTIMIZER__NAME",
        ),
        ({"LOOPFORMERS_MODEL__num_loops": "3"}, "must be in capitals: LOOPFORMERS_MODEL__NUM_LOOPS"),
        ({"LOOPFORMERS_MODEL": "flt"}, "LOOPFORMERS_MODEL is a section; give one of its fields"),
        ({"LOOPFORMERS_DATA__CACHE_DIR": ""}, "data.cache_dir='' is empty; write null for none"),
        ({"LOOPFORMERS_CONFG": "a.yaml"}, "LOOPFORMERS_CONFG has no effect.*LOOPFORMERS_CONFIG"),
    ],
)
def test_a_variable_without_effect_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve([], environ=environ)


def test_variables_with_another_meaning_are_legal() -> None:
    others = {
        "LOOPFORMERS_DEBUG": "1",
        "LOOPFORMERS_IMPORT": "json",
        "LOOPFORMERS_CONFIG": "cpu-flt",
        "LOOPFORMERS_LAW": "null",
    }
    assert resolve([], environ=others) == Recipe()


def test_the_environment_names_a_recipe_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPFORMERS_CONFIG", raising=False)
    assert default_configs([]) == []
    monkeypatch.setenv("LOOPFORMERS_CONFIG", "cpu-flt")
    assert (default_configs([]), default_configs(["mine"])) == (["cpu-flt"], ["mine"])


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("training.output_dir", "~/runs/x", "/home/someone/runs/x"),
        ("data.cache_dir", "~/cache", "/home/someone/cache"),
        ("data.tokenizer", "~/tokenizer", "/home/someone/tokenizer"),
        ("data.sources", "~/a.txt,bundled/austen,texts", ("/home/someone/a.txt", "bundled/austen", "texts")),
    ],
)
def test_a_home_folder_is_expanded_once_whatever_the_recipe_comes_from(
    key: str, text: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    section, _, name = key.partition(".")
    file = tmp_path / "a.yaml"
    file.write_text(
        f"{section}: {{{name}: [{text}]}}" if "," in text else f"{section}: {{{name}: {text}}}", encoding="utf-8"
    )
    variable = {f"LOOPFORMERS_{section.upper()}__{name.upper()}": text}
    for recipe in (load(file), resolve([], [f"--{key}", text], environ={}), resolve([], environ=variable)):
        assert getattr(getattr(recipe, section), name) == expected
    monkeypatch.setenv("HOME", "/home/another")
    assert load(file) != recipe  # a file is read anew, a recipe stays what it was
    assert getattr(getattr(recipe, section), name) == expected


@pytest.mark.parametrize("key", ["training.output_dir", "data.cache_dir", "data.tokenizer", "data.sources"])
@pytest.mark.parametrize("text", ["a\0b", "a\udcff", "$HOME/x", "~no-such-user/x", ""])
def test_a_path_that_names_nothing_is_refused(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve([], [f"--{key}={text}"], environ={})
