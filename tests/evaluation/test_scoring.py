from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loopformers import ConfigError, LoopedForCausalLM, Schedule
from loopformers.data.synthetic.registry import make_task
from loopformers.data.synthetic.rows import held_out_rows
from loopformers.evaluation.budget import evaluate_budgets, sweep_budgets
from loopformers.evaluation.exact_match import evaluate_task
from loopformers.evaluation.scoring import Tally, score_outside, score_runs, shared_runs, window_batches
from loopformers.model.presets import PRESETS
from loopformers.testing import tiny_model

UNCONDITIONED = [name for name, fields in PRESETS.items() if fields.get("conditioning", "none") == "none"]


def windows(lengths: tuple[int, ...] = (7, 7, 7, 5, 7)) -> list[dict[str, torch.Tensor]]:
    """Windows of unequal lengths, with ever fewer targets, and one without any."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i, length in enumerate(lengths):
        ids = torch.randint(61, (length,), generator=generator)
        labels = ids.clone()
        labels[: 2 * i] = -100
        questions = torch.arange(length) // 2
        rows.append({"input_ids": ids, "labels": labels, "questions": questions, "difficulties": questions % 2 + 3})
    return rows


@contextmanager
def layer_calls(model: LoopedForCausalLM) -> Iterator[list[int]]:
    calls: list[int] = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: calls.append(i)) for i, layer in enumerate(model.model.layers)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("extra", [{}, {"num_prelude_layers": 1, "num_coda_layers": 1}], ids=["plain", "prelude-coda"])
def test_a_sweep_equals_the_reference_that_runs_every_budget_by_itself(preset: str, extra: dict[str, int]) -> None:
    model = tiny_model(preset, num_loops=4, **extra).double().train()
    budgets: list[Any] = [1, 2, 3, 4, 6, 2]
    if model.config.understands_time:
        budgets += ["coarse-first:3", "1/2,1/4,1/4", "1/2,1/2"]
    expected = evaluate_budgets(model, windows(), budgets, batch_size=2, bytes_per_token=3.5)
    for batch_size in (1, 3):
        found = sweep_budgets(model, windows(), budgets, batch_size=batch_size, bytes_per_token=3.5)
        assert model.training
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)  # the reference rounds logits to float32
            assert ours.bits_per_byte == pytest.approx(theirs.bits_per_byte, rel=1e-6)
            assert (ours.num_loops, ours.schedule, ours.num_targets) == (
                theirs.num_loops,
                theirs.schedule,
                theirs.num_targets,
            )
            assert (ours.accuracy, ours.exact_match) == (theirs.accuracy, theirs.exact_match)
            assert ours.exact_match_by_difficulty == theirs.exact_match_by_difficulty
            assert set(ours.exact_match_by_difficulty or ()) == {"3", "4"}
            assert ours.flops_per_token == pytest.approx(theirs.flops_per_token)
    assert len({result.loss for result in expected}) > 3


@pytest.mark.parametrize("preset", [*UNCONDITIONED, "tmlt"])
def test_all_budgets_cost_the_layers_of_the_deepest_where_loops_are_told_nothing_of_time(preset: str) -> None:
    model = tiny_model(preset, num_loops=6)
    with layer_calls(model) as calls:
        sweep_budgets(model, windows((7, 7)), range(1, 7))
    assert len(calls) == 6 * model.config.num_hidden_layers


@pytest.mark.parametrize("preset", UNCONDITIONED)
def test_all_budgets_cost_at_most_thirteen_tenths_of_the_deepest_in_counted_operations(preset: str) -> None:
    """The head, which no two budgets share, is what is above 1: here it is a seventh of a loop."""
    model = tiny_model(preset, num_loops=6)

    def operations(budgets: list[int]) -> int:
        with FlopCounterMode(display=False) as counter:
            sweep_budgets(model, [{"input_ids": torch.arange(17)}] * 2, budgets, batch_size=2)
        return int(counter.get_total_flops())

    deepest = operations([6])
    assert deepest < operations([1, 2, 3, 4, 5, 6]) <= 1.3 * deepest


@pytest.mark.parametrize("preset", ["loopformer", "elastic-flt"])
def test_a_model_that_knows_its_step_size_costs_no_more_than_the_sum(preset: str) -> None:
    model = tiny_model(preset, num_loops=4, num_prelude_layers=1)
    with layer_calls(model) as calls:
        sweep_budgets(model, windows((7, 7)), [1, 2, 4])
    assert len(calls) == (1 + 2 + 4) * model.config.num_hidden_layers

    def operations(budgets: list[int]) -> int:
        with FlopCounterMode(display=False) as counter:
            sweep_budgets(model, windows((17, 17)), budgets)
        return int(counter.get_total_flops())

    assert operations([1, 2, 4]) < sum(operations([budget]) for budget in (1, 2, 4))


def test_a_model_that_is_told_its_time_alone_shares_the_runs_that_start_alike() -> None:
    model = tiny_model("tmlt", conditioning="time", num_loops=4)
    runs = [model.config.resolve_schedule(schedule=text) for text in ("1/2,1/2", "1/2,1/4,1/4", "1/4,3/4", "1/1")]
    assert shared_runs(model, runs) == [[1, 0, 3], [2]]


def test_runs_of_a_stream_that_uses_step_sizes_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lt", num_loops=4)
    runs = [Schedule.uniform(m) for m in (1, 2, 4)]
    assert shared_runs(model, runs) == [[2, 1, 0]]
    monkeypatch.setattr(type(model.model.stream), "uses_step_size", True)
    assert shared_runs(model, runs) == [[2], [1], [0]]


def test_the_head_runs_where_there_is_a_target_and_nowhere_else() -> None:
    model = tiny_model("lt", num_loops=2)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(args[0].numel() // args[0].shape[-1]))
    (tally,) = score_runs(model, windows(), [Schedule.uniform(2)], batch_size=2)
    assert sum(seen) == tally.num_targets < sum(len(w["input_ids"]) - 1 for w in windows())


def test_sums_do_not_depend_on_how_many_targets_are_scored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("flt").double()
    (whole,) = score_runs(model, windows(), [Schedule.uniform(3)])
    monkeypatch.setattr("loopformers.evaluation.scoring.CHUNK_TARGETS", 2)
    (chunked,) = score_runs(model, windows(), [Schedule.uniform(3)])
    assert chunked.nats == pytest.approx(whole.nats, rel=1e-12)
    assert (chunked.num_right, chunked.num_whole) == (whole.num_right, whole.num_whole)


def test_exact_match_counts_questions_whose_every_target_is_right() -> None:
    model = tiny_model("flt", num_loops=2)
    rows = [{"input_ids": window["input_ids"]} for window in windows((9, 9, 9))]
    with torch.no_grad():
        for row in rows:
            best = model(row["input_ids"][None], num_loops=2).logits[0].argmax(dim=-1)
            row["labels"] = torch.full((9,), -100)
            row["labels"][4:7] = best[3:6]
    rows[1]["labels"][5] = (rows[1]["labels"][5] + 1) % 61
    rows[2]["labels"][:] = -100
    (tally,) = score_runs(model, rows, [Schedule.uniform(2)])
    assert (tally.num_targets, tally.num_right, tally.num_questions, tally.num_whole) == (6, 5, 2, 1)
    assert (tally.accuracy, tally.exact_match) == (5 / 6, 1 / 2)
    rows[1]["questions"] = rows[0]["questions"] = torch.tensor([-1, -1, -1, -1, 0, 1, 1, -1, -1])
    rows[2]["questions"] = torch.full((9,), -1)
    rows[0]["difficulties"] = torch.full((9,), 2)
    rows[1]["difficulties"] = torch.tensor([-1, -1, -1, -1, 5, 2, 2, -1, -1])
    rows[2]["difficulties"] = torch.full((9,), -1)
    (tally,) = score_runs(model, rows, [Schedule.uniform(2)])
    assert (tally.num_questions, tally.num_whole) == (4, 3)
    assert tally.exact_match_by_difficulty == {"2": 2 / 3, "5": 1.0}


def test_scores_of_a_task_equal_those_that_training_reports() -> None:
    task = make_task("pointer_chasing", symbols=3, questions=5, hops=2)
    model = tiny_model("lt", num_loops=3, vocab_size=len(task.words), max_position_embeddings=task.seq_len)
    held_out = held_out_rows(task, 40)
    rows = [held_out.row(i) for i in range(len(held_out))]
    for ours, theirs in zip(sweep_budgets(model, rows, [1, 3]), evaluate_task(model, rows, [1, 3]), strict=True):
        assert ours.exact_match == theirs.solved
        assert ours.exact_match_by_difficulty == theirs.solved_by_difficulty
        assert 0 < ours.exact_match < 1


def test_an_outside_model_is_scored_like_ours() -> None:
    model = tiny_model("flt").double()
    (ours,) = score_runs(model, windows(), [model.config.resolve_schedule()])
    theirs = score_outside(model, windows())
    assert theirs.nats == pytest.approx(ours.nats, rel=1e-12)
    assert (theirs.num_targets, theirs.num_right) == (ours.num_targets, ours.num_right)


def test_batches_are_reported_and_bad_sizes_refused() -> None:
    model, seen = tiny_model("lt"), []
    score_runs(model, windows(), [Schedule.uniform(1)], batch_size=2, on_batch=seen.append)
    assert seen == [2, 1, 1, 1]
    with pytest.raises(ConfigError, match="batch_size=0"):
        score_runs(model, windows(), [Schedule.uniform(1)], batch_size=0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        score_outside(model, windows(), batch_size=0)
    with pytest.raises(ConfigError, match="budgets="):
        sweep_budgets(model, windows(), [])
    with pytest.raises(ConfigError, match="unequal steps"):
        sweep_budgets(model, windows(), ["1/2,1/4,1/4"])
    assert math.isinf(type(score_outside(model, windows()))(nats=1e4, num_targets=1).perplexity)


def test_of_tokens_that_tie_the_first_counts_and_what_is_no_number_is_wrong():
    ids = torch.tensor([[0, 2, 1, 3, 0, 1]])
    (batch,) = window_batches([{"input_ids": ids[0]}], 1)
    logits = torch.tensor(
        [
            [5.0, 15.0, 15.0, 0.0],  # asked 2, tied with 1 before it
            [0.0, 15.0, 15.0, 0.0],  # asked 1, tied with 2 behind it
            [0.0, 0.0, 0.0, 0.0],  # asked 3
            [0.0, 0.0, 0.0, 0.0],  # asked 0
            [math.nan, 0.0, 0.0, 0.0],  # asked 1
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    tally = Tally()
    tally.add(logits[None], batch, lambda rows: rows)
    assert tally.num_right == int((logits[:5].argmax(dim=-1) == ids[0, 1:]).sum()) == 2


def test_the_loss_is_the_cross_entropy():
    torch.manual_seed(0)
    logits = 4 * torch.randn(1, 9, 11, dtype=torch.float64)
    (batch,) = window_batches([{"input_ids": torch.randint(11, (9,))}], 1)
    tally = Tally()
    tally.add(logits, batch, lambda rows: rows)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], batch.input_ids[0, 1:])
    assert tally.loss == pytest.approx(float(expected), rel=1e-12)


def test_the_loss_over_a_large_vocabulary_is_that_of_float64():
    torch.manual_seed(0)
    logits = 4 * torch.randn(1, 65, 49152) + 3
    (batch,) = window_batches([{"input_ids": torch.randint(49152, (65,))}], 1)
    tally = Tally()
    tally.add(logits, batch, lambda rows: rows)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1].double(), batch.input_ids[0, 1:])
    assert tally.loss == pytest.approx(float(expected), abs=5e-7)
