from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopformers.errors import ConfigError
from loopformers.training.engine import EngineSettings
from loopformers.training.step_log import StepLog
from tests.training.test_trainer import assert_same_weights, make_dataset, make_model, make_trainer, records


def trained(folder: Path, preset: str, engine: EngineSettings, **options: Any) -> torch.nn.Module:
    model = make_model(preset).double()
    make_trainer(folder, model, engine=engine, arguments={"num_steps": 3}, **options).train()
    return model


@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
def test_settings_of_memory_change_no_update(tmp_path: Path, preset: str) -> None:
    plain = trained(tmp_path / "plain", preset, EngineSettings())
    spare = EngineSettings(loss_chunk_tokens=5, activation_checkpointing=True, num_kept_loops=1)
    thrifty = trained(tmp_path / "thrifty", preset, spare)
    assert thrifty.loss_chunk_tokens == 5
    assert thrifty.model.num_kept_loops == 1
    assert thrifty.model.gradient_checkpointing
    for (name, ours), theirs in zip(thrifty.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    for ours, theirs in zip(records(tmp_path / "thrifty"), records(tmp_path / "plain"), strict=True):
        for field in ("loss", "gradient_norm", "loop_gradient_norms", "residual_norms", "state_cosines"):
            assert ours[field] == pytest.approx(theirs[field], rel=1e-5, abs=1e-12), field


def test_accumulated_microbatches_equal_one_batch_under_every_setting_of_memory(tmp_path: Path) -> None:
    dataset = make_dataset(6)
    for i, window in enumerate(dataset):
        window["labels"] = window["labels"].clone()
        window["labels"][: 2 * i] = -100
    spare = EngineSettings(loss_chunk_tokens=7, activation_checkpointing=True)
    for name, batch_size, accumulation in (("whole", 6, 1), ("parts", 2, 3)):
        arguments = {"num_steps": 2, "batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        model = make_model("flt-residual").double()
        make_trainer(tmp_path / name, model, engine=spare, train_dataset=dataset, arguments=arguments).train()
    for whole, parts in zip(records(tmp_path / "whole"), records(tmp_path / "parts"), strict=True):
        for field in ("loss", "gradient_norm", "loop_gradient_norms", "residual_norms", "state_cosines"):
            assert parts[field] == pytest.approx(whole[field], rel=1e-6), field  # loops are watched in float32
        for field in ("loss_parts", "layer_gradient_norms"):
            assert parts[field] == pytest.approx(whole[field], rel=1e-8), field


def test_watching_loops_changes_no_bit(tmp_path: Path) -> None:
    models = []
    for name, watched in (("watched", True), ("blind", False)):
        models.append(make_model("elastic-flt"))
        make_trainer(tmp_path / name, models[-1], engine=EngineSettings(diagnostics=watched)).train()
    assert_same_weights(*models)
    assert records(tmp_path / "watched")[-1]["residual_norms"]
    blind = records(tmp_path / "blind")[-1]
    assert blind["residual_norms"] == blind["state_cosines"] == []
    assert "verdict" not in blind


def test_gradients_may_flow_through_the_last_loops_alone(tmp_path: Path) -> None:
    make_trainer(tmp_path, make_model("lt-input"), engine=EngineSettings(num_grad_loops=1)).train()
    assert all(r["loop_gradient_norms"][:2] == [0.0, 0.0] for r in records(tmp_path))
    assert all(r["loop_gradient_norms"][2] > 0 for r in records(tmp_path))


def test_bfloat16_autocast_keeps_weights_and_diagnostics_in_float32(tmp_path: Path) -> None:
    model = make_model("elastic-flt")
    seen = set()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    make_trainer(tmp_path / "bf16", model, arguments={"num_steps": 2, "bf16": True}).train()
    make_trainer(tmp_path / "fp32", make_model("elastic-flt"), arguments={"num_steps": 2}).train()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for ours, theirs in zip(records(tmp_path / "bf16"), records(tmp_path / "fp32"), strict=True):
        for field in ("loss", "gradient_norm", "residual_norms"):
            assert ours[field] == pytest.approx(theirs[field], rel=3e-2), field


def test_an_update_that_is_not_finite_may_be_left_out_and_is_counted(tmp_path: Path) -> None:
    model = make_model("flt")
    state: dict[str, Any] = {"calls": 0}

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        if state["calls"] == 3:
            state["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        if state["calls"] == 4:
            state["after"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        return output * float("nan") if state["calls"] == 3 else output

    model.lm_head.register_forward_hook(poison)
    trainer = make_trainer(tmp_path, model, engine=EngineSettings(skip_non_finite=True))
    trainer.train()
    assert all(torch.equal(value, state["after"][name]) for name, value in state["before"].items())
    log = records(tmp_path)
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    assert [record["skipped_steps"] for record in log] == [0, 0, 1, 1, 1, 1]
    assert log[2]["loss"] is None
    assert log[2]["gradient_norm"] is None
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_every_update_has_its_time_in_a_log_beside(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    speeds = StepLog(tmp_path / "speed.jsonl").read()
    assert [speed["step"] for speed in speeds] == [1, 2, 3, 4, 5, 6]
    for speed in speeds:
        assert speed["seconds"] > 0
        assert speed["tokens_per_second"] > 0
        assert speed["mfu"] > 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens=0"),
        ({"num_grad_loops": True}, "num_grad_loops=True"),
        ({"activation_checkpointing": True, "num_kept_loops": -1}, "num_kept_loops=-1"),
        ({"num_kept_loops": 2}, "without activation_checkpointing"),
    ],
)
def test_illegal_settings_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineSettings(**fields)


def test_sharding_needs_several_processes() -> None:
    with pytest.raises(ConfigError, match="launch with torchrun"):
        EngineSettings(shard=True).apply(make_model())
