"""The recurrences against their table (systems.md's rows), the loop against its equation, slots as a bijection."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from loopformers.nn.layer import Modulation
from loopformers.recurrence.slots import SlotLayout
from loopformers.recurrence.unroll import unroll
from loopformers.testing import tiny_model


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def written_out(model, ids, num_loops):
    """The FLT family, loop by loop, as its table says; one function, no parts of ours but layers."""
    core = model.model
    context = core.prepare(ids, None, None, None, None, model.config.resolve_schedule(num_loops)).context
    name = (model.config.stream, model.config.injection)
    e, h = core.embed_tokens(ids), None
    for _ in range(num_loops):
        if h is None:
            x = norm(e)
        elif name == ("state", "none"):
            x = h
        elif name == ("inputs_plus_state", "none"):
            x = norm(e + h)
        elif name == ("balanced", "none"):
            x = h + norm(e)
        elif name == ("adapter", "none"):
            x = norm(norm(e) @ core.stream.inputs_proj.weight.T + h @ core.stream.state_proj.weight.T)
        else:
            x = norm(e)
        for i, layer in enumerate(core.layers):
            signal = None
            if h is not None and name[1] == "residual_all":
                x = norm(x + h)
            if h is not None and (name[1] == "query_all" or (name[1] == "query_first" and i == 0)):
                signal = h
            x = layer(x, context, signal=signal)
        h = norm(x)
    logits = model.lm_head(h)[..., : model.config.vocab_size]
    return 15 * torch.tanh(logits / 15)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
@pytest.mark.parametrize("preset", ["lt", "lt-input", "lt-query", "flt-residual", "flt", "lt-balanced", "lt-adapter"])
def test_a_preset_is_its_row_of_the_table(preset, num_loops):
    model = tiny_model(preset).double()
    ids = torch.randint(61, (3, 7))
    assert torch.equal(model(ids, num_loops=num_loops, use_cache=False).logits, written_out(model, ids, num_loops))


def test_an_adapter_starts_as_the_sum_of_normed_inputs_and_state():
    model = tiny_model("lt-adapter", randomize=False)
    eye = torch.eye(model.config.hidden_size)
    assert torch.equal(model.model.stream.inputs_proj.weight, eye)
    assert torch.equal(model.model.stream.state_proj.weight, eye)


def test_the_systems_agree_at_one_loop_and_differ_at_two():
    ids = torch.randint(61, (2, 6))
    systems = [
        "lt",
        "lt-input",
        "lt-query",
        "flt-residual",
        "flt",
        "lt-balanced",
    ]  # one draw of weights fits all of these
    once = [tiny_model(name)(ids, num_loops=1).logits for name in systems]
    twice = [tiny_model(name)(ids, num_loops=2).logits for name in systems]
    for i, other in enumerate(systems):
        assert torch.equal(once[0], once[i])
        assert all(not torch.allclose(twice[i], twice[j]) for j in range(i)), other


@pytest.mark.parametrize("preset", ["lt-query", "flt"])
def test_position_0_is_identical_at_every_loop_count_where_the_signal_is_a_query(preset):
    model = tiny_model(preset).double()
    ids = torch.randint(61, (2, 6))
    one, many = model(ids, num_loops=1).logits, model(ids, num_loops=7).logits
    torch.testing.assert_close(one[:, 0], many[:, 0], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(one[:, 1:], many[:, 1:])


@pytest.mark.parametrize("preset", ["base-loop", "loopformer"])
def test_a_looped_model_is_an_untied_stack_with_copied_layers(preset):
    looped = tiny_model(preset, num_loops=3).double()
    ids = torch.randint(61, (2, 6))
    if preset == "loopformer":
        x = looped.model.prepare(ids, None, None, None, None, looped.config.resolve_schedule(3))
        modulations = looped.model.conditioning(torch.tensor([0, 1 / 3, 2 / 3]), torch.full((3,), 1 / 3))
        stream = x.inputs
        for loop in range(3):
            for i, layer in enumerate(looped.model.layers):
                stream = layer(stream, x.context, modulation=Modulation(*modulations[loop, i]))
        expected = looped.lm_head(looped.model.norm(stream))
    else:
        stack = tiny_model("base", num_hidden_layers=6).double()
        own = {k: v for k, v in looped.state_dict().items() if ".layers." not in k}
        layers = {
            k.replace(f".layers.{i}.", f".layers.{2 * loop + i}."): v
            for k, v in looped.state_dict().items()
            for i in range(2)
            for loop in range(3)
            if f".layers.{i}." in k
        }
        stack.load_state_dict(own | layers)
        expected = stack(ids, use_cache=False).logits
    torch.testing.assert_close(looped(ids, use_cache=False).logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loop_norm", [True, False])
@pytest.mark.parametrize("conditioning", ["none", "loop_index", "time", "time_and_step"])
@pytest.mark.parametrize("injection", ["none", "query_first", "query_all", "residual_all"])
@pytest.mark.parametrize("stream", ["state", "inputs_plus_state", "inputs"])
def test_any_combination_is_legal_and_trains(stream, injection, conditioning, loop_norm):
    model = tiny_model(
        "flt", stream=stream, injection=injection, conditioning=conditioning, loop_norm=loop_norm,
        objective="shortcut_consistency", modulation_init="open", num_prelude_layers=1, num_coda_layers=1,
    ).train()  # fmt: skip
    ids = torch.randint(61, (2, 6))
    out = model(ids, labels=ids)
    out.loss.backward()
    assert out.loss.isfinite()
    uses_time = conditioning != "none"
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert any("conditioning" in name for name, _ in model.named_parameters()) == uses_time


def test_checkpointed_loops_see_the_state_that_the_first_run_saw():
    """Fault 8: gradients are equal, not just the loss, also where what the loops are told has one graph for all of them."""
    weight = torch.randn(5, 5, dtype=torch.double, requires_grad=True)
    times = torch.rand(6, 5, dtype=torch.double)

    def loop(inputs, state, loop_idx, told):
        x = inputs if state is None else torch.sin(state @ weight) + inputs * (loop_idx + 1) * told
        return x, x

    inputs = torch.randn(3, 5, dtype=torch.double, requires_grad=True)
    gradients = []
    for save in (
        None,
        lambda *args: checkpoint(*args, use_reentrant=False),
        lambda *args: checkpoint(*args, use_reentrant=True),
    ):
        unroll(loop, inputs, 6, told=torch.tanh(times @ weight), checkpoint=save).square().sum().backward()
        gradients.append((weight.grad.clone(), inputs.grad.clone()))
        weight.grad = inputs.grad = None
    for other in gradients[1:]:
        assert torch.equal(gradients[0][0], other[0])
        assert torch.equal(gradients[0][1], other[1])


@given(
    prelude=st.integers(0, 3),
    core=st.integers(1, 4),
    coda=st.integers(0, 3),
    loops=st.integers(1, 12),
    fewer=st.integers(1, 12),
)
def test_slots_are_a_bijection_that_no_loop_count_moves(prelude, core, coda, loops, fewer):
    """Fault 5."""
    layout = SlotLayout(prelude, core, coda)

    def slots(num_loops):
        return (
            [layout.slot("prelude", i) for i in range(prelude)]
            + [layout.slot("coda", i) for i in range(coda)]
            + [layout.slot("core", i, loop) for loop in range(num_loops) for i in range(core)]
        )

    assert sorted(slots(loops)) == list(range(layout.num_slots(loops)))
    shared = min(loops, fewer)
    assert slots(loops)[: layout.num_slots(shared)] == slots(fewer)[: layout.num_slots(shared)]


def test_loop_states_and_residual_norms_come_out_on_request():
    """Fault 25."""
    model = tiny_model("flt").double()
    ids = torch.randint(61, (3, 7))
    out = model(ids, num_loops=4, output_loop_states=True, output_residual_norms=True, output_hidden_states=True)
    assert len(out.loop_states) == 4
    assert all(state.shape == (3, 7, 24) for state in out.loop_states)
    assert out.residual_norms.shape == (4,)
    assert len(out.hidden_states) == 5
    torch.testing.assert_close(model.head(out.loop_states[-1]), out.logits)
    for loops in (1, 2, 3):
        torch.testing.assert_close(model.head(out.loop_states[loops - 1]), model(ids, num_loops=loops).logits)
    assert model(ids).loop_states is None


def test_the_residual_norm_is_the_mean_token_norm_before_the_closing_norm():
    model = tiny_model("lt").double()
    ids = torch.randint(61, (2, 5))
    seen = []
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    out = model(ids, num_loops=3, output_residual_norms=True)
    by_hand = torch.stack([x.square().sum(-1).sqrt().mean() for x in seen])
    torch.testing.assert_close(out.residual_norms, by_hand)
