"""Whether a change has cost speed: this tree against another checkout of the package, in turns.

    git worktree add ../before COMMIT
    python benchmarks/older.py ../before --json older.json

Each tree has a process of its own, which keeps its models. The two take turns (A B, B A, ..), and a ratio is the median over
such pairs, so a slow minute of a shared machine hits both. Times are the CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from speed import Comparison, compare, environment, render, write_json

import loopformers

HERE = Path(loopformers.__file__).parents[1]
TARGET = 1.02
WORK = ("training step", "forward", "decoding, batch 1", "decoding, batch 8")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run."""

    presets: tuple[str, ...] = ("flt", "loopformer")
    widths: tuple[int, ...] = (64, 256)
    num_layers: int = 3
    num_loops: int = 4
    vocab_size: int = 4096
    batch_size: int = 2
    seq_len: int = 256
    prompt_tokens: int = 32
    new_tokens: int = 24


FAST = Sizes(
    presets=("flt",), widths=(32,), num_layers=1, num_loops=2, vocab_size=64, seq_len=8, prompt_tokens=3, new_tokens=2
)


# -- the process of a tree ---------------------------------------------------------------------------------------


def build(preset: str, width: int, sizes: Sizes) -> Any:
    from loopformers import LoopConfig, LoopedForCausalLM

    torch.manual_seed(0)
    config = LoopConfig.from_preset(
        preset,
        hidden_size=width,
        num_attention_heads=max(1, width // 64),
        num_hidden_layers=sizes.num_layers,
        num_loops=sizes.num_loops,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=2 * sizes.seq_len,
    )
    return LoopedForCausalLM(config)


def do(work: str, model: Any, sizes: Sizes) -> None:
    """Do one piece of work."""
    ids = torch.randint(1, sizes.vocab_size, (sizes.batch_size, sizes.seq_len))
    if work == "training step":
        model.train()
        model(ids, labels=ids).loss.backward()
        model.zero_grad()
        return
    model.eval()
    if work == "forward":
        with torch.no_grad():
            model(ids)
        return
    prompts = torch.randint(1, sizes.vocab_size, (int(work.rpartition(" ")[2]), sizes.prompt_tokens))
    length = {"max_new_tokens": sizes.new_tokens, "min_new_tokens": sizes.new_tokens}
    model.generate(prompts, do_sample=False, pad_token_id=0, **length)


def serve(sizes: Sizes) -> None:
    """Answer each line on stdin, [work, preset, width], with the seconds that it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = {(preset, width): build(preset, width, sizes) for preset in sizes.presets for width in sizes.widths}
    print(loopformers.__file__, flush=True)
    for line in sys.stdin:
        work, *which = json.loads(line)
        started_at = time.process_time()
        do(work, models[tuple(which)], sizes)
        print(time.process_time() - started_at, flush=True)


class Tree:
    """A checkout, and the process that runs its code."""

    def __init__(self, source: Path, *, fast: bool) -> None:
        variables = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, ".", "--serve", *(["--fast"] if fast else [])]
        self.process = subprocess.Popen(
            command, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        started = self._answer()
        if not Path(started).is_relative_to(source.resolve()):
            self.close()
            raise SystemExit(f"error: {source} did not start ({started or 'it ended'}); give another checkout's folder")

    def seconds(self, work: str, preset: str, width: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([work, preset, width]) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


# -- the comparison ----------------------------------------------------------------------------------------------


def race(here: Tree, older: Tree, sizes: Sizes, repeats: int) -> list[Comparison]:
    """Compare the trees at every piece of work; two rounds before those that count warm up."""
    rows = []
    for work in WORK:
        for preset in sizes.presets:
            for width in sizes.widths:
                times: dict[Tree, list[float]] = {here: [], older: []}
                for turn in range(repeats + 2):
                    for tree in (here, older) if turn % 2 else (older, here):
                        times[tree].append(tree.seconds(work, preset, width))
                ours, theirs = ([1e3 * second for second in times[tree][2:]] for tree in (here, older))
                fields = {"section": work, "name": f"{work}: {preset}, width {width}", "unit": "ms", "target": TARGET}
                rows.append(compare(ours, theirs, **fields))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("older", type=Path, metavar="CHECKOUT", help="folder of another checkout of this package")
    parser.add_argument("--repeats", type=int, default=12, help="pairs that a ratio is the median of (default 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, too")
    parser.add_argument("--fast", action="store_true", help="tiny sizes: checks that it runs, measures nothing")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    sizes = FAST if arguments.fast else Sizes()
    if arguments.serve:
        serve(sizes)
        return 0
    torch.set_num_threads(1)
    older = Tree((arguments.older / "src").resolve(), fast=arguments.fast)
    here = Tree(HERE, fast=arguments.fast)
    try:
        rows = race(here, older, sizes, arguments.repeats)
    finally:
        here.close()
        older.close()
    about = environment()
    Console(width=None if sys.stdout.isatty() else 140).print(render(rows, about))  # no terminal, no edge to wrap at
    if arguments.json is not None:
        write_json(arguments.json, rows, about, sizes)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
