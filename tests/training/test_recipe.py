from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from loopformers.data.splits import DEFAULT_FRACTIONS, DEFAULT_SPLIT_SEED
from loopformers.errors import ConfigError
from loopformers.laws import Fixed, PoissonLogNormal, ShortTrajectory, UniformRange
from loopformers.schedule import Schedule
from loopformers.testing import tiny_config
from loopformers.training.lr_schedules import WarmupCosine
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW
from loopformers.training.recipe import (
    DataRecipe,
    EvaluationRecipe,
    ModelRecipe,
    Recipe,
    TrainingRecipe,
    build_law,
    check_budgets,
    differences,
    from_fields,
    to_fields,
)

RICH = Recipe(
    model=ModelRecipe(preset="loopformer", overrides={"num_loops": 5, "final_logit_softcapping": None}),
    data=DataRecipe(sources=("a", "b"), fractions=(0.8, 0.1, 0.1), seq_len=7),
    law=PoissonLogNormal(mean_loops=3, max_loops=11),
    optimizer=DecayedAdamW(lr=1e-3),
    lr_schedule=WarmupCosine(warmup_steps=3),
    training=TrainingRecipe(clip=None, report_to=("tensorboard", "trackio")),
    evaluation=EvaluationRecipe(budgets=(1, "coarse-first:3")),
)


@pytest.mark.parametrize("recipe", [Recipe(), RICH])
def test_a_recipe_survives_its_plain_values(recipe: Recipe) -> None:
    assert from_fields(to_fields(recipe)) == recipe
    assert from_fields(to_fields(recipe)).fingerprint() == recipe.fingerprint()


def test_importing_recipes_loads_no_torch() -> None:
    code = (
        "import sys, loopformers.training.recipe, loopformers.training.recipe_file as f\n"
        "assert f.shipped()\nprint(sorted({'torch', 'transformers', 'jsonargparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_defaults_are_those_of_the_data_floor_and_of_flt() -> None:
    recipe = Recipe()
    assert (recipe.data.fractions, recipe.data.split_seed) == (DEFAULT_FRACTIONS, DEFAULT_SPLIT_SEED)
    assert recipe.optimizer == MuonAdamW()
    assert recipe.training.report_to == ("tensorboard",)


def test_single_values_become_lists_of_one() -> None:
    fields: dict[str, Any] = {"data": {"sources": "a"}, "evaluation": {"budgets": 3}, "training": {"report_to": "none"}}
    recipe = from_fields(fields)
    assert (recipe.data.sources, recipe.evaluation.budgets, recipe.training.report_to) == (("a",), (3,), ())


def test_a_fingerprint_depends_on_the_outcome_and_not_on_where_it_is_kept() -> None:
    elsewhere = dataclasses.replace(RICH, training=dataclasses.replace(RICH.training, output_dir="b", log_interval=3))
    other_seed = dataclasses.replace(RICH, training=dataclasses.replace(RICH.training, seed=1))
    assert elsewhere.fingerprint() == RICH.fingerprint() != other_seed.fingerprint()
    assert differences(elsewhere, RICH) == {}
    assert differences(other_seed, RICH) == {"training.seed": (1, 0)}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"modle": {}}, "section='modle' is not known; did you mean 'model'?"),
        ({"data": {"seq_length": 3}}, "field of data='seq_length' is not known; did you mean 'seq_len'?"),
        ({"data": 3}, "data=3 must be a mapping from field to value"),
        ({"law": {"name": "fixt"}}, "law.name='fixt' is not known; did you mean 'fixed'?"),
        ({"law": {"num_loops": 3}}, "law.name=None is not known"),
        ({"law": {"name": "uniform_range", "min_loops": 2}}, "law (uniform_range) needs max_loops"),
        ({"law": {"name": "uniform_range", "min_loops": 3, "max_loops": 2}}, "min_loops=3 is above max_loops=2"),
        (
            {"optimizer": {"lr": 1.0}},
            "optimizer.lr is a field of decayed_adamw, and optimizer.name is muon_adamw; leave it out, or choose",
        ),
        ({"optimizer": {"matrix_rl": 1.0}}, "field of optimizer (muon_adamw)='matrix_rl' is not known; did you mean"),
        ({"optimizer": {"matrix_lr": -1.0}}, "matrix_lr=-1.0 must be a finite number of at least 0"),
        ({"training": {"steps": 0}}, "training.steps=0 must be a whole number of at least 1"),
        ({"training": {"checkpoints_kept": 1}}, "training.checkpoints_kept=1 must be a whole number of at least 2"),
        ({"training": {"clip": 0.0}}, "training.clip=0.0 must be a positive number, or null"),
        ({"training": {"precision": "float8"}}, "training.precision='float8' is not known; did you mean 'float32'?"),
        ({"training": {"output_dir": ""}}, "training.output_dir='' is empty"),
        ({"data": {"sources": []}}, "data.sources=[] is empty"),
        ({"data": {"seq_len": 1}}, "data.seq_len=1 must be a whole number of at least 2"),
        ({"evaluation": {"budgets": [0]}}, "evaluation.budgets=0 must be a whole number of at least 1"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_value_rule_and_remedy(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_fields(fields)
    assert text in str(error.value)


def test_the_default_law_is_the_models_and_a_fitting_one_replaces_it() -> None:
    config = tiny_config("loopformer", num_loops=5)
    assert build_law(Recipe(), config) == ShortTrajectory(5)
    law = ShortTrajectory(7, "uniform")
    assert build_law(Recipe(law=law), config) is law
    assert build_law(Recipe(law=UniformRange(2, 9)), tiny_config("flt")) == UniformRange(2, 9)


@pytest.mark.parametrize(
    ("preset", "law", "text"),
    [
        ("loopformer", Fixed(3), "this law draws none; use law.name=short_trajectory"),
        ("flt", ShortTrajectory(3), "draws a trajectory that objective='last_loop' does not train"),
        ("base-loop-exit", ShortTrajectory(3), "law.passes_only=false draws unequal steps"),
    ],
)
def test_a_law_that_does_not_fit_the_objective_is_refused(preset: str, law: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_law(Recipe(law=law), tiny_config(preset))


def test_budgets_start_with_the_trained_run_and_repeat_none() -> None:
    config = tiny_config("loopformer", num_loops=4)
    runs = check_budgets((1, "4", "uniform:2", 2, "coarse-first:2"), config)
    assert runs == (*map(Schedule.uniform, (4, 1, 2)), Schedule((3, 1), 4))
    with pytest.raises(ConfigError, match="does not know step sizes"):
        check_budgets(("2/3,1/3",), tiny_config("flt"))
