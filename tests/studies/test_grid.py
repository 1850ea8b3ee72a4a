from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from loopformers.errors import ConfigError
from loopformers.studies.grid import bundled_grids, expand_grid, load_grid
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW


def ids(content: dict[str, Any], **options: Any) -> list[str]:
    return [cell.id for cell in expand_grid(content, name="tiny", **options).cells]


def test_the_product_of_a_blocks_axes_gives_its_cells_and_the_last_axis_runs_fastest(content: dict[str, Any]) -> None:
    grid = expand_grid(content, name="tiny")
    assert [cell.id for cell in grid.cells] == ["lt_T2_seed0", "lt_T2_seed1", "flt_T2_seed0", "flt_T2_seed1"]
    last = grid.cells[-1]
    assert last.axes == {"system": "flt", "loops": 2, "seed": 1}
    assert (last.recipe.model.preset, last.recipe.training.seed, last.recipe.training.steps) == ("flt", 1, 4)
    assert (grid.name, grid.title) == ("tiny", "A tiny study")


def test_further_axes_are_in_the_name_between_loops_and_seed(content: dict[str, Any]) -> None:
    content["blocks"] = [
        {
            "optimizer.matrix_lr": [0.01, 0.03],
            "attention": {
                "full": None,
                "gqa": {"model.num_key_value_heads": 1},
                "slide": {"model": {"window_pattern": "S"}},
            },
            "model.preset": ["lt"],
        }
    ]
    grid = expand_grid(content, name="tiny")
    assert [cell.id for cell in grid.cells][1:4] == [
        "lt_T2_matrix-lr-0.01_gqa_seed0", "lt_T2_matrix-lr-0.01_slide_seed0", "lt_T2_matrix-lr-0.03_full_seed0",
    ]  # fmt: skip
    gqa, slide = grid.cells[1], grid.cells[2]
    assert gqa.axes == {"system": "lt", "loops": 2, "seed": 0, "optimizer.matrix_lr": 0.01, "attention": "gqa"}
    assert gqa.recipe.model.overrides["num_key_value_heads"] == 1
    assert slide.recipe.model.overrides["window_pattern"] == "S"


def test_a_named_set_may_choose_another_class_and_a_system_another_number_of_loops(content: dict[str, Any]) -> None:
    content["blocks"] = [
        {"optimizer": {"muon": {}, "adamw": {"optimizer.name": "decayed_adamw", "optimizer.lr": 0.003}}},
        {"system": {"one pass": {"model.preset": "lt", "model.num_loops": 1}}},
    ]
    grid = expand_grid(content, name="tiny")
    assert [cell.id for cell in grid.cells] == ["flt_T2_muon_seed0", "flt_T2_adamw_seed0", "one-pass_T1_seed0"]
    assert [cell.recipe.optimizer for cell in grid.cells[:2]] == [MuonAdamW(), DecayedAdamW(lr=0.003)]
    assert grid.cells[2].axes == {"system": "one pass", "loops": 1, "seed": 0}


def test_a_single_value_holds_for_its_block_and_is_no_axis(content: dict[str, Any]) -> None:
    content["blocks"] = [{"training.steps": 9, "model.preset": "lt", "training.seed": [3]}]
    (cell,) = expand_grid(content, name="tiny").cells
    assert (cell.id, cell.recipe.training.steps, cell.recipe.model.preset) == ("lt_T2_seed3", 9, "lt")


def test_equal_recipes_are_one_cell_over_all_blocks(content: dict[str, Any]) -> None:
    content["blocks"] += [
        {"model.preset": ["flt"], "training.seed": [1, 2]},
        {"attention": {"full": {}}, "training.seed": [2]},  # the base's preset is flt
    ]
    assert ids(content) == ["lt_T2_seed0", "lt_T2_seed1", "flt_T2_seed0", "flt_T2_seed1", "flt_T2_seed2"]


def test_seeds_can_be_given_in_the_place_of_the_files(content: dict[str, Any]) -> None:
    content["blocks"].append({"model.num_loops": [3]})
    assert ids(content, seeds=[7]) == ["lt_T2_seed7", "flt_T2_seed7", "flt_T3_seed7"]


def test_a_base_is_a_recipes_name_or_fields_over_one() -> None:
    blocks = [{"model.num_loops": [3]}]
    (named,) = expand_grid({"base": "quickstart-lt", "blocks": blocks}, name="g").cells
    (over,) = expand_grid(
        {"base": {"recipe": "quickstart-lt", "training": {"steps": 3}}, "blocks": blocks}, name="g"
    ).cells
    assert (named.id, named.recipe.training.steps) == ("lt_T3_seed0", 200)
    assert (over.id, over.recipe.training.steps, over.recipe.optimizer) == ("lt_T3_seed0", 3, named.recipe.optimizer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": []}, "grid 'tiny' has no blocks, so no cells"),
        ({"blocks": [{}]}, "grid 'tiny', block 1 is {} but must be a mapping"),
        ({"blocks": [{"training.seed": []}]}, r"training.seed=\[\] has no values, so the block has no cells"),
        ({"blocks": [{"attention": ["gqa"]}]}, r"attention=\['gqa'\] is not an axis; write section.field with a list"),
        ({"blocks": [{"attention": {"gqa": 1}}]}, "attention.gqa=1 must be a mapping of recipe fields"),
        ({"blocks": [{"model.preset": ["lt", "ltt"]}]}, "cell model.preset=ltt: preset='ltt' is not known; did you mean 'lt'"),
        ({"blocks": [{"model.lops": [1]}]}, "block 1: field of model='lops' is not known"),
        ({"blocks": [{"model.num_attention_heads": [5]}]}, "hidden_size=24 does not split into num_attention_heads=5"),
        ({"blocks": [{"training.seed": [0]}, {"training.seed": [0], "training.steps": 9}]},
         "two cells are named 'flt_T2_seed0' and differ, training.steps=4 and 9; write training.steps as a list"),
        ({"base": 3}, "base=3 must be a recipe's name or file, or a mapping"),
        ({"base": "quickstart-ltt"}, "recipe='quickstart-ltt' is not known"),
        ({"blocks": [{True: {"a": {}}}]}, "axis True is not text; write the name"),
        ({"axes": 1}, "grid 'tiny': key='axes' is not known"),
    ],
)  # fmt: skip
def test_what_is_no_grid_is_refused(content: dict[str, Any], change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ids({**content, **change})


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1], [True]])
def test_seeds_that_are_none_are_refused(content: dict[str, Any], seeds: list[int]) -> None:
    with pytest.raises(ConfigError, match="seeds="):
        ids(content, seeds=seeds)


