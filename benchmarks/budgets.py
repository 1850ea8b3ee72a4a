"""What it costs to score every budget from 1 to T: against the deepest run alone, and against every run by itself.

    python benchmarks/budgets.py --threads 1 --json budgets.json

Both sides of a ratio run in this process, in turn (A B, B A, ..), and a ratio is the median over such pairs. With one thread,
time is the CPU time of this process; with more, it is wall time. Operations are counted by torch, attention included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from speed import Comparison, compare, count_flops, interleaved

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.evaluation.budget import evaluate_budgets, sweep_budgets
from training import run

UNCONDITIONED = ("lt", "lt-input", "lt-query", "flt-residual", "flt", "base-loop")
CONDITIONED = ("loopformer", "elastic-flt")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is scored; the vocabulary is that of the bundled tokenizer. `narrow_size` is the quickstart's width."""

    hidden_size: int = 256
    narrow_size: int = 64
    num_layers: int = 3
    num_loops: int = 12
    vocab_size: int = 2048
    num_windows: int = 4
    seq_len: int = 256


FAST = Sizes(hidden_size=32, narrow_size=16, num_layers=2, num_loops=3, vocab_size=64, num_windows=2, seq_len=16)


def build(preset: str, sizes: Sizes, hidden_size: int) -> LoopedForCausalLM:
    """Build a model with the weights of a fixed seed."""
    torch.manual_seed(0)
    config = LoopConfig.from_preset(
        preset,
        hidden_size=hidden_size,
        num_attention_heads=max(1, hidden_size // 64),
        intermediate_size=4 * hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_loops=sizes.num_loops,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.seq_len,
    )
    return LoopedForCausalLM(config).eval()


def windows(sizes: Sizes) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocab_size, (sizes.num_windows, sizes.seq_len), generator=generator)
    return [{"input_ids": row} for row in ids]


def measure_shared(sizes: Sizes, repeats: int) -> list[Comparison]:
    """All budgets against the deepest alone, for models whose loops are told nothing of time."""
    rows = []
    for preset in UNCONDITIONED:
        rows += against_deepest(preset, sizes, sizes.hidden_size, repeats)
    return rows


def measure_narrow(sizes: Sizes, repeats: int) -> list[Comparison]:
    """The same where the head, which each budget needs for itself, costs nearly as much as a loop."""
    return against_deepest("flt", sizes, sizes.narrow_size, repeats)


def against_deepest(preset: str, sizes: Sizes, hidden_size: int, repeats: int) -> list[Comparison]:
    model = build(preset, sizes, hidden_size)

    def score(budgets: Sequence[int]) -> Callable[[], object]:
        return lambda: sweep_budgets(model, windows(sizes), budgets, batch_size=sizes.num_windows)

    every, deepest = score(range(1, sizes.num_loops + 1)), score([sizes.num_loops])
    times = interleaved({"every": every, "deepest": deepest}, repeats)
    name = f"budgets 1..{sizes.num_loops} / {sizes.num_loops} alone: {preset}, width {hidden_size}"
    counted = [count / 1e9 for count in (count_flops(every), count_flops(deepest))]
    return [
        compare([counted[0]], [counted[1]], section="shared", name=f"{name}, counted", unit="GFLOP", target=1.3),
        compare(times["every"], times["deepest"], section="shared", name=f"{name}, time", unit="s", target=1.3),
    ]


def measure_sum(sizes: Sizes, repeats: int) -> list[Comparison]:
    """All budgets against each by itself, as the reference runs them."""
    rows, budgets = [], range(1, sizes.num_loops + 1)
    for preset in (*CONDITIONED, "flt"):
        model = build(preset, sizes, sizes.hidden_size)
        runs = {
            "sweep": lambda model=model: sweep_budgets(model, windows(sizes), budgets, batch_size=sizes.num_windows),
            "alone": lambda model=model: evaluate_budgets(model, windows(sizes), budgets, batch_size=sizes.num_windows),
        }
        times = interleaved(runs, repeats)
        name = f"budgets 1..{sizes.num_loops} / each by itself: {preset}, width {sizes.hidden_size}"
        counted = [count_flops(runs[side]) / 1e9 for side in ("sweep", "alone")]
        rows += [
            compare([counted[0]], [counted[1]], section="sum", name=f"{name}, counted", unit="GFLOP", target=1.0),
            compare(times["sweep"], times["alone"], section="sum", name=f"{name}, time", unit="s", target=1.0),
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run this benchmark."""
    sections = {"shared": measure_shared, "narrow": measure_narrow, "sum": measure_sum}
    return run(argv, __doc__, sections, whole=Sizes(), fast=FAST)


if __name__ == "__main__":
    sys.exit(main())
