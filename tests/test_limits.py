"""Sizes are refused at once, before memory or time is taken, by one error that names the value and the rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import pytest

from loopformers.cli.budgets import parse_budgets
from loopformers.data.synthetic.addition import Addition
from loopformers.data.synthetic.pointer_chasing import PointerChasing
from loopformers.errors import ConfigError, check_count, shorten, unknown_name
from loopformers.laws import Curriculum, Fixed, PoissonLogNormal, ShortTrajectory, UniformRange
from loopformers.limits import MAX_LOOPS
from loopformers.model.config import LoopConfig
from loopformers.schedule import Schedule
from loopformers.training.recipe import DataRecipe, EvaluationRecipe, Recipe, TrainingRecipe

NINES = "9" * 5000


def preset(**fields: object) -> Callable[[], object]:
    return lambda: LoopConfig.from_preset("loopformer", **fields)


def schedule(text: object) -> Callable[[], object]:
    return lambda: LoopConfig.from_preset("loopformer").resolve_schedule(schedule=text)


def loops(text: str) -> Callable[[], object]:
    return lambda: parse_budgets(text, None, LoopConfig.from_preset("flt"))


TOO_LARGE: dict[str, tuple[Callable[[], object], str]] = {
    "loops": (preset(num_loops=10**6), "num_loops=1000000 must be at most 4,096"),
    "loops of many digits": (
        preset(num_loops=10**5000),
        "num_loops=<whole number of about 5,001 digits> must be at most",
    ),
    "loops as a float": (preset(num_loops=1e30), r"num_loops=1e\+30 must be a whole number"),
    "width": (preset(hidden_size=10**9), "hidden_size=1000000000 must be a whole number of at most 1,048,576"),
    "width of many digits": (preset(hidden_size=10**400), "hidden_size=<whole number of about 401 digits>"),
    "vocabulary": (preset(vocab_size=10**12), "vocab_size=1000000000000 must be a whole number of at most"),
    "layers": (preset(num_hidden_layers=10**7), "num_hidden_layers=10000000 must be a whole number of at most 4,096"),
    "heads": (preset(num_attention_heads=10**9), "num_attention_heads=1000000000 must be"),
    "positions": (preset(max_position_embeddings=10**20), "max_position_embeddings="),
    "pattern": (preset(window_pattern="S" * 10**7), "window_pattern='SSS.* must be a string of S"),
    "epsilon": (preset(rms_norm_eps=1e308), r"rms_norm_eps=1e\+308 must be a positive number, at most 1"),
    "rope": (preset(rope_theta=10**400), "rope_theta=<whole number of about 401 digits> must be a positive number"),
    "loop seed": (preset(loop_seed="x"), "loop_seed='x' must be a whole number"),
    "stream": (preset(stream=["state"]), r"stream=\['state'\] is not known"),
    "--num-loops": (loops("999999"), "num_loops=999999 must be at most 4,096"),
    "--num-loops of 20 digits": (loops("9" * 20), "num_loops=99999999999999999999 must be at most"),
    "--num-loops of 5000 digits": (loops(NINES), "is not a number of loops"),
    "--num-loops, many": (
        loops("1," * 10**5 + "1"),
        "number of budgets in --num-loops=100001 must be .* at most 1,024",
    ),
    "uniform": (schedule("uniform:1000000"), "num_loops=1000000 must be at most 4,096"),
    "uniform of nines": (schedule("uniform:" + NINES), "is not a number of loops"),
    "coarse": (schedule("coarse-first:4000000000"), "num_loops=4000000000 must be at most"),
    "exponent": (schedule("1,1e1000000"), "the step size '1e1000000', which is not a number of at most 12 digits"),
    "large exponent": (schedule("1e400"), "'1e400', which is not a number"),
    "by zero": (schedule("1/0"), "'1/0', which is not a number"),
    "many steps": (schedule("1," * 10**6 + "1"), "must be at most 4,096"),
    "step of many digits": (schedule([10**5000, 1]), "<whole number of about 5,001 digits>, which is not a number"),
    "explicit": (lambda: Schedule.explicit([Fraction(10**400), 0]), "must be numbers that sum to 1"),
    "law": (lambda: Fixed(10**6), "num_loops=1000000"),
    "range": (lambda: UniformRange(1, 10**6), "num_loops=1000000"),
    "mean": (lambda: PoissonLogNormal(1e9), "mean_loops=1000000000.0 must be above 1"),
    "sigma": (lambda: PoissonLogNormal(4, sigma=1e3), "sigma=1000.0 must be a number from 0 to 10"),
    "curriculum": (lambda: Curriculum(1, 4, 10**20), "num_steps=100000000000000000000 must be"),
    "trajectory": (lambda: ShortTrajectory(10**9), "num_loops=1000000000"),
    "budgets": (lambda: EvaluationRecipe(budgets=(10**6,)), "evaluation.budgets=1000000 must be at most"),
    "budgets as text": (lambda: EvaluationRecipe(budgets=("1000000",)), "evaluation.budgets=1000000 must be at most"),
    "many budgets": (lambda: EvaluationRecipe(budgets=tuple(range(1, 2000))), "number of evaluation.budgets=1999"),
    "steps": (lambda: TrainingRecipe(steps=10**20), "training.steps=100000000000000000000"),
    "seed": (lambda: TrainingRecipe(seed=2**64), "training.seed=18446744073709551616 must be .* at most 4,294,967,295"),
    "batch": (lambda: TrainingRecipe(batch_size=10**12), "training.batch_size=1000000000000"),
    "window": (lambda: DataRecipe(seq_len=10**20), "data.seq_len=100000000000000000000"),
    "digits": (lambda: Addition(digits=10**9), "task.digits=1000000000"),
    "row": (lambda: Recipe(task=Addition(digits=60_000, questions=60_000)), "tokens of a row of the task="),
    "pairs": (
        lambda: PointerChasing(symbols=60_000, pairs="one_token"),
        "task.symbols with task.pairs=one_token=60000",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_refused_at_once(name: str) -> None:
    attempt, said = TOO_LARGE[name]
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=said) as error:
        attempt()
    assert time.perf_counter() - started < 2
    assert len(str(error.value)) < 1500


def test_deep_runs_are_legal() -> None:
    for num_loops in (64, 1024, MAX_LOOPS):
        config = LoopConfig.from_preset("loopformer", num_loops=num_loops)
        assert config.resolve_schedule(schedule=f"coarse-first:{num_loops // 2}").num_loops == num_loops // 2
        assert config.resolve_schedule().num_loops == num_loops


LONG: dict[str, object] = {
    "number": 10**5000,
    "text": "x" * 10**6,
    "nested": [[["x" * 1000] * 1000] * 1000] * 1000,
    "mapping": dict.fromkeys(range(10**5), "y" * 99),
}


@pytest.mark.parametrize("name", LONG)
def test_an_error_shows_the_beginning_of_what_is_long(name: str) -> None:
    value = LONG[name]
    assert len(shorten(value)) <= 610
    assert len(unknown_name("what", value, ["a"])) < 700
    with pytest.raises(ConfigError):
        check_count("size", value, at_most=3)


def test_what_is_short_is_shown_as_it_is() -> None:
    for value in ("flt", 12, -0.5, [1, 2, "3"], {"a": None}, (True,)):
        assert shorten(value) == repr(value)
