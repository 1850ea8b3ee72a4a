from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed.py"


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["speed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_smoke_test_measures_every_section_and_reports_it_twice(speed, tmp_path, capsys):
    path = tmp_path / "speed.json"
    assert speed.main(["--fast", "--repeats", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["speed.json"]
    assert {row["section"] for row in result["comparisons"]} == set(speed.SECTIONS)
    assert result["environment"]["threads"] == 1
    assert result["sizes"]["num_loops"] == 2
    for row in result["comparisons"]:
        assert row["ratio"] > 0
        assert row["passes"] == (row["ratio"] >= row["target"] if row["at_least"] else row["ratio"] <= row["target"])
    table = capsys.readouterr().out
    assert "training step: loopformer / GPT-2" in table
    assert "latent attention" in table


def test_operations_of_a_looped_model_are_counted_as_its_configuration_says(speed):
    model = speed.looped("flt", speed.FAST)
    ids = torch.randint(64, (2, 16))
    assert speed.count_flops(speed.forward(model, ids)) == model.config.forward_flops(batch_size=2, seq_len=16)


def test_memory_counts_each_storage_once_and_leaves_parameters_out(speed):
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8)

    def run() -> torch.Tensor:
        hidden = x @ weight  # saves x and the weight
        return (hidden.sin() + hidden.cos()).sum()  # both save `hidden`

    assert speed.saved_bytes(run, [weight]) == (4 * 8 + 4 * 8) * 4


def test_peak_memory_is_of_tensors_that_live_at_once(speed):
    with speed.PeakMemory() as memory:
        for _ in range(5):
            kept = torch.ones(100)
            kept.mul_(2)
            kept[:50].add_(1)
    assert 400 <= memory.peak_bytes <= 800  # the next one is made before the last one goes
    assert memory.live_bytes == 400


def test_a_ratio_is_the_median_over_pairs(speed):
    row = speed.compare([1.0, 2.0, 9.0], [2.0, 2.0, 3.0], section="flops", name="", unit="", target=1.05)
    assert row.ratio == 1.0
    assert row.passes
    faster = speed.compare([1.0], [12.0], invert=True, section="decoding", name="", unit="", target=10.0)
    assert faster.ratio == 12.0
    assert faster.passes


@pytest.mark.parametrize("argv", [["--threads", "0"], ["--width", "100"], ["--fast", "--width", "128"]])
def test_bad_arguments_end_with_usage(speed, argv):
    with pytest.raises(SystemExit) as error:
        speed.main(argv)
    assert error.value.code == 2
