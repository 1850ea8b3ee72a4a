from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loopformers import LoopedForCausalLM, __version__
from loopformers.errors import CheckpointError, ConfigError, DataError, LoopformersError
from loopformers.folders import owned
from loopformers.laws import PoissonLogNormal, ShortTrajectory
from loopformers.testing.distributed import run_distributed
from loopformers.training.recipe import Recipe
from loopformers.training.recipe_file import load
from loopformers.training.run import prepare
from loopformers.training.run_folder import read_result, versions
from loopformers.training.step_log import StepLog
from tests.children import KILLED, REFUSED, killed_at_rename, start_elsewhere


def change(recipe: Recipe, section: str, **fields: Any) -> Recipe:
    if section == "model":
        model = recipe.model
        preset = fields.pop("preset", model.preset)
        return dataclasses.replace(
            recipe, model=dataclasses.replace(model, preset=preset, overrides={**model.overrides, **fields})
        )
    return dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **fields)})


def folder_of(recipe: Recipe) -> Path:
    return Path(recipe.training.output_dir)


def records(recipe: Recipe, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return StepLog(folder_of(recipe) / name).read()


def test_a_run_leaves_a_model_its_recipe_and_what_ran_it(recipe: Recipe) -> None:
    seen: list[int] = []
    verdicts: list[tuple[int, str]] = []
    run = prepare(recipe)
    assert not folder_of(recipe).exists(), "preparing writes nothing"
    result = run.train(
        on_progress=lambda progress: seen.append(progress.step),
        on_validation=lambda step, score, stability: verdicts.append((step, stability.verdict)),
    )
    folder = folder_of(recipe)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in verdicts] == [4, 7]
    assert [record["step"] for record in records(recipe, "validation.jsonl")] == [4, 7]
    assert (result.steps, result.tokens_seen) == (7, 7 * 4 * 17)
    assert [score["num_loops"] for score in result.budgets] == [3, 1, 4]
    assert result.loss == result.budgets[0]["loss"] < math.log(2048)
    assert result.num_parameters == LoopedForCausalLM.from_pretrained(folder).num_parameters()
    for place in (folder, folder / "checkpoint-6", folder / "checkpoint-7"):
        assert load(place / "recipe.yaml") == run.recipe
        assert json.loads((place / "versions.json").read_text())["loopformers"] == __version__
        assert (place / "tokenizer.json").exists()
    assert not (folder / "checkpoint-3").exists()
    assert not list(folder.rglob("*.partial"))
    assert run.recipe.model.overrides["vocab_size"] == 2048
    assert run.recipe.model.overrides["max_position_embeddings"] == 17
    assert prepare(recipe).train(on_progress=lambda progress: pytest.fail("trained again")) == result


@pytest.mark.parametrize(
    ("preset", "law"), [("flt", PoissonLogNormal(3, max_loops=7)), ("loopformer", ShortTrajectory(4, "uniform"))]
)
def test_a_stopped_run_continues_to_the_same_bits(recipe: Recipe, preset: str, law: Any, tmp_path: Path) -> None:
    recipe = dataclasses.replace(change(recipe, "model", preset=preset), law=law)
    recipe = change(recipe, "training", gradient_accumulation=2)
    cut = change(recipe, "training", output_dir=str(tmp_path / "cut"))
    whole = prepare(recipe).train()
    stops = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3; a checkpoint was saved"):
        prepare(cut).train(stop_requested=lambda: next(stops))
    assert prepare(cut).finished() is None
    assert prepare(cut).train() == whole
    a, b = (load_file(folder_of(r) / "model.safetensors") for r in (recipe, cut))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert records(recipe) == records(cut)
    assert records(recipe, "validation.jsonl") == records(cut, "validation.jsonl")


def test_memory_savers_change_no_number(recipe: Recipe, tmp_path: Path) -> None:
    recipe = change(recipe, "training", steps=3)
    saving = change(
        recipe,
        "training",
        activation_checkpointing=True,
        kept_loops=1,
        loss_chunk_tokens=11,
        output_dir=str(tmp_path / "saving"),
    )
    assert prepare(recipe).train().loss == pytest.approx(prepare(saving).train().loss, rel=1e-6)
    for one, other in zip(records(recipe), records(saving), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)


def test_bfloat16_trains_near_float32(recipe: Recipe, tmp_path: Path) -> None:
    recipe = change(recipe, "training", steps=2)
    half = change(recipe, "training", precision="bfloat16", output_dir=str(tmp_path / "half"))
    exact, rounded = prepare(recipe).train().loss, prepare(half).train().loss
    assert rounded == pytest.approx(exact, abs=0.05)
    assert rounded != exact
    assert all(tensor.dtype == torch.float32 for tensor in load_file(folder_of(half) / "model.safetensors").values())


