"""What the trainer costs: its speed against a bare PyTorch loop, and the memory of the loss in chunks.

    python benchmarks/training.py --threads 1 --json training.json

The runs of a comparison train the same model on the same windows in this process, one update each in turn (A B, B A, ..),
and a ratio is the median over such rounds, so a slow minute of a shared machine hits all. With one thread, time is the CPU
time of this process; with more, it is wall time.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
from speed import MIB, Comparison, PeakMemory, compare, environment, render, write_json

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.training.engine import EngineSettings
from loopformers.training.optimizers import MuonAdamW
from loopformers.training.trainer import LoopTrainer, training_arguments


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained."""

    presets: tuple[str, ...] = ("flt", "elastic-flt")
    hidden_size: int = 256
    num_heads: int = 4
    num_layers: int = 3
    num_loops: int = 6
    vocab_size: int = 4096
    batch_size: int = 4
    seq_len: int = 256
    loss_vocab_size: int = 50304
    loss_seq_len: int = 1024
    chunk_tokens: int = 128


FAST = Sizes(
    hidden_size=32, num_heads=2, num_layers=2, num_loops=2, vocab_size=64, batch_size=2, seq_len=16, loss_vocab_size=4096,
    loss_seq_len=32, chunk_tokens=4,
)  # fmt: skip


def build(preset: str, sizes: Sizes, **overrides: Any) -> LoopedForCausalLM:
    torch.manual_seed(0)
    fields = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_loops": sizes.num_loops,
        "max_position_embeddings": max(sizes.seq_len, sizes.loss_seq_len),
    }
    return LoopedForCausalLM(LoopConfig.from_preset(preset, **{**fields, **overrides}))


