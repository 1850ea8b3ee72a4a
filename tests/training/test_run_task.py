from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopformers.data.synthetic.pointer_chasing import PointerChasing
from loopformers.data.synthetic.registry import TASKS
from loopformers.data.synthetic.rows import GeneratedRows
from loopformers.errors import ConfigError
from loopformers.testing.distributed import run_distributed
from loopformers.training.planner import count_text, make_plan
from loopformers.training.recipe import (
    DataRecipe,
    EvaluationRecipe,
    ModelRecipe,
    Recipe,
    TrainingRecipe,
    from_fields,
    to_fields,
)
from loopformers.training.recipe_file import load, resolve, shipped
from loopformers.training.run import PreparedRun, prepare
from loopformers.training.step_log import StepLog

TASK = PointerChasing(symbols=4, hops=2, questions=3)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    sizes = {"num_loops": 3, "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return Recipe(
        model=ModelRecipe(preset="lt-input", overrides=sizes),
        task=TASK,
        training=TrainingRecipe(
            steps=7, batch_size=4, seed=3, checkpoint_interval=3, output_dir=str(tmp_path / "run"), report_to=()
        ),
        evaluation=EvaluationRecipe(budgets=(1, 4), windows=5, interval=4),
    )


def change(recipe: Recipe, **training: Any) -> Recipe:
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **training))


def rows_seen(run: PreparedRun, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices of the rows that training read, in order."""
    seen: list[int] = []
    get = GeneratedRows.__getitem__
    monkeypatch.setattr(GeneratedRows, "__getitem__", lambda self, index: seen.append(index) or get(self, index))
    run.train()
    monkeypatch.undo()
    return seen


def test_a_run_reports_loss_and_exact_match_at_each_budget(recipe: Recipe) -> None:
    result = prepare(recipe).train()
    folder = Path(recipe.training.output_dir)
    assert (result.steps, result.tokens_seen) == (7, 7 * 4 * TASK.seq_len)
    assert [score["num_loops"] for score in result.budgets] == [3, 1, 4]
    for score in result.budgets:
        assert score["num_targets"] == 5 * 3 * 2
        assert score["questions_by_difficulty"] == {"1": 15, "2": 15}
        assert score["solved"] == pytest.approx(sum(score["solved_by_difficulty"].values()) / 2)
    last = StepLog(folder / "validation.jsonl").read()[-1]
    assert last == {"step": 7, "budgets": json.loads(json.dumps(result.budgets))}
    assert 1 < result.unigram_loss < 1.6, "about ln 4"
    assert prepare(recipe).finished() == result
    assert "data" not in (folder / "recipe.yaml").read_text()
    assert load(folder / "recipe.yaml").task == TASK


def test_the_folder_opens_as_a_model_that_answers(recipe: Recipe) -> None:
    prepare(recipe).train()
    model = AutoModelForCausalLM.from_pretrained(recipe.training.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(recipe.training.output_dir)
    prompt = tokenizer("s0 s1 s1 s2 s2 s3 s3 s0 s1 > >", return_tensors="pt")
    assert model.config.max_position_embeddings == TASK.seq_len
    assert model.config.vocab_size == len(tokenizer) == len(TASK.words)
    answer = model.generate(**prompt, max_new_tokens=1, num_loops=2, do_sample=False)
    assert tokenizer.decode(answer[0]).split()[-1] in TASK.words


def test_rows_are_read_in_order_so_that_an_update_sees_those_of_its_seed_and_step(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert rows_seen(prepare(recipe), monkeypatch) == list(range(7 * 4))
    longer = change(recipe, steps=9, gradient_accumulation=2, output_dir=str(tmp_path / "longer"))
    assert rows_seen(prepare(longer), monkeypatch) == list(range(9 * 4))


def test_a_stopped_run_continues_to_the_same_bits(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = change(recipe, output_dir=str(tmp_path / "cut"))
    prepare(recipe).train()
    stops = iter([False, False, False, True])
    with pytest.raises(KeyboardInterrupt):
        prepare(cut).train(stop_requested=lambda: next(stops))
    assert rows_seen(prepare(cut), monkeypatch) == list(range(4 * 4, 7 * 4)), "rows that were used are not made again"
    whole, resumed = (load_file(Path(r.training.output_dir) / "model.safetensors") for r in (recipe, cut))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def losses(rank: int, recipe: Recipe) -> list[float]:
    prepare(recipe).train()
    return [record["loss"] for record in StepLog(Path(recipe.training.output_dir) / "metrics.jsonl").read()]


def test_two_processes_share_the_rows_that_one_would_read(recipe: Recipe, tmp_path: Path) -> None:
    shared = change(recipe, output_dir=str(tmp_path / "shared"))
    together = run_distributed(losses, shared, folder=tmp_path)
    assert together[0] == pytest.approx(losses(0, recipe), rel=1e-4)


# -- recipes ---------------------------------------------------------------------------------------------------


def test_a_recipe_with_a_task_is_saved_and_loaded_without_text(recipe: Recipe) -> None:
    fields = to_fields(recipe)
    assert "data" not in fields
    assert fields["task"]["name"] == "pointer_chasing"
    assert from_fields(fields) == recipe
    assert "task" not in to_fields(Recipe())
    assert recipe.seq_len == TASK.seq_len != Recipe().seq_len == 256


def test_text_beside_a_task_is_refused(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len=64 configures text, but a task makes its own rows"):
        dataclasses.replace(recipe, data=DataRecipe(seq_len=64))
    with pytest.raises(ConfigError, match=r"data.sources=\('texts',\) configures text"):
        resolve(["task-pointer-chasing"], ["--data.sources", "texts"], environ={})


def test_every_field_of_a_task_is_an_argument_and_another_task_drops_the_fields_of_the_first() -> None:
    recipe = resolve(["task-pointer-chasing"], ["--task.hops", "3", "--task.answers", "last"], environ={})
    assert (recipe.task.hops, recipe.task.answers) == (3, "last")  # type: ignore[union-attr]
    other = resolve(["task-pointer-chasing"], ["--task.name", "addition", "--task.digits", "3"], environ={})
    assert other.task == dataclasses.replace(other.task, digits=3)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"task.digits is a field of addition, and task.name is pointer_chasing"):
        resolve(["task-pointer-chasing"], ["--task.digits", "3"], environ={})
    with pytest.raises(ConfigError, match=r"task.hops='many' must be a whole number"):
        resolve(["task-pointer-chasing"], ["--task.hops", "many"], environ={})
    with pytest.raises(ConfigError, match=r"task.hops=0 must be a whole number of at least 1"):
        resolve(["task-pointer-chasing"], ["--task.hops", "0"], environ={})


@pytest.mark.parametrize("name", list(TASKS))
def test_each_task_has_a_recipe_that_plans(name: str) -> None:
    recipe = load(f"task-{name.replace('_', '-')}")
    plan = make_plan(recipe)
    assert plan.tokens_per_step == recipe.training.batch_size * recipe.seq_len
    assert count_text(recipe).tokens is None
    assert f"task-{name.replace('_', '-')}" in shipped()
