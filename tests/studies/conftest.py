from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopformers.studies.results import CellResult


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text file and room beside it for prepared text."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    lines = (
        f"On day {n} the sea was {('calm', 'rough', 'grey')[n % 3]}, and {n * 7} gulls came.\n" for n in range(300)
    )
    (folder / "one.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def content(texts: Path) -> dict[str, Any]:
    """A grid file's content: cells that train in half a second."""
    return {
        "title": "A tiny study",
        "base": {
            "model": {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "num_loops": 2},
            "data": {
                "sources": [str(texts)],
                "seq_len": 17,
                "split_by": "tail",
                "cache_dir": str(texts.parent / "cache"),
            },
            "training": {"steps": 4, "batch_size": 3, "checkpoint_interval": 2},
            "evaluation": {"budgets": [1, 3], "windows": 5, "interval": 2},
        },
        "blocks": [{"model.preset": ["lt", "flt"], "training.seed": [0, 1]}],
    }


STEPS = 20


def make_result(system: str, loops: int, seed: int, loss: float | None, **fields: Any) -> CellResult:
    """A cell's result as a study records it, with curves that follow from the loss."""
    verdict = "exploding" if loss is None else "collapsed" if loss > 6.1 else "stable"
    scored = [] if loss is None else [(loops, loss), (1, loss + 0.3), (16, loss + 0.1)]
    base: dict[str, Any] = {
        "cell": f"{system}_T{loops}_seed{seed}",
        "status": "diverged" if loss is None else "finished",
        "axes": {"system": system, "loops": loops, "seed": seed},
        "recipe": {
            "model": {"preset": system, "num_hidden_layers": 3, "hidden_size": 64},
            "training": {"steps": STEPS, "batch_size": 8, "seed": seed},
            "data": {"seq_len": 64, "sources": ["bundled"]},
        },
        "run": {
            "loss": loss, "unigram_loss": 6.4, "verdict": verdict, "reason": "because", "verdict_since": 12,
            "steps": STEPS, "tokens_seen": 512 * STEPS, "training_flops": 2.5e11 * loops, "num_parameters": 409_600,
            "budgets": [
                {"num_loops": m, "schedule": ",".join([f"1/{m}"] * m), "loss": value} for m, value in scored
            ],
        },
        "stability": {
            "oscillation": {"windowed_log_std": 0.5, "mean_relative_change": 0.25, "num_spikes": seed},
            "residual": {"per_loop": 1.1, "over_training": 3.0, "last_norm": 40.0 + seed, "num_non_finite": 0},
        },
        "verdicts": [{"step": 6, "verdict": "stable"}, {"step": 12, "verdict": verdict}],
        "loop_use": {
            "num_loops": loops, "loss": loss, "num_windows": 4,
            "swapped_loss": None if loops == 1 or loss is None else loss + 0.5,
            "zeroed_loss": None if loops == 1 or loss is None else loss + 0.75,
            "state_changes": [0.5**i for i in range(1, loops)],
        } if loss is not None else {},
        "curves": {
            "step": list(range(1, STEPS + 1)),
            "loss": [7.5 - 0.05 * step for step in range(STEPS)],
            "gradient_norm": [1.0 + 0.5 * (step % 2) for step in range(STEPS)],
            "residual_norms": [[8.0 + step + i for i in range(loops)] for step in range(STEPS)],
            "state_cosines": [[0.9] * (loops - 1)] * STEPS,
        },
        "seconds": 2.0 * loops,
        "versions": {"loopformers": "0", "torch": "2"},
    }  # fmt: skip
    return CellResult(**{**base, **copy.deepcopy(fields)})


@pytest.fixture
def make() -> Callable[..., CellResult]:
    """`make_result`."""
    return make_result