def test_several_sources_are_read_together(recipe: Recipe, texts: Path) -> None:
    both = prepare(recipe).train_windows.num_tokens
    files = tuple(str(texts / name) for name in ("one.txt", "two.txt"))
    assert prepare(change(recipe, "data", sources=files)).train_windows.num_tokens == both


def test_tensorboard_gets_a_file(recipe: Recipe) -> None:
    prepare(change(recipe, "training", steps=2, report_to=("tensorboard",), log_interval=1)).train()
    assert list(folder_of(recipe).rglob("events.out.tfevents.*"))


# -- refused before anything starts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "fields", "error", "text"),
    [
        ("data", {"sources": ("nowhere.txt",)}, DataError, "no file or folder at 'nowhere.txt'"),
        ("data", {"seq_len": 99_999}, DataError, "seq_len=99999 is longer than the data"),
        (
            "data",
            {"tokenizer": "no-such-tokenizer"},
            DataError,
            "data.tokenizer='no-such-tokenizer' could not be loaded",
        ),
        ("data", {"split_by": "document", "split_seed": 0}, DataError, "split is empty"),
        ("training", {"batch_size": 4000}, DataError, "training.batch_size=4000 is more than the"),
        ("training", {"batch_size": 5, "gradient_accumulation": 2}, ConfigError, "the nearest that does is 4"),
        (
            "training",
            {"report_to": ("tensorbord",)},
            ConfigError,
            "training.report_to='tensorbord' is not known; did you mean",
        ),
        ("model", {"preset": "ftl"}, ConfigError, "preset='ftl' is not known; did you mean 'flt'?"),
        ("model", {"vocab_size": 97}, ConfigError, "model.vocab_size=97 is smaller than the tokenizer's 2048 entries"),
        ("model", {"preset": "lt", "num_attention_heads": 5}, ConfigError, "does not split into num_attention_heads=5"),
        (
            "model",
            {"preset": "tmlt", "max_position_embeddings": 16},
            ConfigError,
            "data.seq_len=17 is beyond model.max_position_embeddings=16",
        ),
        ("evaluation", {"budgets": ("2/3,1/3",)}, ConfigError, "does not know step sizes"),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_is_written(
    recipe: Recipe, section: str, fields: dict[str, Any], error: type[LoopformersError], text: str
) -> None:
    with pytest.raises(error) as raised:
        prepare(change(recipe, section, **fields))
    assert text in str(raised.value)
    assert not folder_of(recipe).exists()


def test_an_empty_corpus_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match="contains no text"):
        prepare(change(recipe, "data", sources=(str(tmp_path / "empty"),)))


def test_a_folder_of_another_run_is_refused_with_what_differs(recipe: Recipe) -> None:
    prepare(change(recipe, "training", steps=1)).train()
    with pytest.raises(ConfigError, match=r"holds another run: training\.steps=7 \(there: 1\), training\.seed=4"):
        prepare(change(recipe, "training", seed=4))
    moved = change(recipe, "training", steps=1, log_interval=3, checkpoints_kept=5)
    assert prepare(moved).finished() is not None


def test_a_folder_with_other_files_is_refused(recipe: Recipe) -> None:
    folder_of(recipe).mkdir()
    (folder_of(recipe) / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="contains files of something other than a training run"):
        prepare(recipe)


def test_a_file_in_place_of_a_folder_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        prepare(recipe)
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        prepare(change(recipe, "training", output_dir=str(tmp_path / "run" / "below")))


