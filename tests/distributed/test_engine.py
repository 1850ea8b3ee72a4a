"""Two gloo processes through LoopTrainer: copies or shards, they train as one process does (faults 9, 10 and 28)."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from loopformers import LoopedForCausalLM
from loopformers.errors import NonFiniteError
from loopformers.laws import Curriculum, Fixed, PoissonLogNormal, ShortTrajectory, UniformRange
from loopformers.testing.distributed import run_distributed
from loopformers.training.engine import EngineSettings
from loopformers.training.lr_schedules import ConstantThenLinear
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW
from loopformers.training.sharding import SHARDED, export_sharded
from loopformers.training.step_log import StepLog
from loopformers.training.trainer import LoopTrainer, training_arguments
from tests.training.test_trainer import make_dataset, make_model

pytestmark = pytest.mark.distributed

multiprocessing.set_forkserver_preload(["tests.training.test_trainer"])

STEPS = 4
WINDOWS = 8


def masked_dataset() -> list[dict[str, torch.Tensor]]:
    """Windows whose numbers of targets differ much, so that a mean of means would show."""
    dataset = make_dataset(16)
    for i, window in enumerate(dataset):
        window["labels"] = window["labels"].clone()
        window["labels"][: (5 * i) % 12] = -100
    return dataset


def train(
    folder: Path | str,
    ranks: int,
    preset: str,
    *,
    steps: int = STEPS,
    resume: bool = False,
    seed: int = 0,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train on all ranks the same global batch in two microbatches, and return the whole weights."""
    model = make_model(preset, seed=seed, loop_seed=7, **options.pop("fields", {})).double()
    arguments = training_arguments(
        folder, num_steps=steps, batch_size=WINDOWS // 2 // ranks, seed=3, gradient_accumulation_steps=2,
        max_grad_norm=0.05, save_steps=2, average_tokens_across_devices=True,
    )  # fmt: skip
    # Signs of rounding errors move no weight: Muon and a tiny epsilon would make big differences of small ones.
    optimizer = options.pop("optimizer_settings", DecayedAdamW(lr=1e-3))
    constant = ConstantThenLinear(decay_fraction=0.0)
    trainer = LoopTrainer(
        model, arguments, masked_dataset(), optimizer_settings=optimizer, lr_schedule=constant, **options
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.data for name, p in model.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **(tolerance or {"rtol": 1e-8, "atol": 1e-10}), msg=name)


# -- laws and depth ---------------------------------------------------------------------------------------------


LAWS = [
    Fixed(3), UniformRange(1, 9), PoissonLogNormal(4.0), Curriculum(1, 6, 100), ShortTrajectory(8),
    ShortTrajectory(8, "uniform"), ShortTrajectory(8, passes_only=True),
]  # fmt: skip


def draws(rank: int) -> list[list[str]]:
    torch.manual_seed(rank)  # whatever else a rank has drawn
    return [[str(law.plan(seed=5, step=step, microbatch=m)) for step in range(200) for m in range(2)] for law in LAWS]


def test_every_law_draws_alike_on_both_ranks_for_200_steps(tmp_path: Path) -> None:
    first, second = run_distributed(draws, folder=tmp_path, start_method="forkserver")
    assert first == second
    assert all(len(set(plans)) > 1 for plans in first[1:])


# -- copies -----------------------------------------------------------------------------------------------------


def train_copies(rank: int, folder: str) -> dict[str, Any]:
    return {
        preset: train(f"{folder}/{preset}", 2, preset, law=UniformRange(1, 5) if preset == "flt" else None)
        for preset in ("flt", "elastic-flt")
    }


def test_two_ranks_train_as_one_though_masks_are_uneven_and_depth_varies(tmp_path: Path) -> None:
    """Clipping is at 0.05, far below the norm: clipped before the reduction the weights would differ."""
    ranks = run_distributed(train_copies, str(tmp_path), folder=tmp_path, start_method="forkserver")
    for preset in ("flt", "elastic-flt"):
        law = UniformRange(1, 5) if preset == "flt" else None
        alone = train(tmp_path / "alone" / preset, 1, preset, law=law)
        for rank in ranks:
            assert_close(rank[preset], alone)
        ours, theirs = (StepLog(tmp_path / path / "metrics.jsonl").read() for path in (preset, f"alone/{preset}"))
        assert ours[0]["gradient_norm"] > 0.2
        for a, b in zip(ours, theirs, strict=True):
            for name in ("loss", "gradient_norm", "residual_norms", "loop_gradient_norms", "state_cosines"):
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-9), name
            for name in ("loss_parts", "layer_gradient_norms"):
                assert a[name] == pytest.approx(b[name], rel=1e-5), name
            assert a["tokens_seen"] == b["tokens_seen"]
            # Each rank makes the modulation for itself.
            assert a["flops"] == b["flops"] if preset == "flt" else a["flops"] > b["flops"]
        assert (len({len(record["residual_norms"]) for record in ours}) > 1) == (preset == "flt")


