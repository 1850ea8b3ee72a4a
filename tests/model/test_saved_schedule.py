"""A schedule saved in the generation configuration is what generate() runs where none is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from loopformers import CheckpointError, ConfigError, LoopedForCausalLM, Schedule
from loopformers.model.saved_schedule import GENERATION_CONFIG_FILE, read_schedule, save_schedule
from loopformers.testing import tiny_model

IDS = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(4))
COARSE = Schedule.parse("1/2,1/4,1/4", num_loops=None, grid=4)


def checkpoint(folder: Path, preset: str = "elastic-flt", **overrides: object) -> Path:
    tiny_model(preset, num_loops=4, **overrides).save_pretrained(folder)
    return folder


def generate(model: LoopedForCausalLM, **asked: object) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=6, do_sample=False, **asked)


def runs_seen(model: LoopedForCausalLM) -> list[str]:
    seen: list[str] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(str(model.config.resolve_schedule(None, kwargs.get("schedule")))),
        with_kwargs=True,
    )
    return seen


def test_generate_runs_the_saved_schedule_and_any_other_that_is_asked_for(tmp_path: Path) -> None:
    save_schedule(checkpoint(tmp_path), COARSE, tiny_model("elastic-flt", num_loops=4).config)
    model = LoopedForCausalLM.from_pretrained(tmp_path).double().eval()
    fresh = tiny_model("elastic-flt", num_loops=4).double()
    seen = runs_seen(model)
    assert torch.equal(generate(model), generate(fresh, schedule=COARSE))
    assert set(seen) == {str(COARSE)}
    assert torch.equal(generate(model, num_loops=2), generate(fresh, num_loops=2))
    assert torch.equal(generate(model, schedule="fine-first:2"), generate(fresh, schedule="fine-first:2"))
    settings = GenerationConfig(max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(IDS, generation_config=settings), generate(fresh, schedule=COARSE))
    model.generation_config.schedule = None
    assert torch.equal(generate(model), generate(fresh))


def test_saving_keeps_the_other_settings_and_survives_saving_the_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one", eos_token_id=60, pad_token_id=3)
    config = tiny_model("elastic-flt", num_loops=4).config
    before = json.loads((folder / GENERATION_CONFIG_FILE).read_text())
    save_schedule(folder, COARSE, config)
    after = json.loads((folder / GENERATION_CONFIG_FILE).read_text())
    assert after.pop("schedule") == str(COARSE)
    before.pop("_from_model_config")
    assert after == before
    LoopedForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "two")
    assert read_schedule(tmp_path / "two", config) == COARSE
    (folder / GENERATION_CONFIG_FILE).unlink()
    assert read_schedule(folder, config) is None
    save_schedule(folder, Schedule.uniform(2), LoopedForCausalLM.from_pretrained(folder).config)
    model = LoopedForCausalLM.from_pretrained(folder)
    assert (model.generation_config.eos_token_id, model.generation_config.schedule) == (60, "1/2,1/2")


def test_a_saved_schedule_that_the_model_cannot_run_is_refused(tmp_path: Path) -> None:
    folder, config = checkpoint(tmp_path, "lt"), tiny_model("lt", num_loops=4).config
    with pytest.raises(ConfigError, match="unequal steps"):
        save_schedule(folder, COARSE, config)
    assert "schedule" not in json.loads((folder / GENERATION_CONFIG_FILE).read_text())
    (folder / GENERATION_CONFIG_FILE).write_text('{"schedule": "1/2,1/4,1/4"}')
    with pytest.raises(ConfigError, match="generation configuration names"):
        read_schedule(folder, config)
    with pytest.raises(ConfigError, match="generation configuration names"):
        generate(LoopedForCausalLM.from_pretrained(folder))
    (folder / GENERATION_CONFIG_FILE).write_text('{"schedule": "quick"}')
    with pytest.raises(ConfigError, match="'quick' is not known"):
        read_schedule(folder, config)
    (folder / GENERATION_CONFIG_FILE).write_text('{"schedule"')
    with pytest.raises(CheckpointError, match="is not readable JSON"):
        read_schedule(folder, config)
    (folder / GENERATION_CONFIG_FILE).write_text("[]")
    with pytest.raises(CheckpointError, match="contains a value of type list but must contain an object"):
        save_schedule(folder, Schedule.uniform(2), config)
