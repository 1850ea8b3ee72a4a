from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.errors import CheckpointError, ConfigError
from loopformers.model import memory_check
from loopformers.model.config import LoopConfig
from loopformers.model.memory_check import GIB, check_fits, check_weights, free_bytes, machine_bytes


def test_what_exceeds_the_memory_is_refused_with_both_numbers() -> None:
    check_fits(3 * GIB, "this", "give less", available=3 * GIB)
    check_fits(11 * GIB, "this", "give less", available=3 * GIB, room=4)
    with pytest.raises(ConfigError, match=r"this needs 3.5 GiB, and this machine has 3.0 GiB; give less"):
        check_fits(7 * GIB // 2, "this", "give less", available=3 * GIB)


def test_a_container_may_have_less_than_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = machine_bytes()
    assert 0 < free_bytes() <= machine
    limit, unlimited = tmp_path / "limit", tmp_path / "max"
    limit.write_text("12345678\n")
    unlimited.write_text("max\n")
    monkeypatch.setattr(memory_check, "CGROUP_LIMITS", (str(unlimited), str(tmp_path / "none"), str(limit)))
    assert machine_bytes() == 12345678
    assert free_bytes() <= 12345678


def test_weights_that_cannot_hold_the_parameters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoopConfig.from_preset("flt", hidden_size=24, num_hidden_layers=1, vocab_size=31)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x" * config.num_parameters())
    check_weights(tmp_path, config)
    wide = LoopConfig.from_preset("flt", hidden_size=2**20)
    with pytest.raises(
        CheckpointError, match=f"describes {wide.num_parameters():,} parameters, and the weights beside it have"
    ):
        check_weights(tmp_path, wide)
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 100)
    with pytest.raises(ConfigError, match=r"loading the weights in .* needs"):
        check_weights(tmp_path, config)
