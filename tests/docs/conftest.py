from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model


@pytest.fixture
def quickstart_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds what a page expects of a quickstart: `runs/quickstart/flt` and `elastic-flt`, tiny."""
    monkeypatch.chdir(tmp_path)
    tokenizer = bundled_tokenizer()
    for name in ("elastic-flt", "flt"):
        folder = tmp_path / "runs" / "quickstart" / name
        tiny_model(name, num_loops=12, vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tmp_path
