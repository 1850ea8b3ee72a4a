from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.errors import ConfigError
from loopformers.laws import Fixed, PoissonLogNormal, UniformRange
from loopformers.studies.quickstart import QuickstartSettings
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW
from loopformers.training.recipe import Recipe
from loopformers.training.recipe_file import (
    dump,
    find,
    load,
    override,
    recipe_fields,
    resolve,
    save,
    shipped,
    type_name,
)


def write(folder: Path, text: str, name: str = "my.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recipe_saved_and_loaded_is_equal(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    again = load(save(recipe, tmp_path / "recipe.yaml"))
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_shipped_recipes_keep_runs_apart_and_say_what_they_are() -> None:
    assert {"quickstart-lt", "quickstart-flt", "quickstart-elastic-flt", "cpu-flt", "flt-small"} <= set(shipped())
    folders = [load(name).training.output_dir for name in shipped()]
    assert len(set(folders)) == len(folders)
    assert all(find(name).read_text(encoding="utf-8").startswith("# ") for name in shipped())


@pytest.mark.parametrize("system", QuickstartSettings().systems)
def test_the_quickstarts_recipes_are_the_quickstarts_settings(system: str) -> None:
    settings, recipe = QuickstartSettings(), load(f"quickstart-{system}")
    sizes = {
        "num_loops": settings.num_loops,
        "num_hidden_layers": settings.num_layers,
        "hidden_size": settings.hidden_size,
        "num_attention_heads": settings.num_heads,
    }
    assert (recipe.model.preset, recipe.model.overrides) == (system, sizes)
    assert recipe.optimizer == MuonAdamW(matrix_lr=settings.matrix_lr)
    training, data, evaluation = recipe.training, recipe.data, recipe.evaluation
    assert (data.sources, data.seq_len) == ((settings.source,), settings.seq_len)
    assert (training.steps, training.batch_size, training.seed) == (
        settings.num_steps,
        settings.batch_size,
        settings.seed,
    )
    assert (evaluation.budgets, evaluation.windows) == (settings.budgets, settings.num_validation_windows)


def test_later_files_then_the_environment_then_arguments_win(tmp_path: Path) -> None:
    first = write(
        tmp_path, "model: {preset: lt, num_loops: 3, hidden_size: 24}\ntraining: {steps: 5, seed: 6}", "a.yaml"
    )
    second = write(tmp_path, "model: {num_loops: 4}\ntraining:\n", "b.yaml")
    environ = {"LOOPFORMERS_MODEL__NUM_LOOPS": "5", "LOOPFORMERS_TRAINING__STEPS": "7", "LOOPFORMERS_HOME": "x"}
    recipe = resolve([first, second], ["--model.num_loops=8"], environ=environ)
    assert recipe.model.overrides == {"num_loops": 8, "hidden_size": 24}
    assert (recipe.model.preset, recipe.training.steps, recipe.training.seed) == ("lt", 7, 6)


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPFORMERS_DATA__SEQ_LEN", "77")
    assert resolve([]).data.seq_len == 77
    assert load("cpu-flt").data.seq_len == 64


def test_text_is_read_as_the_fields_type() -> None:
    arguments = (
        "--evaluation.budgets 1,4,coarse-first:3 --model.final_logit_softcapping null --training.report_to none "
    )
    arguments += "--optimizer.matrix_lr 3e-2 --data.sources 12 --training.activation_checkpointing true"
    recipe = resolve([], arguments.split(), environ={})
    assert recipe.evaluation.budgets == (1, 4, "coarse-first:3")
    assert recipe.model.overrides == {"final_logit_softcapping": None}
    assert recipe.training.report_to == ()
    assert recipe.optimizer == MuonAdamW(matrix_lr=0.03)
    assert recipe.data.sources == ("12",)
    assert recipe.training.activation_checkpointing is True
    assert resolve([], ["--evaluation.budgets", '["2,1,1", 3]'], environ={}).evaluation.budgets == ("2,1,1", 3)


def test_a_number_in_yamls_scientific_notation_needs_no_dot(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer: {name: decayed_adamw, lr: 6e-4}")
    assert load(path).optimizer == DecayedAdamW(lr=6e-4)


def test_another_name_drops_the_fields_of_the_earlier_choice(tmp_path: Path) -> None:
    path = write(tmp_path, "law: {name: poisson_log_normal, mean_loops: 3}\noptimizer: {matrix_lr: 1}")
    arguments = "--law.min_loops 1 --law.max_loops 4 --law.name uniform_range --optimizer.name decayed_adamw"
    recipe = resolve([path], arguments.split(), environ={})
    assert (recipe.law, recipe.optimizer) == (UniformRange(1, 4), DecayedAdamW())
    same = resolve([path], ["--law.name", "poisson_log_normal", "--law.max_loops", "9"], environ={})
    assert same.law == PoissonLogNormal(3, max_loops=9)


def test_null_drops_a_law_and_a_later_source_gives_one_again(tmp_path: Path) -> None:
    path = write(tmp_path, "law: {name: poisson_log_normal, mean_loops: 3}")
    nothing = write(tmp_path, "law: null", "none.yaml")
    assert resolve([path], ["--law", "null"], environ={}).law is None
    again = ["--law.name", "fixed", "--law.num_loops", "3"]
    assert resolve([path, nothing], again, environ={}).law == Fixed(3)


def test_an_empty_file_is_the_default_recipe(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing yet\n")) == Recipe() == load(write(tmp_path, dump(Recipe())))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model.num_loop", "3"], "--model.num_loop: field of model='num_loop' is not known; did you mean 'num_loops'?"),
        (["--num_loops", "3"], "the field num_loops is written model.num_loops or law.num_loops"),
        (["--optimzer.lr", "3"], "section='optimzer' is not known; did you mean 'optimizer'?"),
        (["--model.num_loops", "x"], "argument --model.num_loops: model.num_loops='x' must be a whole number (T, loops"),
        (["--model.num_loops"], "argument --model.num_loops has no value"),
        (["--model.preset", "--json"], "argument --model.preset has no value"),
        (["x"], "argument 'x' belongs to no option"),
        (["--training.precision", "fp16"], "must be one of float32, bfloat16"),
        (["--data.fractions", "0.9,0.1"], "must be a list of 3 values, each a number"),
        (["--model.tie_word_embeddings", "maybe"], "must be true or false (Whether the head is the embedding)"),
        (["--optimizer", "muon_adamw"], "optimizer='muon_adamw' is a section; give its fields, such as optimizer.name"),
        (["--optimizer.name", "adam"], "optimizer.name='adam' is not known"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve([], arguments, environ={})
    assert text in str(error.value)


def test_a_mistyped_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"variable LOOPFORMERS_MODEL__NUM_LOPS: .*did you mean 'num_loops'"):
        resolve([], environ={"LOOPFORMERS_MODEL__NUM_LOPS": "3"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("model: [", "is not readable YAML"),
        ("- 3", "contains a list but must contain a mapping"),
        ("model: 3", "model='3' must be a mapping from field to value"),
        ("moedl: {}", "section='moedl' is not known; did you mean 'model'?"),
        ("moedl: 3", "section='moedl' is not known"),
        ("model: {presset: flt}", "field of model='presset' is not known; did you mean 'preset'?"),
        ("model: {num_loops: [3]}", "model.num_loops=['3'] must be a whole number"),
        ("training: {steps: true}", "training.steps='true' must be a whole number"),
        ("law: fixed", "law='fixed' is a section; give its fields, such as law.name, or null"),
    ],
)
def test_a_bad_file_is_refused_by_name(content: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert text in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quickstart-ftl", "did you mean 'quickstart-flt'? "),
        ("nowhere.yaml", "recipe='nowhere.yaml' is no file (working folder"),
        ("no/where", "recipe='no/where' is no file"),
    ],
)
def test_a_missing_recipe_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(name)
    assert text in str(error.value)


