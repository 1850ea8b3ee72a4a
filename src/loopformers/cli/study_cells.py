"""The cells of a grid as a table: what would be trained, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loopformers.report.tables import Column, Table, Value

if TYPE_CHECKING:
    from loopformers.studies.grid import Grid
    from loopformers.training.recipe import Recipe

__all__ = ["cells_table"]


def cells_table(grid: Grid) -> Table:
    """Return one row a cell; operations are those of training, every loop and both trajectories of the objective."""
    from loopformers.training.run import model_config

    tokenizers: dict[str, Any] = {}
    rows: list[Mapping[str, Value]] = []
    for cell in grid.cells:
        recipe = cell.recipe
        words = recipe.data.tokenizer if recipe.task is None else repr(recipe.task)
        if words not in tokenizers:
            tokenizers[words] = tokenizer_at_hand(recipe)
        config = model_config(recipe, tokenizers[words])
        tokens = recipe.training.steps * recipe.training.batch_size * recipe.seq_len
        rows.append(
            {
                "cell": cell.id,
                "system": str(cell.axes["system"]),
                "loops": config.num_loops,
                "seed": recipe.training.seed,
                "parameters": config.num_parameters(),
                "steps": recipe.training.steps,
                "tokens": tokens,
                "flops": config.training_flops_per_token(seq_len=recipe.seq_len) * tokens / 1e12,
            }
        )
    columns = (
        Column(key="cell", title="cell"),
        Column(key="system", title="system"),
        Column(key="loops", title="T", align="right"),
        Column(key="seed", title="seed", align="right"),
        Column(key="parameters", title="parameters", align="right", format=",d"),
        Column(key="steps", title="updates", align="right", format=",d"),
        Column(key="tokens", title="training tokens", align="right", format=",d"),
        Column(key="flops", title="training compute", unit="TFLOP", align="right", format=",.2f"),
    )
    return Table(title=f"{grid.title}: {len(grid.cells)} cells", columns=columns, rows=tuple(rows))


def tokenizer_at_hand(recipe: Recipe) -> Any:
    """Return the tokenizer whose size is the vocabulary's, or None where it is out of reach and the recipe's has to do."""
    from loopformers.errors import DataError
    from loopformers.training.run_text import recipe_tokenizer

    try:
        return recipe_tokenizer(recipe)
    except DataError:
        return None