def windows(sizes: Sizes, num_steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocab_size, (num_steps * sizes.batch_size, sizes.seq_len), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


# -- runs that take turns ------------------------------------------------------------------------------------------


class Turns:
    """Lets training runs, each in a thread of its own, make one update at a time, and times them.

    Args:
        runs: By name: trains, and calls what it is given after each update.
        warm_up: Updates of each that are not timed.
    """

    def __init__(self, runs: dict[str, Callable[[Callable[[], None]], None]], *, warm_up: int = 2) -> None:
        self.go = {name: threading.Semaphore(0) for name in runs}
        self.done = threading.Semaphore(0)
        self.warm_up = warm_up
        self.failure: BaseException | None = None
        num_threads = torch.get_num_threads()
        self.threads = [
            threading.Thread(target=self._train, args=(name, run, num_threads), daemon=True)
            for name, run in runs.items()
        ]

    def _train(self, name: str, run: Callable[[Callable[[], None]], None], num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # OpenMP keeps the number by thread

        def pause() -> None:
            self.done.release()
            self.go[name].acquire()

        self.go[name].acquire()
        try:
            run(pause)
        except BaseException as error:
            self.failure = error
        self.done.release()

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return seconds of `rounds` updates by run."""
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        times: dict[str, list[float]] = {name: [] for name in self.go}
        for thread in self.threads:
            thread.start()
        for turn in range(self.warm_up + rounds):
            gc.collect()
            gc.disable()
            for name in list(self.go) if turn % 2 == 0 else reversed(self.go):
                started_at = clock()
                self.go[name].release()
                self.done.acquire()
                if self.failure is not None:
                    raise self.failure
                if turn >= self.warm_up:
                    times[name].append(clock() - started_at)
            gc.enable()
        for name, thread in zip(self.go, self.threads, strict=True):
            self.go[name].release()  # to its end
            thread.join()
        if self.failure is not None:
            raise self.failure
        return times


class Pause(TrainerCallback):
    """Hands over after each update but the last."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < state.max_steps:
            self.pause()


def trainer_run(
    folder: Path, preset: str, sizes: Sizes, num_steps: int, engine: EngineSettings
) -> Callable[[Callable[[], None]], None]:
    def run(pause: Callable[[], None]) -> None:
        arguments = training_arguments(folder, num_steps=num_steps, batch_size=sizes.batch_size, save_strategy="no")
        data = windows(sizes, num_steps)
        trainer = LoopTrainer(
            build(preset, sizes), arguments, data, engine=engine, unigram_loss=7.0, callbacks=[Pause(pause)]
        )
        trainer.train()

    return run


def bare_run(preset: str, sizes: Sizes, num_steps: int) -> Callable[[Callable[[], None]], None]:
    """The loop that one would write by hand: data, forward, backward, clip, update."""

    def run(pause: Callable[[], None]) -> None:
        model = build(preset, sizes).train()
        optimizer = MuonAdamW().build(model)
        for step, batch in enumerate(DataLoader(windows(sizes, num_steps), batch_size=sizes.batch_size)):
            model.set_draw(step)
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            if step + 1 < num_steps:
                pause()

    return run


# -- sections ------------------------------------------------------------------------------------------------------


def take_turns(
    preset: str, sizes: Sizes, repeats: int, engines: dict[str, EngineSettings | None]
) -> dict[str, list[float]]:
    """Return milliseconds of updates by name; no engine: the bare loop."""
    warm_up = 2
    num_steps = warm_up + repeats + 1
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: bare_run(preset, sizes, num_steps)
            if engine is None
            else trainer_run(Path(folder) / name, preset, sizes, num_steps, engine)
            for name, engine in engines.items()
        }
        times = Turns(runs, warm_up=warm_up).measure(repeats)
    return {name: [1000 * value for value in values] for name, values in times.items()}


def measure_speed(sizes: Sizes, repeats: int) -> list[Comparison]:
    rows = []
    for preset in sizes.presets:
        millis = take_turns(preset, sizes, repeats, {"bare": None, "trainer": EngineSettings()})
        name = f"{preset}: speed of LoopTrainer, diagnostics on / a bare loop"
        rows.append(
            compare(
                millis["trainer"],
                millis["bare"],
                invert=True,
                section="speed",
                name=name,
                unit="ms a step",
                target=0.95,
            )
        )
    return rows


def loss_step(model: LoopedForCausalLM, ids: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids).loss.backward()


def measure_memory(sizes: Sizes, repeats: int) -> list[Comparison]:
    rows = []
    for preset in sizes.presets:
        model = build(preset, sizes, vocab_size=sizes.loss_vocab_size, num_loops=2).train()
        ids = torch.randint(sizes.loss_vocab_size, (1, sizes.loss_seq_len))
        peaks = {}
        for name, chunk_tokens in (("whole", None), ("chunks", sizes.chunk_tokens)):
            model.loss_chunk_tokens = chunk_tokens
            model.set_draw(0)
            with PeakMemory() as memory:
                loss_step(model, ids)
            peaks[name] = memory.peak_bytes / MIB
            model.zero_grad(set_to_none=True)
        rows.append(
            compare(
                [peaks["chunks"]],
                [peaks["whole"]],
                section="memory",
                name=f"{preset}: peak of a step, loss in chunks of {sizes.chunk_tokens} / whole, vocabulary "
                f"{sizes.loss_vocab_size}, {sizes.loss_seq_len} tokens",
                unit="MiB",
                target=0.5,
            )
        )
    return rows


def run(
    argv: Sequence[str] | None,
    about: str,
    measure: dict[str, Callable[[Any, int], list[Comparison]]],
    *,
    whole: Any = None,
    fast: Any = FAST,
) -> int:
    """Measure, print the table, and return 0 when every target is met and 1 otherwise."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1; 2 shared cores are noisy)")
    parser.add_argument("--repeats", type=int, default=20, help="updates that a ratio is the median of (default 20)")
    parser.add_argument("--only", choices=list(measure), action="append", help="measure this section; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, too")
    parser.add_argument("--fast", action="store_true", help="tiny sizes: checks that it runs, measures nothing")
    arguments = parser.parse_args(argv)
    if arguments.threads < 1 or arguments.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    torch.set_num_threads(arguments.threads)
    sizes = fast if arguments.fast else whole or Sizes()
    rows = [row for section in arguments.only or measure for row in measure[section](sizes, arguments.repeats)]
    context = environment()
    Console(width=180).print(render(rows, context))
    if arguments.json is not None:
        write_json(arguments.json, rows, context, sizes)
    return 0 if arguments.fast or all(row.passes for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run this benchmark."""
    return run(argv, __doc__, {"speed": measure_speed, "memory": measure_memory})


if __name__ == "__main__":
    sys.exit(main())
