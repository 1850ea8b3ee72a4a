from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from loopformers.cli.checkpoint import load_config, load_model, load_tokenizer
from loopformers.errors import CheckpointError
from loopformers.model.quiet import quiet_transformers


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / "lt", tmp_path / "lt"))


def test_a_checkpoint_loads_with_its_tokenizer_and_says_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load_model(str(folder))
    tokenizer = load_tokenizer(str(folder))
    assert not model.training
    assert model.config.num_loops == load_config(str(folder)).num_loops == 3
    assert tokenizer.decode(tokenizer("It was")["input_ids"]) == "It was"
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is no folder; give the folder of a checkpoint"):
        load_config(str(tmp_path / "nowhere"))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json.* loopformers convert"):
        load_config(str(tmp_path))


def test_a_truncated_configuration_is_refused(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON, perhaps truncated"):
        load_config(str(folder))


@pytest.mark.parametrize("content", [{"model_type": "gpt2"}, {}])
def test_a_foreign_model_is_refused(folder: Path, content: object) -> None:
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"describes a model of type ('gpt2'|None), and this command opens 'loopformers'"
    ):
        load_model(str(folder))


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        load_model(str(folder))


def test_truncated_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="perhaps missing or truncated"):
        load_model(str(folder))


def test_weights_that_lack_a_parameter_or_hold_another_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    renamed = {
        name.replace("layers.0.mlp.up_proj", "layers.0.mlp.upp_proj"): tensor for name, tensor in weights.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing keys, the first model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(str(folder))
    save_file({**weights, "model.extra.weight": weights["lm_head.weight"].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 unexpected keys, the first model\.extra\.weight"):
        load_model(str(folder))


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 60}))
    with pytest.raises(CheckpointError, match=r"of shape .* and its configuration asks for"):
        load_model(str(folder))


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no tokenizer; name the folder of one with --tokenizer"):
        load_tokenizer(str(folder))


def test_a_truncated_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* does not load"):
        load_tokenizer(str(folder))


def test_quiet_gives_the_callers_logging_back() -> None:
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    with quiet_transformers():
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
