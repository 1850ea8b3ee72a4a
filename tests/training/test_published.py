from __future__ import annotations

import pytest
import torch

from loopformers.model.modeling import LoopedForCausalLM
from loopformers.training.lr_schedules import ConstantThenLinear, WarmupCosine
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW
from loopformers.training.published import PublishedRun, published_runs
from loopformers.training.recipe import build_law, check_budgets
from loopformers.training.run import model_config

RUNS = published_runs()


def name_of(run: PublishedRun) -> str:
    return str(run.overrides["training.output_dir"]).removeprefix("runs/")


def test_the_grid_is_both_papers() -> None:
    names = [name_of(run) for run in RUNS]
    assert len(set(names)) == len(names) == 2 * 4 * 5 + 3 * 5 + 3
    assert {"flt-small/lt-t3", "flt-base/flt-t12", "loopformer-1x24/tmlt-exit", "loopformer-3x8/base-24"} <= set(names)


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_a_published_run_builds_on_the_meta_device_with_the_parameters_that_its_paper_states(run: PublishedRun) -> None:
    recipe = run.load()
    config = model_config(recipe)
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    model.tie_weights()  # transformers 5.0 leaves that out on the meta device
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == config.num_parameters()
    if run.stated_parameters is not None:
        number, _, unit = run.stated_parameters.partition(" ")
        assert (round(count / 1e6) if unit == "M" else f"{count:,}") == (int(number) if unit == "M" else number)
    build_law(recipe, config)
    assert check_budgets(recipe.evaluation.budgets, config)
    tokens_per_step = recipe.training.batch_size * recipe.data.seq_len
    if run.recipe.startswith("flt"):
        assert tokens_per_step == 524_288
        assert 0 <= recipe.training.steps * tokens_per_step - 20 * count < tokens_per_step
        assert (recipe.optimizer, recipe.lr_schedule) == (MuonAdamW(), ConstantThenLinear(decay_fraction=0.2))
        assert config.hidden_size == 64 * config.num_hidden_layers
    else:
        assert tokens_per_step == 491_520
        assert recipe.training.steps == 50_000
        assert (recipe.optimizer, recipe.lr_schedule) == (DecayedAdamW(), WarmupCosine())
        assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (2048, 32, 5120)
    assert (recipe.data.seq_len, recipe.training.clip) == (1024, 1.0)


def test_block_passes_of_loopformers_grid_are_24_or_those_of_base() -> None:
    for run in RUNS:
        if run.recipe.startswith("loopformer"):
            config = model_config(run.load())
            passes = config.num_hidden_layers * config.num_loops
            assert passes == 24 or run.overrides["model.preset"] == "base"
