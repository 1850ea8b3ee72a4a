from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.errors import CheckpointError, ConfigError, NonFiniteError
from loopformers.laws import Curriculum, PoissonLogNormal, ShortTrajectory, UniformRange
from loopformers.training.callbacks import BudgetValidationCallback
from loopformers.training.checkpoints import last_complete_checkpoint
from loopformers.training.lr_schedules import WarmupCosine
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW
from loopformers.training.progress import TrainingProgress
from loopformers.training.step_log import StepLog
from loopformers.training.trainer import LoopTrainer, training_arguments
from tests.tokenizer_styles import STYLES

VOCAB, SEQ = 29, 13


def make_model(preset: str = "flt", *, seed: int = 0, **overrides: Any) -> LoopedForCausalLM:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_loops": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    return LoopedForCausalLM(LoopConfig.from_preset(preset, **{**fields, **overrides}))


def make_dataset(num_windows: int = 20, *, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(VOCAB, (num_windows, SEQ), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def make_trainer(folder: Path, model: torch.nn.Module | None = None, **options: Any) -> LoopTrainer:
    arguments = {"num_steps": 6, "batch_size": 3, "seed": 3, **options.pop("arguments", {})}
    dataset = options.pop("train_dataset", None) or make_dataset()
    return LoopTrainer(model or make_model(), training_arguments(folder, **arguments), dataset, **options)


def records(folder: Path) -> list[dict[str, Any]]:
    return StepLog(folder / "metrics.jsonl").read()


class At(TrainerCallback):
    """Runs an action before the update of one step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.action(kwargs["model"])


def interrupt(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def poison_gradient(name: str) -> Any:
    def hook(model: torch.nn.Module) -> None:
        dict(model.named_parameters())[name].register_hook(lambda gradient: gradient * math.nan)

    return hook


# -- what is recorded ---------------------------------------------------------------------------------------------


def test_every_update_is_recorded(tmp_path: Path) -> None:
    model = make_model("elastic-flt")
    make_trainer(tmp_path, model).train()
    log = records(tmp_path)
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens_seen"] for record in log] == [3 * SEQ * step for step in range(1, 7)]
    for record in log:
        assert record["gradient_norm"] > 0
        assert len(record["residual_norms"]) == 3
        assert set(record["learning_rates"]) == {"matrices", "embedding", "head", "other"}
        assert set(record["loss_parts"]) == {"cross_entropy", "short_cross_entropy", "consistency"}
        parts = record["loss_parts"]
        expected = parts["cross_entropy"] + 0.1 * parts["short_cross_entropy"] + 0.1 * parts["consistency"]
        assert record["loss"] == pytest.approx(expected, rel=1e-5)
    assert log[0]["loss_parts"]["cross_entropy"] == pytest.approx(math.log(VOCAB), rel=0.05)


def test_learning_rates_are_those_of_the_update(tmp_path: Path) -> None:
    make_trainer(tmp_path, optimizer_settings=DecayedAdamW(lr=0.5), lr_schedule=WarmupCosine(warmup_steps=4)).train()
    assert [r["learning_rates"]["matrices"] for r in records(tmp_path)][:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_flops_count_every_loop_and_both_trajectories(tmp_path: Path) -> None:
    """Peer-faults 14."""
    model = make_model("elastic-flt")
    config = model.config
    trainer = make_trainer(tmp_path, model)
    trainer.train()
    total = 0.0
    for step, record in enumerate(records(tmp_path)):
        plan = config.law.plan(seed=config.loop_seed, step=step)
        total += config.training_flops(batch_size=3, seq_len=SEQ, short=plan.short)
        assert record["flops"] == pytest.approx(total)
    assert trainer.state.total_flos == pytest.approx(total)
    assert total > 6 * config.training_flops(batch_size=3, seq_len=SEQ, short=None) * 0.5


def test_gradient_norm_is_taken_before_clipping(tmp_path: Path) -> None:
    """Peer-faults 15: after clipping every spike is hidden."""
    seen = []

    class Norm(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in kwargs["model"].parameters()])))

    options = {"callbacks": [Norm()], "arguments": {"max_grad_norm": 1e-3, "num_steps": 2}}
    make_trainer(tmp_path, **options).train()
    assert seen == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert all(record["gradient_norm"] > 0.01 for record in records(tmp_path))


def test_accumulated_microbatches_equal_one_batch(tmp_path: Path) -> None:
    """Uneven masks must not change the step: sums and counts, not means of means."""
    dataset = make_dataset(6)
    for i, window in enumerate(dataset):
        window["labels"] = window["labels"].clone()
        window["labels"][: 2 * i] = -100
    results = []
    for name, batch_size, accumulation in (("whole", 6, 1), ("parts", 2, 3)):
        model = make_model("flt").double()
        arguments = {"num_steps": 2, "batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        make_trainer(tmp_path / name, model, train_dataset=dataset, arguments=arguments).train()
        results.append((records(tmp_path / name), model))
    for whole, parts in zip(results[0][0], results[1][0], strict=True):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-9)
        assert parts["loss_parts"] == pytest.approx(whole["loss_parts"], rel=1e-9)
        assert parts["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=1e-9)
        assert parts["tokens_seen"] == whole["tokens_seen"]


def test_each_microbatch_draws_its_own_trajectory(tmp_path: Path) -> None:
    model, calls = make_model("elastic-flt"), []
    set_draw = model.set_draw
    model.set_draw = lambda step, microbatch: (calls.append((step, microbatch)), set_draw(step, microbatch))
    make_trainer(tmp_path, model, arguments={"num_steps": 2, "gradient_accumulation_steps": 2}).train()
    # The call after a step's last microbatch is for the next step: (2, 0) is never run.
    assert calls[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_progress_is_reported_after_each_update(tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    make_trainer(tmp_path, on_progress=seen.append).train()
    assert [(p.step, p.num_steps) for p in seen] == [(step, 6) for step in range(1, 7)]
    assert [p.loss for p in seen] == [record["loss"] for record in records(tmp_path)]
    assert [p.gradient_norm for p in seen] == [record["gradient_norm"] for record in records(tmp_path)]


def test_validation_by_budget_leaves_training_as_it_was(tmp_path: Path) -> None:
    plain, watched = make_model("elastic-flt"), make_model("elastic-flt")
    make_trainer(tmp_path / "plain", plain).train()
    log = StepLog(tmp_path / "watched" / "validation.jsonl")
    validation = BudgetValidationCallback(make_dataset(5, seed=1), [1, 3], every_steps=4, log=log, batch_size=2)
    make_trainer(tmp_path / "watched", watched, callbacks=[validation]).train()
    assert [record["step"] for record in log.read()] == [4, 6]
    assert [b["num_loops"] for b in log.read()[0]["budgets"]] == [1, 3]
    assert_same_weights(plain, watched)
    with pytest.raises(ConfigError, match="every_steps=0"):
        BudgetValidationCallback([], [1], every_steps=0, log=log)


# -- stopping and resuming ----------------------------------------------------------------------------------------


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    others = dict(b.named_parameters())
    for name, value in a.named_parameters():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("preset", ["flt", "elastic-flt"])
def test_an_interrupted_run_continues_bit_for_bit(tmp_path: Path, preset: str) -> None:
    """Peer-faults 12. Seven batches an epoch: the run crosses an epoch's end after the interruption."""
    arguments = {"num_steps": 11}
    whole = make_model(preset)
    make_trainer(tmp_path / "whole", whole, arguments=arguments).train()

    first = make_model(preset)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "cut", first, arguments=arguments, callbacks=[At(5, interrupt)]).train()
    checkpoint = last_complete_checkpoint(tmp_path / "cut")
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-5"
    # A crash after the checkpoint: one more record, and a later checkpoint that was cut off.
    StepLog(tmp_path / "cut" / "metrics.jsonl").append({"step": 6, "loss": 0.0})
    (tmp_path / "cut" / "checkpoint-6").mkdir()

    second = make_model(preset, seed=9)
    make_trainer(tmp_path / "cut", second, arguments=arguments).train(resume_from_checkpoint=True)
    assert_same_weights(whole, second)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_resuming_a_finished_run_loads_it_and_makes_no_further_update(tmp_path: Path) -> None:
    first, second = make_model(), make_model(seed=9)
    make_trainer(tmp_path, first).train()
    before = records(tmp_path)
    output = make_trainer(tmp_path, second).train(resume_from_checkpoint="auto")
    assert output.global_step == 6
    assert_same_weights(first, second)
    assert records(tmp_path) == before


def test_a_stop_request_acts_as_ctrl_c(tmp_path: Path) -> None:
    asked = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt, match="after step 3"):
        make_trainer(tmp_path, stop_requested=lambda: next(asked)).train()
    assert len(records(tmp_path)) == 3
    assert last_complete_checkpoint(tmp_path) is not None


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, callbacks=[At(2, lambda model: (interrupt(model), interrupt(model)))]).train()
    assert len(records(tmp_path)) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fresh_start_never_overwrites_a_run(tmp_path: Path) -> None:
    make_trainer(tmp_path, arguments={"num_steps": 1}).train()
    with pytest.raises(ConfigError, match="already contains a run"):
        make_trainer(tmp_path, arguments={"num_steps": 1}).train()