def test_a_folder_is_no_recipe_and_a_file_wins_over_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        find(tmp_path)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "cpu-flt")
    assert find("cpu-flt") == Path("cpu-flt")


def test_every_field_has_words_for_its_type_and_its_meaning() -> None:
    fields = recipe_fields()
    assert {"model.injection", "data.seq_len", "law.mean_loops", "optimizer.lr", "training.clip"} <= fields.keys()
    for field in fields.values():
        assert "<class" not in type_name(field.type)
        assert "typing" not in type_name(field.type)
        assert field.help


def test_fields_of_a_recipe_are_overridden_as_a_later_file_would() -> None:
    recipe = load("quickstart-flt")
    changed = override(
        recipe, {"model.preset": "lt", "training.seed": 4, "evaluation.budgets": [2, 5]}, origin="grid 'mine'"
    )
    assert (changed.model.preset, changed.model.overrides) == ("lt", recipe.model.overrides)
    assert (changed.training.seed, changed.evaluation.budgets) == (4, (2, 5))
    assert changed.data == recipe.data
    other = override(recipe, {"optimizer.name": "decayed_adamw", "optimizer.lr": 3e-3}, origin="grid 'mine'")
    assert other.optimizer == DecayedAdamW(lr=3e-3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model.presett": "lt"}, "grid 'mine': field of model='presett' is not known; did you mean 'preset'"),
        ({"training.seed": "four"}, "grid 'mine': training.seed='four' must be a whole number"),
        ({"training.steps": 0}, "training.steps=0 must be a whole number of at least 1"),
    ],
)
def test_an_override_that_is_none_is_refused_by_its_origin(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        override(load("quickstart-flt"), fields, origin="grid 'mine'")
