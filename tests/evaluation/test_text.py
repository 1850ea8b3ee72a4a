from __future__ import annotations

from pathlib import Path

import pytest

from loopformers import ConfigError, DataError
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.evaluation.text import read_documents, read_windows


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "days.txt"
    file.write_text("".join(f"On day {n} the sea was calm.\n" for n in range(400)), encoding="utf-8")
    return str(file)


def test_a_split_is_what_training_held_out_and_all_is_the_whole_source(source: str) -> None:
    whole = read_documents(source, "all")
    parts = [read_documents(source, split, split_by="tail")["text"][0] for split in ("train", "validation", "test")]
    assert "".join(parts) == whole["text"][0]
    with pytest.raises(ConfigError, match="split='dev' is not known"):
        read_documents(source, "dev")
    with pytest.raises(DataError, match="split is empty"):
        read_documents(source, "validation")


def test_windows_are_spread_over_the_text_and_no_more_than_asked_for(source: str) -> None:
    text = read_windows(read_documents(source, "all"), bundled_tokenizer(), seq_len=16, num_windows=5)
    assert [len(window["input_ids"]) for window in text.windows] == [16] * 5
    decoded = [bundled_tokenizer().decode(window["input_ids"]) for window in text.windows]
    assert "day 0" in decoded[0]
    assert "39" in decoded[-1]
    assert text.bytes_per_token is not None
    assert 1 < text.bytes_per_token < 8
    with pytest.raises(ConfigError, match="num_windows=0"):
        read_windows(read_documents(source, "all"), bundled_tokenizer(), seq_len=16, num_windows=0)
