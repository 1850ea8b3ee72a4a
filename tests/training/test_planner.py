"""The planner against what steps really use, within 15 %.

Operations: torch's counter over forward and backward of the objective. Saved bytes: unique storages that
`torch.autograd.graph.saved_tensors_hooks` sees in the forward pass, parameters left out. Peak: bytes of parameters and
optimiser state, plus the most bytes of tensors that live at once while forward, backward and update of a second step run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from loopformers import LoopConfig, LoopedForCausalLM, Schedule
from loopformers.errors import ConfigError, DataError
from loopformers.laws import Curriculum, LoopPlan
from loopformers.training.calibration import Calibration, calibrate, matmul_peak, stated
from loopformers.training.memory import (
    ActivationMode,
    Microbatch,
    optimizer_state_bytes,
    plan_memory,
    trajectories_of,
)
from loopformers.training.optimizers import DecayedAdamW, MuonAdamW
from loopformers.training.planner import count_text, executed_flops, make_plan, update_flops
from loopformers.training.recipe import DataRecipe, ModelRecipe, Recipe, TrainingRecipe

MUON = MuonAdamW()
NONE = ActivationMode()
PER_LOOP = ActivationMode(checkpointing=True)
LAST_KEPT = ActivationMode(checkpointing=True, kept_loops=1)

TOLERANCE = 0.15


@dataclass(frozen=True, kw_only=True)
class Case:
    preset: str
    fields: dict[str, Any]
    batch: Microbatch
    optimizer: Any

    @property
    def config(self) -> LoopConfig:
        sizes: dict[str, Any] = {
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_loops": 3,
            "intermediate_size": 100,
            "vocab_size": 301,
            "max_position_embeddings": self.batch.seq_len,
        }
        return LoopConfig.from_preset(self.preset, **{**sizes, **self.fields})

    @property
    def plan(self) -> LoopPlan:
        config = self.config
        has_short = config.objective == "shortcut_consistency"
        return LoopPlan(
            Schedule.uniform(config.num_loops), Schedule.uniform(config.num_loops - 1) if has_short else None
        )


def case(preset: str, mode: ActivationMode = NONE, *, optimizer: Any = MUON, **fields: Any) -> Case:
    chunk, grad = fields.pop("loss_chunk_tokens", None), fields.pop("num_grad_loops", None)
    batch = Microbatch(
        windows=3,
        seq_len=37,
        mode=mode,
        loss_chunk_tokens=chunk,
        num_grad_loops=grad,
        precision=fields.pop("precision", "float32"),
    )
    return Case(preset=preset, fields=fields, batch=batch, optimizer=optimizer)


SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    ("flt", {}),
    ("lt-input", {}),
    ("loopformer", {}),
    ("elastic-flt", {}),
    ("lt-balanced", {}),
    ("lt-adapter", {}),
    ("flt", {"kv_lora_rank": 10}),
]
CASES = [
    case(preset, mode, num_loops=num_loops, loss_chunk_tokens=chunk, **fields)
    for preset, fields in SYSTEMS
    for num_loops, mode, chunk in ((3, NONE, 16), (3, PER_LOOP, None), (12, NONE, None), (12, PER_LOOP, 16))
]
CASES += [
    case("lt", LAST_KEPT, num_loops=5),
    case("lt-query"),
    case("flt-residual", LAST_KEPT),
    case("tmlt", PER_LOOP),
    case("base", num_loops=1),
    case("base-loop-exit", optimizer=DecayedAdamW()),
    case("tmlt-exit", LAST_KEPT, num_loops=5),
    case("flt", objective="shortcut_consistency", num_loops=5, num_grad_loops=3),
    case("flt", num_key_value_heads=2, window_pattern="SL", sliding_window=9),
    case("flt", hidden_act="swiglu", num_prelude_layers=1, num_coda_layers=1),
    case("flt", objective="every_loop"),
    case("flt", objective="last_third", num_loops=6, loss_chunk_tokens=16),
    case("lt-input", num_loops=5, num_grad_loops=2),
    case("elastic-flt", PER_LOOP, loss_chunk_tokens=16, vocab_size=3001),
    case("flt", precision="bfloat16"),
    case("elastic-flt", precision="bfloat16"),
]


def name_of(value: Case) -> str:
    fields = ",".join(f"{k}={v}" for k, v in value.fields.items())
    extra = "" if value.batch.loss_chunk_tokens is None else ",chunked"
    return f"{value.preset},{fields},{value.batch.mode},{value.batch.precision}{extra}".replace(" ", "-")


class LiveBytes(TorchDispatchMode):
    """Most bytes of the tensors made inside that live at once; each storage counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self.seen:
                    self.seen[storage] = True
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.release, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def release(self, num_bytes: int) -> None:
        self.live -= num_bytes


