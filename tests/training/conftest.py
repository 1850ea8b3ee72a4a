from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.training.recipe import DataRecipe, EvaluationRecipe, ModelRecipe, Recipe, TrainingRecipe


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two text files and room for prepared text."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for name, start in (("one", 0), ("two", 500)):
        lines = (
            f"On day {n} the sea was {('calm', 'rough', 'grey')[n % 3]}, and {n * 7} gulls came.\n" for n in range(300)
        )
        (folder / f"{name}.txt").write_text("".join(list(lines)[start % 7 :]), encoding="utf-8")
    return folder


@pytest.fixture
def recipe(texts: Path, tmp_path: Path) -> Recipe:
    """A recipe that trains in a second."""
    sizes = {"num_loops": 3, "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return Recipe(
        model=ModelRecipe(preset="flt", overrides=sizes),
        data=DataRecipe(sources=(str(texts),), seq_len=17, split_by="tail", cache_dir=str(texts.parent / "cache")),
        training=TrainingRecipe(
            steps=7, batch_size=4, seed=3, checkpoint_interval=3, output_dir=str(tmp_path / "run"), report_to=()
        ),
        evaluation=EvaluationRecipe(budgets=(1, 4), windows=5, interval=4),
    )
