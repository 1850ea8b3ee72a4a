from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from loopformers import ConfigError, LoopConfig, Schedule
from loopformers.model.presets import PRESETS
from loopformers.objectives import OBJECTIVES
from loopformers.objectives.cross_entropy import chunked_cross_entropy_sum
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
            expected = (
                at[2] + 0.1 * at[1] + 0.1 * (long - short)[:, :-1].square().mean()
            )  # the last position has no target
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
    model.eval()  # in training mode a loss of one's own gives a warning
    long, short = (model.model(IDS, num_loops=m).last_hidden_state for m in (3, 1))
    pull = torch.autograd.grad((long.detach() - short)[:, :-1].square().mean(), weights, allow_unused=True)
    for a, b, c in zip(together, alone, pull, strict=True):
        torch.testing.assert_close(a - b, torch.zeros_like(a) if c is None else c, rtol=1e-8, atol=1e-10)


def test_the_consistency_target_can_be_the_logits():
    model = tiny_model("loopformer", consistency_target="logits").double()
    long, short = (model(IDS, num_loops=m).logits for m in (3, 2))
    model.train()
    parts = model(IDS, labels=IDS, short_schedule="uniform:2").loss_parts
    torch.testing.assert_close(parts["consistency"], (long - short)[:, :-1].square().mean())


def test_evaluation_mode_gives_the_cross_entropy_of_the_run():
    model = tiny_model("loopformer").double()
    out = model(IDS, labels=IDS, schedule="coarse-first:2")
    torch.testing.assert_close(out.loss, cross_entropy(out.logits))
    assert out.loss_parts is None


