from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.cli.main import main


def info(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["info", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    record: dict[str, Any] = json.loads(output.out)
    return record


def test_json_holds_the_costs_of_the_configuration_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    config = LoopConfig.from_preset("loopformer")
    record = info(capsys, "loopformer", "--num-loops", "1,8,24")
    assert record["model"] == "loopformer"
    assert record["parameters"]["total"] == 278_169_600
    assert record["parameters"].pop("total") == sum(record["parameters"].values())
    assert record["seq_len"] == 1024
    assert [run["num_loops"] for run in record["runs"]] == [1, 8, 24]
    for run in record["runs"]:
        loops = run["num_loops"]
        assert run["forward_flops_per_token"] == config.flops_per_token(loops, seq_len=1024)
        assert run["training_flops_per_token"] == config.training_flops_per_token(loops, seq_len=1024)
        assert run["kv_bytes_per_token"] == config.kv_bytes_per_token(loops, bytes_per_element=2)


def test_schedules_length_and_precision_are_the_callers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule", "coarse-first:4", "--seq-len", "17", "--cache-dtype", "float32"]
    record = info(capsys, "elastic-flt", *arguments)
    config = LoopConfig.from_preset("elastic-flt")
    (run,) = record["runs"]
    assert (run["num_loops"], run["is_uniform"], record["seq_len"], record["cache_dtype"]) == (4, False, 17, "float32")
    assert run["forward_flops_per_token"] == config.flops_per_token(4, seq_len=17)
    assert run["kv_bytes_per_token"] == 4 * 2 * config.hidden_size * 4 * config.num_hidden_layers


def test_fields_of_a_preset_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    record = info(capsys, "flt", "--set", "num_loops=5", "--set", "hidden_size=96", "--set", "hidden_act=swiglu")
    config = LoopConfig.from_preset("flt", num_loops=5, hidden_size=96, hidden_act="swiglu")
    assert record["config"]["num_loops"] == 5
    assert record["parameters"]["total"] == config.num_parameters()
    assert [run["num_loops"] for run in record["runs"]] == [5]


def test_a_checkpoint_is_described_by_its_own_configuration(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(checkpoints / "elastic-flt")
    record = info(capsys, folder)
    model = LoopedForCausalLM.from_pretrained(folder)
    assert record["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert record["config"]["conditioning"] == "time_and_step"


def test_no_weights_are_read_or_built(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text((checkpoints / "lt" / "config.json").read_text())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(LoopedForCausalLM, "__init__", refuse)
    assert main(["info", str(tmp_path), "--json"]) == 0


def test_tables_show_parameters_and_costs_with_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "flt", "--num-loops", "1,12"]) == 0
    text = capsys.readouterr().out
    for part in (
        "127,303,680",
        "58,343,424",
        "45.8%",
        "MFLOP",
        "KiB",
        "uniform",
        "query_all",
        "Attention over 1,024 tokens",
    ):
        assert part in text
    assert "coda  " not in text.partition("Parameters")[2]  # parts without parameters are left out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ftl"], "preset='ftl' is not known; did you mean 'flt'?"),
        (["flt", "--set", "num_lops=3"], "field='num_lops' is not known; did you mean 'num_loops'?"),
        (["flt", "--set", "num_loops"], "--set num_loops is no assignment; write FIELD=VALUE"),
        (["flt", "--set", "num_loops=many"], "num_loops='many' must be a whole number"),
        (["flt", "--num-loops", "0"], "num_loops=0 must be a whole number of at least 1"),
        (["flt", "--schedule", "1/2,1/4,1/4"], "does not know step sizes"),
        (["flt", "--seq-len", "0"], "--seq-len: 0 must be a whole number from 1"),
    ],
)
def test_bad_input_is_one_line_on_stderr(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", *arguments, "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in output.err
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1


def test_fields_of_a_checkpoint_are_not_set(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(checkpoints / "lt"), "--set", "num_loops=3"]) == 2
    assert "--set num_loops=3: the sizes of a checkpoint are fixed" in capsys.readouterr().err
