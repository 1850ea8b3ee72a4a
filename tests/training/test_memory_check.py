from __future__ import annotations

import pytest

from loopformers.errors import ConfigError
from loopformers.model import memory_check
from loopformers.training.memory_check import check_memory
from loopformers.training.recipe import build_law
from loopformers.training.recipe_file import load, resolve
from loopformers.training.run import model_config


def check(*arguments: str) -> None:
    recipe = resolve(["cpu-flt"], arguments, environ={})
    config = model_config(recipe)
    check_memory(recipe, config, build_law(recipe, config))


def test_a_shipped_recipe_fits() -> None:
    assert load("cpu-flt").training.batch_size
    check()
    check("--model.num_loops", "1024", "--training.activation_checkpointing", "true")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model.hidden_size", "65536"), "parameters needs .* give a smaller model"),
        (("--model.vocab_size", "2000000000"), "parameters needs .* give a smaller model"),
        (
            ("--model.num_hidden_layers", "4096", "--model.hidden_size", "8192"),
            "parameters needs .* give a smaller model",
        ),
        (("--training.batch_size", "10000000"), "activations of a step of 10,000,000 windows of 64 tokens needs"),
        (("--data.seq_len", "100000000"), "activations of a step of 8 windows of 100,000,000 tokens needs"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_before_it_is_built(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 32 * 2**30)
    with pytest.raises(ConfigError, match=said):
        check(*arguments)


def test_gradients_and_optimiser_state_count(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("cpu-flt")
    config = model_config(recipe)
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: config.num_parameters() * 9)  # weights fit twice
    with pytest.raises(ConfigError, match="with gradients and the optimiser's state, needs"):
        check_memory(recipe, config, build_law(recipe, config))