def saved_bytes(run: Callable[[], Any], model: torch.nn.Module) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return sum(saved.values())


def counted(run: Callable[[], Any]) -> int:
    aten = torch.ops.aten
    attention = {  # torch's counter knows the CUDA kernels alone
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        run()
    return counter.get_total_flops()


def ready(this: Case) -> tuple[LoopedForCausalLM, Any, Callable[[], Tensor]]:
    """A model, its optimiser and its objective, after one step: the optimiser has its state, gradients are gone."""
    model = LoopedForCausalLM(this.config).train()
    model.loss_chunk_tokens = this.batch.loss_chunk_tokens
    model.model.num_kept_loops = this.batch.mode.kept_loops
    if this.batch.mode.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    ids = torch.randint(this.config.vocab_size, (this.batch.windows, this.batch.seq_len))
    given: dict[str, Any] = {} if this.plan.short is None else {"short_schedule": this.plan.short}
    if this.batch.num_grad_loops is not None:
        given["num_grad_loops"] = this.batch.num_grad_loops
    optimizer = this.optimizer.build(model)

    def objective() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=this.batch.precision == "bfloat16"):
            loss: Tensor = model(ids, labels=ids, **given).loss
        return loss

    objective().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, objective


@pytest.mark.parametrize("this", CASES, ids=name_of)
def test_planned_operations_and_memory_are_what_a_step_uses(this: Case) -> None:
    model, optimizer, objective = ready(this)
    plan = plan_memory(
        this.config, this.batch, trajectories_of(this.config, this.plan, this.batch.num_grad_loops), this.optimizer
    )

    saved = saved_bytes(objective, model)
    # Under checkpointing everywhere nothing saves the rotary tables, but every loop that is run again needs them.
    tables = 2 * this.batch.tokens * this.config.head_dim * 4 * (this.config.position_embedding == "rotary")
    may_miss = tables if this.batch.mode.checkpointing else 0
    planned = plan.saved_activations + plan.saved_logits + plan.autocast_weights
    assert planned - may_miss <= (1 + TOLERANCE) * saved
    assert planned >= (1 - TOLERANCE) * saved

    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor) and value.dim()
    )
    assert plan.optimizer_state == optimizer_state_bytes(this.config, this.optimizer) == state
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.weights == plan.gradients == parameters
    with LiveBytes() as memory:
        objective().backward()
        optimizer.step()
    assert plan.peak == pytest.approx(parameters + state + memory.peak, rel=TOLERANCE)
    del memory
    optimizer.zero_grad()

    flops = executed_flops(this.config, this.batch, this.plan)
    assert flops == pytest.approx(counted(lambda: objective().backward()), rel=0.03)
    model_flops = this.config.training_flops(
        batch_size=3, seq_len=37, num_loops=this.config.num_loops, short=this.plan.short
    )
    plain = replace(this.batch, mode=NONE, loss_chunk_tokens=None, num_grad_loops=None)
    assert executed_flops(this.config, plain, this.plan) == pytest.approx(model_flops, rel=TOLERANCE)


