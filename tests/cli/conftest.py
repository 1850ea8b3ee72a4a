from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of tiny models and the bundled tokenizer: elastic-flt, lt, loopformer (learned positions)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = bundled_tokenizer()
    for preset in ("elastic-flt", "lt", "loopformer"):
        tiny_model(preset, vocab_size=len(tokenizer)).save_pretrained(folder / preset)
        tokenizer.save_pretrained(folder / preset)
    return folder
