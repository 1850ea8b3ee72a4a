from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from loopformers.errors import ConfigError, DataError
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.evaluation.loop_use import measure_loop_use
from loopformers.testing import tiny_model

VOCAB, SEQ, LOOPS = 29, 7, 3


def windows(count: int, seq: int = SEQ, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(VOCAB, (seq,), generator=generator)} for _ in range(count)]


def build(preset: str) -> Any:
    model = tiny_model(preset, vocab_size=VOCAB, num_loops=LOOPS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # fresh output projections are zero, and all loops alike
    return model


@pytest.mark.parametrize("preset", ["lt", "lt-input", "lt-query", "flt-residual", "flt", "loopformer"])
def test_without_a_replacement_the_loss_is_the_evaluations(preset: str) -> None:
    model = build(preset)
    use = measure_loop_use(model, windows(5), batch_size=2)
    (score,) = evaluate_budgets(model, windows(5), [LOOPS])
    assert use.loss == pytest.approx(score.loss, rel=1e-5)
    assert (use.num_loops, use.num_windows, len(use.state_changes)) == (LOOPS, 5, LOOPS - 1)


def by_hand(model: Any, ids: torch.Tensor, replacement: Any) -> tuple[float, list[torch.Tensor]]:
    """The loss of a run whose states are replaced before the loops after the first, written out for `flt` and `lt-input`."""
    inner = model.model
    prepared = inner.prepare(ids, None, None, None, None, model.config.resolve_schedule())
    state, states = None, []
    for _ in range(LOOPS):
        if state is not None:
            state = replacement(state)
        x = inner.stream(prepared.inputs, state, 1 / LOOPS)
        for i, layer in enumerate(inner.layers):
            x, signal = (x, None) if state is None else inner.injection(i, x, state)
            x = layer(x, prepared.context, signal=signal)
        state = inner.norm(x)
        states.append(state)
    logits = model.head(state)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), states


@pytest.mark.parametrize("preset", ["lt-input", "flt"])
@torch.no_grad()
def test_ablations_replace_the_state_that_enters_each_loop_after_the_first(preset: str) -> None:
    model = build(preset).eval()
    rows = windows(4)
    ids = torch.stack([row["input_ids"] for row in rows])
    use = measure_loop_use(model, rows, batch_size=4)
    plain, states = by_hand(model, ids, lambda state: state)
    swapped, _ = by_hand(model, ids, lambda state: torch.cat([state[-1:], state[:-1]]))
    zeroed, _ = by_hand(model, ids, lambda state: 0 * state)
    assert (use.loss, use.swapped_loss, use.zeroed_loss) == pytest.approx((plain, swapped, zeroed), rel=1e-5)
    assert len({round(value, 3) for value in (plain, swapped, zeroed)}) == 3
    changes = [((b - a).norm(dim=-1) / a.norm(dim=-1)).mean().item() for a, b in itertools.pairwise(states)]
    assert use.state_changes == pytest.approx(changes, rel=1e-4)


def test_equal_rows_lose_nothing_by_a_swap_and_inert_loops_nothing_at_all() -> None:
    same = windows(1) * 4
    use = measure_loop_use(build("flt"), same)
    assert use.swapped_loss == pytest.approx(use.loss, rel=1e-5)
    inert = tiny_model("lt-input", vocab_size=VOCAB, num_loops=LOOPS)
    with torch.no_grad():
        for name, parameter in inert.named_parameters():
            if "embed" in name:
                parameter.mul_(1e6)  # beside such inputs a state of unit size is nothing
    use = measure_loop_use(inert, windows(4))
    assert use.swapped_loss == pytest.approx(use.loss, abs=1e-4)
    assert use.zeroed_loss == pytest.approx(use.loss, abs=1e-4)
    assert max(use.state_changes) < 1e-4


def test_a_model_of_one_loop_has_no_signal_to_replace() -> None:
    use = measure_loop_use(build("flt"), windows(3), num_loops=1)
    assert (use.num_loops, use.swapped_loss, use.zeroed_loss, use.state_changes) == (1, None, None, ())


def test_no_row_is_left_without_a_neighbour_and_lengths_are_not_mixed() -> None:
    model = build("flt").train()
    rows = [*windows(3), *windows(2, seq=5), *windows(1, seq=4)]
    use = measure_loop_use(model, rows, batch_size=2)
    assert use.num_windows == 5  # the last has no neighbour
    assert model.training


def test_labels_choose_what_is_scored() -> None:
    model = build("flt")
    rows = windows(4)
    for row in rows:
        row["labels"] = torch.full_like(row["input_ids"], -100)
        row["labels"][-1] = row["input_ids"][-1]
    (score,) = evaluate_budgets(model, rows, [LOOPS])
    assert measure_loop_use(model, rows).loss == pytest.approx(score.loss, rel=1e-5)


def test_what_cannot_be_measured_is_refused() -> None:
    model = build("flt")
    with pytest.raises(ConfigError, match="batch_size=1 must be at least 2"):
        measure_loop_use(model, windows(4), batch_size=1)
    with pytest.raises(DataError, match="no two windows of one length hold a target"):
        measure_loop_use(model, windows(1))