def test_gradients_of_earlier_microbatches_are_in_the_peak() -> None:
    this = case("flt", PER_LOOP, hidden_size=96)
    model, _, objective = ready(this)
    objective().backward()
    plan = plan_memory(this.config, this.batch, (3,), this.optimizer, accumulates=True)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    with LiveBytes() as memory:
        objective().backward()
    measured = 2 * parameters + optimizer_state_bytes(this.config, this.optimizer) + memory.peak
    assert plan.peak == pytest.approx(measured, rel=TOLERANCE)
    assert plan.peak > plan_memory(this.config, this.batch, (3,), this.optimizer).peak


def test_several_processes_reduce_from_a_copy_of_the_gradients() -> None:
    this = case("flt")
    plan = plan_memory(this.config, this.batch, (3,), this.optimizer, num_processes=2)
    assert plan.gradient_buckets == plan.gradients


@pytest.mark.parametrize("fields", [{}, {"kv_lora_rank": 10}, {"hidden_act": "swiglu", "num_key_value_heads": 2}])
def test_the_updates_operations_are_muons_matrix_products(fields: dict[str, Any]) -> None:
    this = case("flt", **fields)
    _, optimizer, objective = ready(this)
    objective().backward()
    assert counted(optimizer.step) == pytest.approx(update_flops(this.config, this.optimizer))
    assert update_flops(this.config, DecayedAdamW()) == 0


# -- recipes ---------------------------------------------------------------------------------------------------


def recipe(preset: str = "flt", *, law: Any = None, data: DataRecipe | None = None, **training: Any) -> Recipe:
    return Recipe(
        model=ModelRecipe(
            preset=preset,
            overrides={"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_loops": 4},
        ),
        data=data or DataRecipe(seq_len=24),
        law=law,
        training=TrainingRecipe(**{"steps": 20, "batch_size": 12, **training}),
    )


def test_a_step_counts_accumulation_and_processes() -> None:
    one = make_plan(recipe(), num_processes=1)
    many = make_plan(recipe(gradient_accumulation=2), num_processes=3)
    assert (many.microbatch.windows, many.microbatches, many.tokens_per_step) == (2, 2, 12 * 24)
    assert many.flops.model == pytest.approx(one.flops.model)
    assert many.flops.update == pytest.approx(3 * one.flops.update)
    assert one.tokens == 20 * 12 * 24
    assert one.flops.run == pytest.approx(20 * one.flops.executed)
    assert one.parameters["total"] == sum(count for part, count in one.parameters.items() if part != "total")


def test_short_trajectories_are_in_the_operations_and_the_deepest_draw_in_the_memory() -> None:
    plan = make_plan(recipe("elastic-flt", steps=400))
    config = LoopConfig.from_preset("elastic-flt", **recipe().model.overrides, vocab_size=2048)
    expected = config.training_flops(batch_size=12, seq_len=24)
    assert plan.flops.model == pytest.approx(expected, rel=0.05)  # its mean over M = 1, 2, 3
    assert plan.deepest == (4, 3)


def test_a_law_of_random_depth_is_averaged_over_the_run() -> None:
    plan = make_plan(recipe(law=Curriculum(start_loops=1, end_loops=7, num_steps=20)))
    shallow, deep = (make_plan(recipe(law=Curriculum(n, n, 1))).flops.model for n in (1, 7))
    assert shallow < plan.flops.model < deep
    assert plan.deepest == (7,)
    (own,) = [row for row in plan.modes if row.is_recipe]
    assert (own.num_loops, own.relative_time, own.peak) == (7, 1.0, plan.memory.peak)


def test_the_table_marks_the_recipes_own_choice_and_says_what_another_costs() -> None:
    plan = make_plan(recipe(activation_checkpointing=True, kept_loops=2))
    (own,) = [row for row in plan.modes if row.is_recipe]
    assert (own.num_loops, own.mode) == (4, "per loop, last 2 kept")
    by_mode = {row.mode: row for row in plan.modes if row.num_loops == 4}
    assert by_mode["none"].relative_time < 1 < by_mode["per loop"].relative_time
    assert by_mode["none"].saved_activations > own.saved_activations > by_mode["per loop"].saved_activations
    assert own.saved_activations == plan.memory.saved_activations
    assert [row.num_loops for row in plan.cache] == [1, 2, 4, 8]
    assert plan.cache[-1].bytes_per_sequence == 24 * 2 * 2 * 48 * 2 * 8


