from __future__ import annotations

import pytest

from loopformers.errors import ConfigError
from loopformers.training.idle_fields import RULES, check_effects
from loopformers.training.published import published_runs
from loopformers.training.recipe_file import dump, load, recipe_fields, resolve, shipped
from loopformers.training.run import model_config


def check(*arguments: str) -> None:
    recipe = resolve([], arguments, environ={})
    check_effects(recipe, model_config(recipe))


@pytest.mark.parametrize(
    ("idle", "remedy"),
    [
        ("--model.short_weight 0.2", "--model.preset elastic-flt --model.objective shortcut_consistency"),
        ("--model.consistency_target logits", "--model.preset loopformer"),
        ("--model.short_sampler uniform", "--model.preset loopformer"),
        ("--model.loop_seed 3", "--law.name uniform_range --law.min_loops 1 --law.max_loops 3"),
        ("--model.sliding_window 16", "--model.window_pattern SL"),
        ("--model.position_embedding learned --model.rope_theta 500", "--model.position_embedding rotary"),
        ("--model.time_scale 3", "--model.conditioning time"),
        ("--model.modulation_init normal", "--model.conditioning loop_index"),
        ("--data.split_by tail --data.split_seed 7", "--data.split_by document"),
        ("--data.split_by tail --data.split_seed 8", "--data.split_by id"),
        ("--data.sources bundled,bundled/austen --data.text_column body", "--data.sources bundled,texts"),
        ("--data.streaming true --data.sources fineweb-edu --data.id_column key", "--data.sources texts"),
        ("--training.num_grad_loops 99", "--training.num_grad_loops 2"),
        ("--training.kept_loops 2", "--training.activation_checkpointing true"),
    ],
)
def test_a_field_without_effect_is_refused_until_its_condition_holds(idle: str, remedy: str) -> None:
    key = idle.split()[-2].removeprefix("--")
    with pytest.raises(ConfigError, match=f"{key}=.* has no effect in this recipe; leave it out. It acts only with"):
        check(*idle.split())
    check(*idle.split(), *remedy.split())


def test_a_law_takes_the_place_of_the_models_sampler() -> None:
    law = "--model.preset loopformer --law.name short_trajectory --law.num_loops 4 --law.passes_only false"
    check(*law.split(), "--law.sampler", "uniform")
    with pytest.raises(ConfigError, match=r"model.short_sampler='uniform' has no effect.*law.sampler"):
        check(*law.split(), "--model.short_sampler", "uniform")


def test_every_rule_names_fields_that_exist() -> None:
    assert {key for rule in RULES for key in rule.fields} <= recipe_fields().keys()


def test_shipped_recipes_the_papers_runs_and_recipes_with_every_field_named_pass(tmp_path) -> None:
    for recipe in [*map(load, shipped()), *(run.load() for run in published_runs())]:
        check_effects(recipe, model_config(recipe))
    full = tmp_path / "full.yaml"
    full.write_text(dump(resolve([], ["--model.short_weight", "0.1"], environ={})), encoding="utf-8")
    assert "short_weight" in full.read_text()
    check_effects(load(full), model_config(load(full)))