def test_accumulated_microbatches_with_uneven_masks_equal_one_batch():
    for preset in ("flt", "loopformer"):
        model = tiny_model(preset).double().train()
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


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("preset", ["flt", "loopformer", "elastic-flt"])
def test_a_chunked_loss_equals_the_whole_one_in_value_and_gradients(preset, objective):
    labels = IDS.clone()
    labels[1, 3:] = -100
    results = []
    for chunk in (None, 1, 4, 1000):
        model = tiny_model(preset, objective=objective).double().train()
        model.loss_chunk_tokens = chunk
        out = model(IDS, labels=labels)
        out.loss.backward()
        assert (out.logits is None) == (chunk is not None)
        results.append([out.loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def test_a_chunked_loss_equals_torchs_own_where_there_is_no_cap():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    model = tiny_model("loopformer").double()
    hidden = model.model(IDS).last_hidden_state.flatten(0, 1)
    ours = chunked_cross_entropy_sum(hidden, IDS.flatten(), model.head, chunk_tokens=4)
    theirs = F.linear_cross_entropy(hidden, model.lm_head.weight, IDS.flatten(), reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_chunked_loss_has_no_whole_logits_to_compare():
    model = tiny_model("loopformer", consistency_target="logits").train()
    model.loss_chunk_tokens = 4
    with pytest.raises(ConfigError, match="consistency_target='logits' compares whole logits"):
        model(IDS, labels=IDS)


@pytest.mark.parametrize("preset", ["lt-query", "flt", "lt-input", "flt-residual"])
def test_truncated_gradients_are_those_of_a_constant_state(preset):
    model = tiny_model(preset, num_loops=5).double().train()
    model(IDS, labels=IDS, num_grad_loops=2).loss.backward()
    truncated = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    core = model.model
    prepared = core.prepare(IDS, None, None, None, None, model.config.resolve_schedule())
    state = None
    for loop in range(5):
        x = core.stream(prepared.inputs, state, 0.2)
        for i, layer in enumerate(core.layers):
            x, signal = (x, None) if state is None else core.injection(i, x, state)
            x = layer(x, prepared.context, signal=signal)
        state = core.norm(x) if model.config.loop_norm else x
        if loop < 3:
            state = state.detach()
    cross_entropy(model.head(core.finish(state, prepared))).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(truncated[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_truncation_beyond_the_loops_changes_nothing_and_below_one_is_refused():
    model = tiny_model("flt").double().train()
    losses = [model(IDS, labels=IDS, num_grad_loops=n).loss for n in (None, 3, 99)]
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    with pytest.raises(ConfigError, match="num_grad_loops=0"):
        model(IDS, labels=IDS, num_grad_loops=0)
    with pytest.raises(ConfigError, match="only the first loop sees the embedding"):
        tiny_model("lt").train()(IDS, labels=IDS, num_grad_loops=2)
    with pytest.raises(ConfigError, match="num_grad_loops has no meaning"):
        model.eval()(IDS, num_grad_loops=1)


@pytest.mark.parametrize("preset", ["flt", "loopformer", "lt-input"])
@pytest.mark.parametrize("kept", [0, 1, 2, 9])
def test_kept_loops_change_no_gradient(preset, kept):
    gradients = []
    for checkpointed in (False, True):
        model = tiny_model(preset, num_loops=4).double().train()
        if checkpointed:
            model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
            model.model.num_kept_loops = kept
        model.set_draw(1)
        gradients.append(torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


SHORTS = {
    "base-loop-exit": ["uniform:1", "uniform:2", "uniform:3"],
    "tmlt-exit": ["uniform:1", "uniform:3"],
    "loopformer": ["1/4,1/4,1/2", "1/4,3/4", "1/2,1/4,1/4", "uniform:1"],
    "elastic-flt": ["1/4,1/4,1/2", "uniform:2"],
    "flt": ["uniform:2"],
    "lt-input": ["uniform:3"],
}
SHARED = {"1/4,1/4,1/2": 2, "1/4,3/4": 1, "1/2,1/4,1/4": 0}


def applied(model):
    """Count how often each call runs the core's first layer."""
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("target", ["hidden", "logits"])
@pytest.mark.parametrize(("preset", "short"), [(p, s) for p, shorts in SHORTS.items() for s in shorts])
def test_loops_that_both_trajectories_share_run_once_and_change_no_number(preset, short, target, monkeypatch):
    fields = {"objective": "shortcut_consistency", "num_loops": 4, "num_coda_layers": 1, "consistency_target": target}
    model = tiny_model(preset, **fields).double().train()
    calls, weights = applied(model), list(model.parameters())

    def step():
        calls.clear()
        out = model(IDS, labels=IDS, short_schedule=short, output_loop_states=True)
        return len(calls), out, torch.autograd.grad(out.loss, weights, allow_unused=True)

    num_calls, out, gradients = step()
    run = model.config.resolve_schedule(schedule=short)
    shared = SHARED.get(short, 0) if model.config.understands_time else run.num_loops
    assert num_calls == 4 + run.num_loops - shared
    monkeypatch.setattr(LoopConfig, "shared_loops", lambda self, one, other: 0)
    num_calls, apart, expected = step()
    assert num_calls == 4 + run.num_loops
    torch.testing.assert_close(out.loss, apart.loss, rtol=1e-12, atol=0)
    for name, part in apart.loss_parts.items():
        if model.config.conditioning == "none":
            assert torch.equal(out.loss_parts[name], part)
        else:  # modulations of another number of loops are another matrix product, equal to rounding
            torch.testing.assert_close(out.loss_parts[name], part, rtol=1e-11, atol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(out.loop_states, apart.loop_states, strict=True))
    for ours, theirs in zip(gradients, expected, strict=True):
        if (
            ours is not None or theirs.any()
        ):  # of loops that did not run a second time there may be no gradient, or zero
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("short", ["1/4,1/4,1/2", "uniform:3"])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_shared_loops_under_checkpoints_give_the_same_gradients(short, kept):
    preset = "loopformer" if "," in short else "base-loop-exit"
    gradients = []
    for checkpointed in (False, True):
        model = tiny_model(preset, num_loops=4).double().train()
        if checkpointed:
            model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
            model.model.num_kept_loops = kept
        loss = model(IDS, labels=IDS, short_schedule=short).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_truncated_gradients_share_no_loops():
    model = tiny_model("flt", objective="shortcut_consistency", num_loops=4).double().train()
    calls = applied(model)
    for num_grad_loops, expected in ((2, 4 + 3), (4, 4), (None, 4)):
        calls.clear()
        model(IDS, labels=IDS, short_schedule="uniform:3", num_grad_loops=num_grad_loops)
        assert len(calls) == expected


def test_runs_share_the_loops_that_are_told_the_same():
    shared = {
        kind: LoopConfig.from_preset("loopformer", conditioning=kind).shared_loops
        for kind in ("none", "loop_index", "time", "time_and_step")
    }
    long, short = Schedule.uniform(8), Schedule((1, 2, 5), 8)
    assert {kind: count(long, short) for kind, count in shared.items()} == {
        "none": 3,
        "loop_index": 3,
        "time": 2,  # 0, 1/8 | 3/8
        "time_and_step": 1,
    }
    assert all(count(short, long) == count(long, short) for count in shared.values())
    assert all(count(long, long) == 8 for count in shared.values())
    assert shared["time"](long, Schedule.uniform(1)) == 1
    assert shared["time_and_step"](long, Schedule.uniform(2)) == 0
