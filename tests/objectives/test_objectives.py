from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loopformers import ConfigError
from loopformers.model.presets import PRESETS
from loopformers.objectives import OBJECTIVES
from loopformers.testing import tiny_model

IDS = torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(2))


def cross_entropy(logits, labels=IDS):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "base"])
def test_every_objective_trains_every_system(preset, objective):
    """Fault 13: no loss is silently ignored by some systems."""
    model = tiny_model(preset, objective=objective).double()
    at = [cross_entropy(model(IDS, num_loops=loops).logits) for loops in (1, 2, 3)]
    model.train()
    arguments = {"short_schedule": "uniform:2"} if objective == "shortcut_consistency" else {}
    out = model(IDS, labels=IDS, **arguments)
    match objective:
        case "last_loop":
            expected = at[2]
        case "last_third":
            expected = at[2]  # floor(2 * 3 / 3) = 2: the last of three
        case "every_loop" if not model.config.understands_time and model.config.conditioning != "loop_index":
            expected = sum(at) / 3
        case "every_loop":
            states = model.eval()(IDS, output_loop_states=True).loop_states
            expected = sum(cross_entropy(model.head(model.model.norm(s))) for s in states) / 3
            if model.config.loop_norm:
                expected = sum(cross_entropy(model.head(s)) for s in states) / 3
        case _:
            long, short = (model.model(IDS, num_loops=m).last_hidden_state for m in (3, 2))
            expected = at[2] + 0.1 * at[1] + 0.1 * (long - short).square().mean()
    torch.testing.assert_close(out.loss, expected, rtol=1e-10, atol=1e-10)
    assert out.loss_parts
    assert all(not part.requires_grad for part in out.loss_parts.values())


def test_the_last_third_of_twelve_loops_is_the_last_four():
    model = tiny_model("flt", objective="last_third", num_loops=12).train()
    assert sorted(model(IDS, labels=IDS).loss_parts) == sorted(f"cross_entropy_loop_{i}" for i in (9, 10, 11, 12))


def test_consistency_pulls_the_short_trajectory_and_not_the_long_one():
    model = tiny_model("loopformer", short_weight=0.0, consistency_weight=1.0).double().train()
    weights = [p for p in model.parameters() if p.requires_grad]
    together = torch.autograd.grad(model(IDS, labels=IDS, short_schedule="uniform:1").loss, weights, allow_unused=True)
    model.config.consistency_weight = 0.0
    alone = torch.autograd.grad(model(IDS, labels=IDS, short_schedule="uniform:1").loss, weights, allow_unused=True)
    long, short = (model.model(IDS, num_loops=m).last_hidden_state for m in (3, 1))
    pull = torch.autograd.grad((long.detach() - short).square().mean(), weights, allow_unused=True)
    for a, b, c in zip(together, alone, pull, strict=True):
        torch.testing.assert_close(a - b, torch.zeros_like(a) if c is None else c, rtol=1e-8, atol=1e-10)


def test_the_consistency_target_can_be_the_logits():
    model = tiny_model("loopformer", consistency_target="logits").double()
    long, short = (model(IDS, num_loops=m).logits for m in (3, 2))
    model.train()
    parts = model(IDS, labels=IDS, short_schedule="uniform:2").loss_parts
    torch.testing.assert_close(parts["consistency"], (long - short).square().mean())


def test_evaluation_mode_gives_the_cross_entropy_of_the_run():
    model = tiny_model("loopformer").double()
    out = model(IDS, labels=IDS, schedule="coarse-first:2")
    torch.testing.assert_close(out.loss, cross_entropy(out.logits))
    assert out.loss_parts is None


def test_accumulated_microbatches_with_uneven_masks_equal_one_batch():
    for preset in ("flt", "loopformer"):
        model = tiny_model(preset, consistency_weight=0.0).double().train()
        labels = IDS.clone()
        labels[0, 2:] = -100
        count = (labels[:, 1:] != -100).sum()
        run = {"short_schedule": "uniform:2"} if preset == "loopformer" else {}
        model(IDS, labels=labels, **run).loss.backward()
        whole = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for row in range(3):
            part = slice(row, row + 1)
            model(IDS[part], labels=labels[part], num_items_in_batch=count, **run).loss.backward()
        for a, b in zip(whole, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.grad, rtol=1e-9, atol=1e-11)


def test_targets_are_labels_already_aligned():
    model = tiny_model("flt").double()
    targets = F.pad(IDS[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(IDS, labels=IDS).loss, model(IDS, targets=targets).loss)
    with pytest.raises(ConfigError, match="not both"):
        model(IDS, labels=IDS, targets=targets)


def test_draws_are_numbered_by_calls_or_by_the_trainer():
    def losses(model, calls=6):
        return [float(model(IDS, labels=IDS).loss.detach()) for _ in range(calls)]

    one, other = tiny_model("loopformer", num_loops=12).train(), tiny_model("loopformer", num_loops=12).train()
    first = losses(one)
    assert first == losses(other)
    assert len(set(first)) > 2
    one.set_draw(0, 0)
    assert losses(one) == first
    one.set_draw(0, 3)
    assert losses(one, 3) == first[3:]
    one.set_draw(7)
    assert losses(one) != first


def test_a_short_schedule_without_its_objective_is_refused():
    model = tiny_model("flt")
    with pytest.raises(ConfigError, match="short_schedule has no meaning"):
        model(IDS, short_schedule="uniform:2")
    with pytest.raises(ConfigError, match="trains no short trajectory"):
        model.train()(IDS, labels=IDS, short_schedule="uniform:2")


def test_a_batch_without_targets_has_a_zero_loss_and_not_a_nan():
    for preset in ("flt", "loopformer"):
        model = tiny_model(preset).train()
        loss = model(IDS, labels=torch.full_like(IDS, -100)).loss
        assert float(loss.detach()) == 0.0