def test_auto_starts_anew_where_no_checkpoint_is_complete(tmp_path: Path) -> None:
    StepLog(tmp_path / "metrics.jsonl").append({"step": 1, "loss": 0.0})
    make_trainer(tmp_path, arguments={"num_steps": 2}).train(resume_from_checkpoint="auto")
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_resuming_without_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(CheckpointError, match="missing or damaged"):
        make_trainer(tmp_path).train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def test_one_kept_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_total_limit=1"):
        make_trainer(tmp_path, arguments={"save_total_limit": 1})
    with pytest.raises(ConfigError, match="num_steps=0"):
        training_arguments(tmp_path, num_steps=0, batch_size=1)


# -- numerical failure --------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = make_model()
    weights = {}

    def poison(target: torch.nn.Module) -> None:
        weights.update({n: p.detach().clone() for n, p in target.named_parameters()})
        poison_gradient(name)(target)

    with pytest.raises(NonFiniteError, match=f"step 3: .*{name}"):
        make_trainer(tmp_path, model, callbacks=[At(3, poison)]).train()
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    model = make_model()

    def poison(target: torch.nn.Module) -> None:
        with torch.no_grad():
            target.lm_head.weight[0, 0] = math.nan

    with pytest.raises(NonFiniteError, match=r"step 2: loss=nan"):
        make_trainer(tmp_path, model, callbacks=[At(2, poison)]).train()
    assert len(records(tmp_path)) == 1


