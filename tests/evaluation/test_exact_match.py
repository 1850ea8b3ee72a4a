from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.data.synthetic.registry import make_task
from loopformers.data.synthetic.rows import held_out_rows
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.evaluation.exact_match import evaluate_task
from loopformers.evaluation.scoring import answered_exactly


def test_a_question_is_answered_when_all_its_tokens_are_and_counts_once() -> None:
    questions = np.array([[-1, 0, 0, 1, -1, 2], [0, -1, 0, 0, 1, -1]])
    difficulties = np.array([[-1, 3, 3, 1, -1, 2], [1, -1, 1, 1, 5, -1]])
    right = np.array([[False, True, True, False, False, True], [True, False, True, False, True, False]])
    exact, difficulty = answered_exactly(right, questions, difficulties)
    assert exact.tolist() == [True, False, True, False, True]
    assert difficulty.tolist() == [3, 1, 2, 1, 5]


@pytest.mark.parametrize("preset", ["lt-input", "flt", "loopformer"])
@pytest.mark.parametrize("name", ["pointer_chasing", "addition"])
def test_any_model_is_scored_at_any_budget_as_by_a_loop_over_questions(preset: str, name: str) -> None:
    task = make_task(name, questions=3)
    model = LoopedForCausalLM(
        LoopConfig.from_preset(
            preset, vocab_size=len(task.words), hidden_size=24, num_attention_heads=2, num_hidden_layers=2,
            num_loops=3, max_position_embeddings=task.seq_len,
        )
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    rows = held_out_rows(task, 7)
    dataset = [rows.row(i) for i in range(7)]
    results = evaluate_task(model, dataset, [1, 3, 4], batch_size=5)
    plain = evaluate_budgets(model, dataset, [1, 3, 4])
    for result, score, num_loops in zip(results, plain, [1, 3, 4], strict=True):
        assert (result.num_loops, result.num_targets) == (num_loops, score.num_targets)
        assert result.loss == pytest.approx(score.loss, rel=1e-6)
        by_hand: dict[int, list[bool]] = {}
        for row in dataset:
            logits = model(torch.tensor(row["input_ids"])[None], num_loops=num_loops, use_cache=False).logits[0]
            for question in range(row["questions"].max() + 1):
                places = np.flatnonzero(row["questions"] == question)
                exact = all(int(logits[p - 1].argmax()) == row["labels"][p] for p in places)
                by_hand.setdefault(int(row["difficulties"][places[0]]), []).append(exact)
        assert list(result.solved_by_difficulty) == [str(level) for level in sorted(by_hand)]
        for level, found in by_hand.items():
            assert result.solved_by_difficulty[str(level)] == pytest.approx(np.mean(found))
            assert result.questions_by_difficulty[str(level)] == len(found)
        assert result.solved == pytest.approx(np.mean([x for found in by_hand.values() for x in found]))
    assert dataclasses.asdict(results[0])["solved_by_difficulty"] == dict(results[0].solved_by_difficulty)


def test_the_model_is_left_in_its_mode() -> None:
    task = make_task("pointer_chasing", symbols=3, questions=1)
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "num_loops": 2}
    model = LoopedForCausalLM(LoopConfig.from_preset("lt", vocab_size=len(task.words), **sizes)).train()
    evaluate_task(model, [held_out_rows(task, 1).row(0)], [2])
    assert model.training