def test_an_unwritable_folder_is_refused(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere.
    monkeypatch.setattr("loopformers.training.run_folder.os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written: no permission"):
        prepare(recipe)


def test_versions_name_the_commit_of_the_working_folder_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = versions()
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert (found["git_commit"], found["git_changes"]) == (None, None)


# -- several processes --------------------------------------------------------------------------------------------


def train_divided(rank: int, recipe: Recipe) -> float:
    return prepare(recipe).train().loss


@pytest.mark.distributed
def test_a_model_divided_over_two_processes_trains_as_one(recipe: Recipe, tmp_path: Path) -> None:
    recipe = change(recipe, "training", steps=2)
    shared = change(recipe, "training", shard=True, output_dir=str(tmp_path / "shared"))
    losses = run_distributed(train_divided, shared, folder=tmp_path)
    assert losses[0] == losses[1] == pytest.approx(prepare(recipe).train().loss, rel=1e-4)
    assert (folder_of(shared) / "checkpoint-2" / "sharded").is_dir()
    model = LoopedForCausalLM.from_pretrained(folder_of(shared))
    assert model.num_parameters() == LoopedForCausalLM.from_pretrained(folder_of(recipe)).num_parameters()
    with pytest.raises(ConfigError, match="this is the only one; start several with torchrun"):
        prepare(change(shared, "training", output_dir=str(tmp_path / "alone")))


# -- a run owns its folder ----------------------------------------------------------------------------------------


def test_a_second_start_is_refused_at_once_and_changes_nothing(recipe: Recipe) -> None:
    refused: list[int] = []

    def start_again(progress: Any) -> None:
        if progress.step != 2:
            return
        refused.append(start_elsewhere(lambda: prepare(recipe)))

    prepare(recipe).train(on_progress=start_again)
    assert refused == [REFUSED]
    assert [record["step"] for record in records(recipe)] == [1, 2, 3, 4, 5, 6, 7]
    assert not list(folder_of(recipe).glob(".*")), "the lock goes with its owner"


@pytest.mark.parametrize("kill", [1, 2, 3])
def test_a_claim_that_is_killed_blocks_neither_the_run_nor_another_recipe(recipe: Recipe, kill: int) -> None:
    """At the rename of each file of the claim: the recipe, the versions and the text's fingerprints."""
    run = prepare(recipe)

    def claim() -> None:
        with owned(run.folder):
            run._claim()

    assert killed_at_rename(kill, claim) == KILLED
    assert len(list(folder_of(recipe).glob(".*.partial"))) == 1
    other = change(recipe, "training", steps=1, seed=11)
    prepare(other).train()
    assert load(folder_of(recipe) / "recipe.yaml").training.seed == 11
    assert not list(folder_of(recipe).glob(".*"))


def test_a_start_that_fails_after_the_claim_does_not_block_the_corrected_command(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(config: Any, recipe: Recipe) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("loopformers.training.run.build_model", out_of_memory)
        with pytest.raises(MemoryError):
            prepare(recipe).train()
    assert (folder_of(recipe) / "recipe.yaml").exists()
    assert prepare(change(recipe, "training", steps=1)).train().steps == 1
    with pytest.raises(ConfigError, match=r"holds another run: training\.steps=7 \(there: 1\)"):
        prepare(recipe)


def test_a_run_whose_text_has_changed_is_not_continued(recipe: Recipe, texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts, tmp_path / "mine")
    (tmp_path / "other.txt").write_text("Another text, of which nothing changes.\n" * 99)
    recipe = change(recipe, "data", sources=(str(tmp_path / "mine"), str(tmp_path / "other.txt")))
    stops = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        prepare(recipe).train(stop_requested=lambda: next(stops))
    file = tmp_path / "mine" / "one.txt"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"calm", b"flat", 1))
    said = r"the text of data.sources=\['.*/mine'\] has changed since the run in .* began \(fingerprint"
    with pytest.raises(ConfigError, match=said):
        prepare(recipe)
    (folder_of(recipe) / "corpus.json").unlink()
    with pytest.raises(ConfigError, match=said):
        prepare(recipe)  # the checkpoint holds it, too
    file.write_bytes(before)
    assert prepare(recipe).train().steps == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not readable JSON"),
        ("{", "is not readable JSON"),
        ("[]", "contains a value of type list but must contain an object"),
        ("{}", "lacks the field 'fingerprint'"),
        ('{"colour": 1}', "has a field 'colour' that this version of loopformers does not know"),
    ],
)
def test_a_damaged_result_is_refused_and_can_be_made_anew(recipe: Recipe, text: str, said: str) -> None:
    folder = folder_of(recipe)
    folder.mkdir()
    (folder / "result.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"result.json.*{said}.*remove it and run the same command again"):
        read_result(folder)


def test_a_result_rests_on_every_record(recipe: Recipe) -> None:
    run = prepare(change(recipe, "training", steps=3))

    def lose_a_record(progress: Any) -> None:
        if progress.step == 3:
            file = folder_of(recipe) / "metrics.jsonl"
            file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))

    with pytest.raises(CheckpointError, match="holds 2 records of a run of 3 updates: some were removed"):
        run.train(on_progress=lose_a_record)
    assert run.finished() is None


def test_tensorboard_continues_the_record_of_an_interrupted_run(recipe: Recipe) -> None:
    recipe = change(recipe, "training", report_to=("tensorboard",), log_interval=1, checkpoint_interval=2)
    with pytest.raises(ZeroDivisionError):
        prepare(recipe).train(on_progress=lambda progress: 1 / (progress.step - 6))  # type: ignore[arg-type, return-value]
    prepare(recipe).train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder_of(recipe) / "tensorboard"), purge_orphaned_data=True).Reload()
    # The summary at the end of training repeats the last update.
    assert [event.step for event in events.Scalars("train/gradient_norm")] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert not (folder_of(recipe) / "runs").exists()
