from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from loopformers.laws import UniformRange
from loopformers.training import step_record
from loopformers.training.optimizers import DecayedAdamW
from loopformers.training.progress import TrainingProgress
from tests.training.test_trainer import make_dataset, make_model, make_trainer, records

DIM = 24


def test_a_record_has_the_fields_that_the_module_describes(tmp_path: Path) -> None:
    make_trainer(tmp_path, make_model("elastic-flt")).train()
    table = step_record.__doc__.split("\n\n")[2]
    columns = [line.strip().split("  ")[0] for line in table.splitlines() if line[4:5].strip()]
    described = {name.strip() for column in columns for name in column.split(",")}
    assert set(records(tmp_path)[-1]) == described


def test_loops_are_measured_as_by_hand(tmp_path: Path) -> None:
    """Peer-faults 15: hooks are set in the forward pass, norms are taken before clipping."""
    model, dataset = make_model("flt", seed=4), make_dataset(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids = torch.stack([window["input_ids"] for window in dataset])
    twin = make_model("flt")
    twin.load_state_dict(model.state_dict())
    residuals: list[torch.Tensor] = []
    twin.train().model.norm.register_forward_pre_hook(lambda module, inputs: residuals.append(inputs[0]))
    output = twin(ids, labels=ids, output_loop_states=True)
    for residual in residuals:
        residual.retain_grad()
    output.loss.backward()

    arguments = {"num_steps": 1, "batch_size": 3, "max_grad_norm": 1e-3}
    make_trainer(tmp_path, model, train_dataset=dataset, arguments=arguments).train()
    record = records(tmp_path)[0]
    norms = [float(residual.detach().norm(dim=-1).mean()) for residual in residuals]
    assert record["residual_norms"] == pytest.approx(norms, rel=1e-5)
    assert record["residual_norms_per_sqrt_dim"] == pytest.approx([n / math.sqrt(DIM) for n in norms], rel=1e-5)
    assert record["loop_gradient_norms"] == pytest.approx([float(r.grad.norm()) for r in residuals], rel=1e-4)
    states = output.loop_states
    cosines = [float(torch.cosine_similarity(a, b, dim=-1).detach().mean()) for a, b in itertools.pairwise(states)]
    assert record["state_cosines"] == pytest.approx(cosines, abs=1e-5)
    squares = [norm**2 for norm in record["layer_gradient_norms"].values()]
    assert record["gradient_norm"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    assert set(record["layer_gradient_norms"]) == {"embed_tokens", "layers.0", "layers.1", "lm_head"}


def test_a_collapse_is_called_with_its_reason_and_the_update_since_which_it_holds(tmp_path: Path) -> None:
    """Random tokens: nothing is below the unigram level, ln 29."""
    seen: list[TrainingProgress] = []
    trainer = make_trainer(
        tmp_path,
        arguments={"num_steps": 60},
        optimizer_settings=DecayedAdamW(lr=0.0),
        unigram_loss=math.log(29),
        on_progress=seen.append,
    )
    trainer.train()
    log = records(tmp_path)
    assert log[8]["verdict"] is None
    assert log[-1]["verdict"] == "collapsed"
    assert log[-1]["verdict_since"] == 50
    assert "unigram level 3.367" in log[-1]["verdict_reason"]
    assert trainer.stability is not None
    assert (trainer.stability.verdict, trainer.stability.since_step) == ("collapsed", 50)
    assert [p.verdict for p in seen] == [record["verdict"] for record in log]
    assert seen[-1].verdict_reason == log[-1]["verdict_reason"]
    assert seen[-1].seconds_left == 0
    assert all(p.tokens_per_second > 0 and p.mfu > 0 and p.seconds_left >= 0 for p in seen)


def test_swings_are_measured_over_a_window_and_spikes_counted(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    norms = [record["gradient_norm"] for record in records(tmp_path)]
    last = records(tmp_path)[-1]["oscillation"]
    logs = [math.log(norm) for norm in norms]
    mean = sum(logs) / len(logs)
    assert last["log_std"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs)))
    changes = [abs(b - a) / a for a, b in itertools.pairwise(norms)]
    assert last["mean_relative_change"] == pytest.approx(sum(changes) / len(changes))
    assert last["num_spikes"] == 0


def test_tensorboard_gets_numbers_of_every_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    arguments = {"report_to": ["tensorboard"], "logging_strategy": "steps", "logging_steps": 2}
    make_trainer(tmp_path / "run", arguments=arguments, law=UniformRange(2, 4)).train()
    (events,) = (path.parent for path in (tmp_path / "board").rglob("events.out.tfevents.*"))
    board = EventAccumulator(str(events)).Reload()
    tags = set(board.Tags()["scalars"])
    expected = {
        "residual_norms/loop_1", "residual_norms_per_sqrt_dim/loop_2", "loop_gradient_norms/loop_2", "state_cosines/loop_2",
        "layer_gradient_norms/layers.1", "loss_parts/cross_entropy", "oscillation/log_std", "speed/tokens_per_second",
        "speed/mfu", "gradient_norm", "skipped_steps",
    }  # fmt: skip
    assert {f"train/{name}" for name in expected} <= tags
    norms = {event.step: event.value for event in board.Scalars("train/residual_norms/loop_1")}
    log = {record["step"]: record for record in records(tmp_path / "run")}
    assert norms[4] == pytest.approx(log[4]["residual_norms"][0], rel=1e-6)