# -- shards -----------------------------------------------------------------------------------------------------

SHARD = EngineSettings(shard=True, activation_checkpointing=True, num_kept_loops=1, loss_chunk_tokens=5)


def train_shards(rank: int, folder: str) -> dict[str, Any]:
    runs = {
        "flt": train(f"{folder}/flt", 2, "flt", engine=SHARD, law=UniformRange(1, 5)),
        "elastic-flt": train(f"{folder}/elastic-flt", 2, "elastic-flt", engine=SHARD),
        "loopformer": train(f"{folder}/loopformer", 2, "loopformer", engine=EngineSettings(shard=True)),
        "muon": train(f"{folder}/muon", 2, "flt", engine=SHARD, steps=1, optimizer_settings=MuonAdamW()),
        "cut": train(f"{folder}/cut", 2, "elastic-flt", engine=SHARD, steps=2),
    }
    runs["resumed"] = train(f"{folder}/cut", 2, "elastic-flt", engine=SHARD, seed=9, resume=True)
    return runs


def test_shards_train_as_one_process_resume_to_the_bit_and_reshard(tmp_path: Path) -> None:
    """Also with shortcut consistency, where layers run many times, recomputed loops and a loss in chunks."""
    first, second = run_distributed(train_shards, str(tmp_path), folder=tmp_path, start_method="forkserver")
    for name in first:
        assert_close(first[name], second[name], rtol=0, atol=0)
    assert_close(first["flt"], train(tmp_path / "a", 1, "flt", law=UniformRange(1, 5)))
    assert_close(first["elastic-flt"], train(tmp_path / "b", 1, "elastic-flt"))
    assert_close(first["loopformer"], train(tmp_path / "c", 1, "loopformer"))
    assert_close(
        first["muon"], train(tmp_path / "d", 1, "flt", steps=1, optimizer_settings=MuonAdamW()), rtol=1e-4, atol=1e-5
    )
    assert_close(first["resumed"], first["elastic-flt"], rtol=0, atol=0)

    records = StepLog(tmp_path / "flt" / "metrics.jsonl").read()
    alone = StepLog(tmp_path / "a" / "metrics.jsonl").read()
    for ours, theirs in zip(records, alone, strict=True):
        assert ours["layer_gradient_norms"] == pytest.approx(theirs["layer_gradient_norms"], rel=1e-5)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-5)

    checkpoint = tmp_path / "elastic-flt" / f"checkpoint-{STEPS}"
    assert (checkpoint / SHARDED).is_dir()
    exported = export_sharded(checkpoint, tmp_path / "exported")
    loaded = LoopedForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert_close(dict(exported.named_parameters()), first["elastic-flt"])
    assert_close(dict(loaded.named_parameters()), first["elastic-flt"])
    final = load_file(tmp_path / "elastic-flt" / "final" / "model.safetensors")
    assert_close(final, first["elastic-flt"])

    one = train(tmp_path / "elastic-flt", 1, "elastic-flt", steps=STEPS + 2, seed=9, resume=True)
    assert_close(one, train(tmp_path / "e", 1, "elastic-flt", steps=STEPS + 2))


# -- numbers that are not finite ----------------------------------------------------------------------------------


class PoisonRank(TrainerCallback):
    """Makes one rank's loss no number from a step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            model = getattr(kwargs["model"], "module", kwargs["model"])
            model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))


def diverge(rank: int, folder: str) -> dict[str, Any]:
    with pytest.raises(NonFiniteError) as error:
        train(folder, 2, "flt", callbacks=[PoisonRank()])
    return {"text": str(error.value)}


def test_all_ranks_stop_before_an_update_that_one_rank_spoils(tmp_path: Path) -> None:
    ranks = run_distributed(diverge, str(tmp_path / "run"), folder=tmp_path, start_method="forkserver")
    assert ranks[0]["text"] == ranks[1]["text"]
    assert "step 3: loss=nan on rank 1," in ranks[0]["text"]
    assert [record["step"] for record in StepLog(tmp_path / "run" / "metrics.jsonl").read()] == [1, 2]
