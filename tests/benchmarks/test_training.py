from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("speed", "training", "diagnostics")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
        if before[name] is not None:
            sys.modules[name] = before[name]


@pytest.mark.parametrize(("name", "rows"), [("training", 4), ("diagnostics", 2)])
def test_the_smoke_test_measures_and_reports_twice(
    load: Any, name: str, rows: int, tmp_path: Path, capsys: Any
) -> None:
    module: ModuleType = load(name)
    path = tmp_path / "out.json"
    assert module.main(["--fast", "--repeats", "2", "--json", str(path)]) == 0
    comparisons = json.loads(path.read_text())["comparisons"]
    assert len(comparisons) == rows
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in comparisons)
    assert "elastic-flt" in capsys.readouterr().out


def test_runs_take_turns_and_a_failure_of_one_is_raised(load: Any) -> None:
    training = load("training")
    order: list[str] = []

    def run(name: str) -> Any:
        def steps(pause: Any) -> None:
            for step in range(4):
                order.append(name)
                if step < 3:
                    pause()

        return steps

    times = training.Turns({"a": run("a"), "b": run("b")}, warm_up=1).measure(2)
    assert "".join(order) == "abbaabab"
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}

    def fails(pause: Any) -> None:
        raise RuntimeError("no update")

    with pytest.raises(RuntimeError, match="no update"):
        training.Turns({"a": fails}).measure(1)


def test_the_bare_loop_makes_the_trainers_updates(load: Any, tmp_path: Path) -> None:
    """Otherwise the ratio compares two different things."""
    training = load("training")
    models: list[torch.nn.Module] = []
    build = training.build
    training.build = lambda *args, **kwargs: models.append(build(*args, **kwargs)) or models[-1]
    arguments = ("elastic-flt", training.FAST, 3)
    training.bare_run(*arguments)(lambda: None)
    dataset = training.windows(training.FAST, 3)
    from torch.utils.data import SequentialSampler

    from loopformers.training.trainer import LoopTrainer, training_arguments

    class InOrder(LoopTrainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(dataset)

    trained = build("elastic-flt", training.FAST)
    InOrder(trained, training_arguments(tmp_path, num_steps=3, batch_size=2), dataset).train()
    # At these rates AdamW makes 1e-4 of rounding errors in gradients near zero.
    for ours, theirs in zip(trained.parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