def test_a_grid_is_read_from_a_file_before_a_bundled_one_of_that_name(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert len(load_grid(path).cells) == 4
    monkeypatch.chdir(tmp_path)
    path.rename(tmp_path / "stability")
    assert load_grid("stability").title == "A tiny study"


@pytest.mark.parametrize(
    ("name", "written", "text"),
    [
        ("stabilty", None, "grid='stabilty' is not known; did you mean 'stability'"),
        ("no.yaml", None, "grid='no.yaml' is no file"),
        ("bad.yaml", "a: [", ".*bad.yaml is not readable YAML"),
        ("list.yaml", "- a", "list.yaml contains a list but must contain a mapping"),
    ],
)
def test_a_file_that_is_no_grid_is_refused(
    name: str, written: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if written is not None:
        Path(name).write_text(written, encoding="utf-8")
    with pytest.raises(ConfigError, match=text):
        load_grid(name)


@pytest.mark.parametrize("name", bundled_grids())
def test_a_bundled_grid_is_legal_and_has_one_pass_beside_its_loops(name: str) -> None:
    grid = load_grid(name)
    assert grid.title != name
    assert {cell.axes["loops"] for cell in grid.cells} > {1}
    seeds = {cell.axes["seed"] for cell in grid.cells}
    assert {cell.axes["seed"] for cell in grid.cells if cell.axes["loops"] == 1} == seeds


def test_the_default_grid_is_every_flt_system_and_ours_at_every_t_and_three_seeds() -> None:
    grid = load_grid("stability")
    looped = [cell.axes for cell in grid.cells if cell.axes["loops"] != 1]
    assert {axes["system"] for axes in looped} == {"lt", "lt-input", "lt-query", "flt-residual", "flt", "lt-balanced"}
    assert {axes["loops"] for axes in looped} == {3, 6, 9, 12}
    assert len(grid.cells) == 6 * 4 * 3 + 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": [{"training.seed": list(range(100)), "model.num_loops": list(range(1, 101)), "training.steps": [1, 2]}]},
         "grid 'tiny' has 20,000 cells, more than the 4,096"),
        ({"blocks": [{"training.seed": list(range(2000))}, {"training.seed": list(range(3000))}]}, "has 5,000 cells"),
        ({"blocks": [{"model.num_loops": [2, 3], "system": {"deep": {"model.num_loops": 4}}}]},
         "the axes model.num_loops and system both set model.num_loops"),
        ({"base": {"training": {"steps": 3}, "training.steps": 4}}, "training.steps is given twice, as training.steps=3 and 4"),
        ({"blocks": [{"a": {"one": {"model.num_loops": 2, "model": {"num_loops": 3}}}}]}, "model.num_loops is given twice"),
        ({"blocks": [{"model.short_weight": [0.5]}]}, "cell model.short_weight=0.5: model.short_weight=0.5 has no effect"),
        ({"blocks": [{"evaluation.budgets": [[10**6]]}]}, "evaluation.budgets=1000000 must be at most"),
    ],
)  # fmt: skip
def test_a_grid_that_is_too_large_or_contradicts_itself_is_refused(
    content: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        ids({**content, **change})


def test_seeds_in_the_place_of_the_files_count_as_cells(content: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has 8,000 cells"):
        ids(content, seeds=list(range(4000)))
    with pytest.raises(ConfigError, match="seeds=4294967296 must be"):
        ids(content, seeds=[2**32])


def test_a_grid_file_is_read_as_a_recipe_is(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    blocks = "blocks:\n  - model.preset: [flt]\n    optimizer.matrix_lr: [1e-2, 3.0e-2]\n"
    blocks += "    on:\n      no:\n        evaluation.budgets: 1,2\n"
    path.write_text(yaml.safe_dump({"base": content["base"]}) + blocks, encoding="utf-8")
    first, second = load_grid(path).cells
    assert first.axes == {"system": "flt", "loops": 2, "seed": 0, "optimizer.matrix_lr": 0.01, "on": "no"}
    assert second.recipe.evaluation.budgets == (1, 2)
    path.write_text(path.read_text() + "blocks: []\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has the key 'blocks' twice"):
        load_grid(path)