# -- others' trainer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["flt", "loopformer"])
def test_plain_trainer_trains_our_model_unmodified(tmp_path: Path, preset: str) -> None:
    model = make_model(preset)
    dataset = make_dataset(4)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=25, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        lr_scheduler_type="constant",
    )  # fmt: skip
    before = model.eval()(dataset[0]["input_ids"][None], labels=dataset[0]["labels"][None]).loss.item()
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
    after = model.eval()(dataset[0]["input_ids"][None], labels=dataset[0]["labels"][None]).loss.item()
    assert after < before - 0.2


def test_our_trainer_lowers_the_loss_and_saves_a_loadable_model(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(
        tmp_path, model, train_dataset=make_dataset(4), optimizer_settings=MuonAdamW(), arguments={"num_steps": 25}
    )
    trainer.train()
    log = records(tmp_path)
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    loaded = LoopedForCausalLM.from_pretrained(tmp_path / "checkpoint-25")
    assert_same_weights(model, loaded)
    state = json.loads((tmp_path / "checkpoint-25" / "trainer_state.json").read_text())
    assert state["global_step"] == 25


# -- laws ---------------------------------------------------------------------------------------------------------


def drawn_runs(folder: Path, law: Any, preset: str = "flt", **options: Any) -> list[tuple[str, str | None]]:
    """Train, and return the trajectories that each forward was given."""
    model = make_model(preset, loop_seed=5)
    given: list[tuple[str, str | None]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        short = kwargs.get("short_schedule")
        given.append((str(kwargs["schedule"]), None if short is None else str(short)))

    model.register_forward_pre_hook(note, with_kwargs=True)
    arguments = {"gradient_accumulation_steps": 2, "batch_size": 2, **options.pop("arguments", {})}
    trainer = make_trainer(folder, model, law=law, arguments=arguments, **options)
    trainer.train(resume_from_checkpoint="auto")
    return given


@pytest.mark.parametrize(
    ("law", "preset"),
    [(UniformRange(1, 5), "flt"), (ShortTrajectory(4, "uniform"), "loopformer"), (Curriculum(1, 4, 6), "lt")],
)
def test_each_microbatch_runs_the_plan_of_its_seed_step_and_number(law: Any, preset: str, tmp_path: Path) -> None:
    plans = [law.plan(seed=5, step=step, microbatch=micro) for step in range(6) for micro in range(2)]
    expected = [(str(plan.long), None if plan.short is None else str(plan.short)) for plan in plans]
    assert drawn_runs(tmp_path, law, preset) == expected
    assert len(set(expected)) > 3
    for step, record in enumerate(records(tmp_path)):
        deepest = max(plan.long.num_loops for plan in plans[2 * step : 2 * step + 2])
        assert len(record["residual_norms"]) == deepest
    config = make_model(preset).config
    costs = (config.training_flops(batch_size=2, seq_len=SEQ, num_loops=p.long.num_loops, short=p.short) for p in plans)
    assert records(tmp_path)[-1]["flops"] == pytest.approx(sum(costs), rel=1e-12)


def test_a_resumed_run_draws_on_from_where_it_stopped(tmp_path: Path) -> None:
    law = PoissonLogNormal(3, max_loops=9)
    whole = drawn_runs(tmp_path / "whole", law)
    stops = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        drawn_runs(tmp_path / "cut", law, stop_requested=lambda: next(stops))
    assert drawn_runs(tmp_path / "cut", law) == whole[6:]
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_gradients_flow_through_the_last_loops_alone_on_request(tmp_path: Path) -> None:
    for name, loops in (("all", None), ("three", 3), ("one", 1)):
        make_trainer(tmp_path / name, make_model("lt-input"), num_grad_loops=loops).train()
    norms = {name: [r["gradient_norm"] for r in records(tmp_path / name)] for name in ("all", "three", "one")}
    assert norms["all"] == norms["three"] != norms["one"]


def test_every_checkpoint_holds_the_texts_that_belong_to_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, arguments={"save_steps": 3}, checkpoint_files={"recipe.yaml": "model: {}\n"})
    trainer.train()
    found = {path.parent.name: path.read_text() for path in tmp_path.glob("checkpoint-*/recipe.yaml")}
    assert found == {"checkpoint-3": "model: {}\n", "checkpoint-6": "model: {}\n"}


def test_reporters_get_this_trainers_record(tmp_path: Path) -> None:
    reported: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            reported.append(dict(logs))

    arguments = {"logging_strategy": "steps", "logging_steps": 2}
    make_trainer(tmp_path, arguments=arguments, callbacks=[Reporter()]).train()
    record = records(tmp_path)[1]
    for name, value in (
        ("loss", record["loss"]),
        ("gradient_norm", record["gradient_norm"]),
        ("loss_parts/cross_entropy", record["loss_parts"]["cross_entropy"]),
        ("residual_norms/loop_3", record["residual_norms"][2]),
        ("learning_rates/matrices", record["learning_rates"]["matrices"]),
    ):
        assert reported[0][name] == value


def test_a_tokenizer_without_pad_token_may_stand_beside_windows_that_need_no_padding(tmp_path: Path) -> None:
    make_trainer(tmp_path / "one").train()
    make_trainer(tmp_path / "two", processing_class=STYLES["gpt2"]()).train()
    losses = [[record["loss"] for record in records(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == losses[1]
