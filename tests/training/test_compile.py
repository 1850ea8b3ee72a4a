from __future__ import annotations

import pytest
import torch
import torch._dynamo

from loopformers.testing import tiny_model
from loopformers.training.compile import compile_layers


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def frames_compiled(backend, preset, depths, **overrides):
    """Run a model at several depths, and return how many graphs were compiled by then at each."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward if backend is None else backend(graph, inputs)

    model = tiny_model(preset, **overrides).train()
    compile_layers(model, backend=count)
    ids = torch.randint(61, (3, 7))
    counts = []
    for depth in depths:
        model(ids, labels=ids, num_loops=depth).loss.backward()
        counts.append(len(graphs))
    return counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("preset", ["flt", "lt", "tmlt", "base-loop"])
def test_other_numbers_of_loops_compile_nothing_new(preset):
    """Peer-faults 18."""
    counts = frames_compiled(None, preset, [2, 3, 5, 1])
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_compiled_layers_keep_names_and_classes():
    model = tiny_model("flt", num_prelude_layers=1)
    names = [name for name, _ in model.named_parameters()]
    classes = [type(module) for module in model.modules()]
    assert compile_layers(model, backend="eager") == 3
    assert [name for name, _ in model.named_parameters()] == names
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("preset", "layers", "backend", "depths"),
    [
        ("flt", 2, "aot_eager", (2, 3, 5)),
        ("elastic-flt", 2, "aot_eager", (2, 3, 5)),
        pytest.param("lt", 1, "inductor", (2, 3), marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_give_eager_values_and_gradients(preset, layers, backend, depths):
    eager, compiled = (tiny_model(preset, num_hidden_layers=layers).train() for _ in range(2))
    compile_layers(compiled, backend=backend)
    ids = torch.randint(61, (3, 7))
    for depth in depths:
        for model in (eager, compiled):
            model.zero_grad()
            model.set_draw(0)
        ours, theirs = (model(ids, labels=ids, num_loops=depth) for model in (compiled, eager))
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        ours.loss.backward()
        theirs.loss.backward()
        for (name, a), b in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
