from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loopformers import LoopConfig, LoopedForCausalLM, Schedule
from loopformers.errors import ConfigError, DataError
from loopformers.evaluation.budget import evaluate_budgets

VOCAB = 31


def make_model(preset: str, **overrides: Any) -> LoopedForCausalLM:
    torch.manual_seed(0)
    fields = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_loops": 4, "num_attention_heads": 2}
    model = LoopedForCausalLM(LoopConfig.from_preset(preset, max_position_embeddings=16, **{**fields, **overrides}))
    with torch.no_grad():  # output projections start at zero, which makes all loops equal
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def make_windows(lengths: tuple[int, ...] = (7, 7, 7, 5, 7)) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    windows = []
    for i, length in enumerate(lengths):
        ids = torch.randint(VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: i + 1] = -100
        windows.append({"input_ids": ids, "labels": labels})
    return windows


@torch.no_grad()
def by_hand(model: LoopedForCausalLM, windows: list[dict[str, torch.Tensor]], schedule: Schedule) -> tuple[float, int]:
    nats, count = 0.0, 0
    for window in windows:
        logits = model.eval()(window["input_ids"][None], schedule=schedule).logits[0]
        for position in range(len(window["input_ids"]) - 1):
            target = int(window["labels"][position + 1])
            if target != -100:
                nats -= F.log_softmax(logits[position].double(), -1)[target].item()
                count += 1
    return nats, count


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_loss_is_the_sum_over_all_targets_divided_by_their_number(batch_size: int) -> None:
    model, windows = make_model("elastic-flt"), make_windows()
    model.train()
    budgets = [1, "coarse-first:3", Schedule.uniform(6)]
    results = evaluate_budgets(model, windows, budgets, batch_size=batch_size)
    assert model.training
    schedules = [Schedule.uniform(1), Schedule.coarse_first(3, grid=4), Schedule.uniform(6)]
    for result, schedule in zip(results, schedules, strict=True):
        nats, count = by_hand(model, windows, schedule)
        assert result.num_targets == count
        assert result.loss == pytest.approx(nats / count, rel=1e-5)
        assert result.perplexity == pytest.approx(math.exp(result.loss))
        assert (result.num_loops, result.schedule) == (schedule.num_loops, str(schedule))
        assert result.bits_per_byte is None
    assert len({result.loss for result in results}) == 3


def test_windows_without_labels_are_scored_whole_and_bits_per_byte_follow() -> None:
    windows = [{"input_ids": torch.arange(6)}, {"input_ids": torch.arange(6, 12)}]
    (result,) = evaluate_budgets(make_model("flt"), windows, [2], bytes_per_token=3.5)
    assert result.num_targets == 10
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) / 3.5)


@pytest.mark.filterwarnings("error::loopformers.errors.ScheduleWarning")
@pytest.mark.parametrize("budgets", [[1, 4, 5], [4, 9]])
def test_untrained_budgets_are_scored_without_a_warning(budgets: list[int]) -> None:
    results = evaluate_budgets(make_model("tmlt"), make_windows(), budgets)
    assert [result.num_loops for result in results] == budgets


def test_flops_grow_with_the_budget_and_match_the_model() -> None:
    model = make_model("flt")
    windows = make_windows((7, 7))
    results = evaluate_budgets(model, windows, [1, 2, 4])
    assert [r.flops_per_token for r in results] == [model.config.flops_per_token(m, seq_len=7) for m in (1, 2, 4)]


def test_bad_requests_are_refused() -> None:
    model, windows = make_model("flt"), make_windows()
    with pytest.raises(ConfigError, match="budgets="):
        evaluate_budgets(model, windows, [])
    with pytest.raises(ConfigError, match="batch_size=0"):
        evaluate_budgets(model, windows, [1], batch_size=0)
    with pytest.raises(ConfigError, match="num_loops=0"):
        evaluate_budgets(model, windows, [0])
    with pytest.raises(ConfigError, match="unequal steps"):
        evaluate_budgets(model, windows, ["1/2,1/4,1/4"])
    with pytest.raises(DataError, match="no target"):
        evaluate_budgets(model, [], [1])
    with pytest.raises(DataError, match="no target"):
        evaluate_budgets(model, [{"input_ids": torch.tensor([3])}], [1])