def test_time_is_operations_over_speed_and_the_update() -> None:
    speed = Calibration(device="stated", peak_flops=1e9, efficiency=0.5, update_seconds=0.25)
    plan = make_plan(recipe(), num_processes=2, calibration=speed)
    assert plan.time is not None
    passes = (plan.flops.executed - plan.flops.update) / 2 / 0.5e9
    assert plan.time.step_seconds == pytest.approx(passes + 0.25)
    assert plan.time.run_seconds == pytest.approx(20 * plan.time.step_seconds)
    assert plan.time.mfu == pytest.approx(plan.flops.model / plan.time.step_seconds / 2e9)
    assert plan.time.tokens_per_second == pytest.approx(12 * 24 / plan.time.step_seconds)


def test_epochs_are_tokens_of_the_run_over_tokens_of_the_text() -> None:
    text = count_text(Recipe(data=DataRecipe(seq_len=24)))
    plan = make_plan(recipe(), text=text)
    assert text.tokens is not None
    assert text.tokens > 4_000_000
    assert plan.epochs == pytest.approx(20 * 12 * 24 / text.tokens)


def test_text_that_is_only_named_is_not_counted() -> None:
    text = count_text(Recipe(data=DataRecipe(sources=("someone/corpus",))))
    assert text.tokens is None
    assert "someone/corpus" in text.reason


def test_text_of_a_path_that_does_not_exist_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(DataError, match="nowhere"):
        count_text(Recipe(data=DataRecipe(sources=(str(tmp_path / "nowhere.txt"),))))


def test_a_batch_that_does_not_divide_is_an_error_that_names_one_that_does() -> None:
    with pytest.raises(ConfigError, match="does not divide into 5 process"):
        make_plan(recipe(), num_processes=5)
    with pytest.raises(ConfigError, match="at least 1"):
        make_plan(recipe(), num_processes=0)


# -- calibration -----------------------------------------------------------------------------------------------


def test_a_step_of_the_model_itself_is_timed_on_as_much_as_the_limit_allows() -> None:
    before = torch.random.get_rng_state()
    plan = make_plan(recipe("elastic-flt", activation_checkpointing=True), calibration=calibrate)
    assert plan.time is not None
    speed = plan.time.calibration
    assert speed.windows == 12
    assert 0 < speed.efficiency <= 1
    assert speed.update_seconds is not None
    this = case("flt")
    small = calibrate(
        this.config, this.batch, this.optimizer, lambda b: executed_flops(this.config, b, this.plan), limit_seconds=0.0
    )
    assert (small.windows, small.seq_len) == (1, 18)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_stated_speed_is_taken_as_it_is() -> None:
    speed = stated(2e12, 0.4, precision="bfloat16")
    assert (speed.flops_per_second, speed.update_seconds) == (0.8e12, None)
    assert stated(None, 0.4, precision="float32").peak_flops > 0


@pytest.mark.parametrize(("peak", "efficiency"), [(1e12, 0.0), (1e12, 1.5), (-1.0, 0.5), (float("nan"), 0.5)])
def test_an_impossible_speed_is_an_error(peak: float, efficiency: float) -> None:
    with pytest.raises(ConfigError, match="must"):
        stated(peak, efficiency, precision="float32")


def test_a_model_beyond_the_memory_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopformers.training.calibration.available_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="--efficiency"):
        make_plan(recipe(), calibration=calibrate)


def test_the_peak_of_matrix_products_is_measured() -> None:
    assert matmul_peak(torch.device("cpu"), "float32", size=32, repeats=1) > 0


def test_a_microbatch_without_tokens_is_an_error() -> None:
    with pytest.raises(ConfigError, match="windows=0"):
        Microbatch(windows=0, seq_len=4)
