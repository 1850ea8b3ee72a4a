"""Is a looped model as fast as its operations allow? Ratios against transformers, recomputing and uncheckpointed training.

    python benchmarks/speed.py --threads 1 --json speed.json

Both sides of every ratio run in this process, in turn (A B, B A, A B, ..), and a ratio is the median over such pairs, so
a slow minute of a shared machine hits both. With one thread, time is the CPU time of this process, which leaves out what
the neighbours take; with more, it is wall time.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from loopformers import LoopConfig, LoopedForCausalLM

SECTIONS = ("flops", "decoding", "checkpointing")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: `num_layers` layers run `num_loops` times, against `num_layers * num_loops` distinct ones."""

    hidden_size: int = 256
    num_heads: int = 4
    kv_lora_rank: int = 64
    num_layers: int = 3
    num_loops: int = 4
    vocab_size: int = 4096
    batch_size: int = 4
    seq_len: int = 256
    prompt_tokens: int = 128
    new_tokens: int = 256
    checkpointed_loops: int = 12


FAST = Sizes(
    hidden_size=32,
    num_heads=2,
    kv_lora_rank=8,
    num_layers=2,
    num_loops=2,
    vocab_size=64,
    batch_size=2,
    seq_len=16,
    prompt_tokens=3,
    new_tokens=5,
    checkpointed_loops=3,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line of the table: `ours / theirs`, each a median, and the median of the ratios of pairs.

    Attributes:
        section: flops, decoding or checkpointing.
        name: What is compared.
        unit: Unit of `ours` and `theirs`.
        ours: Ours.
        theirs: What it is compared with.
        ratio: Median over pairs of ours / theirs, or of theirs / ours where larger is better.
        quartiles: Of those ratios.
        target: Bound on the ratio.
        at_least: Whether the target is a lower bound.
    """

    section: str
    name: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    quartiles: tuple[float, float]
    target: float
    at_least: bool = False

    @property
    def passes(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


# -- measuring ---------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any]) -> float:
    """Time one call; the garbage collector runs before it and not in it."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    gc.collect()
    gc.disable()
    try:
        started_at = clock()
        run()
        return clock() - started_at
    finally:
        gc.enable()


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """Time each run `repeats` times, in turn and in alternating order, after one call of each to warm up."""
    for run in runs.values() if warm_up else ():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in list(runs) if repeat % 2 == 0 else reversed(runs):
            times[name].append(seconds(runs[name]))
    return times


def compare(ours: Sequence[float], theirs: Sequence[float], *, invert: bool = False, **fields: Any) -> Comparison:
    """Summarise paired measurements."""
    ratios = [b / a if invert else a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Comparison(
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        quartiles=(low, high),
        at_least=invert,
        **fields,
    )


def count_flops(run: Callable[[], Any]) -> int:
    """Count the operations of one call: matrix products and attention, a multiplication and an addition as two."""
    aten = torch.ops.aten
    attention = {  # torch's counter knows the CUDA kernels alone
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        run()
    return counter.get_total_flops()


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors made inside that live at once, at most; each storage counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in given and storage not in self.seen:  # neither a view nor written in place
                self.seen[storage] = True
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self.release, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def saved_bytes(run: Callable[[], Any], parameters: Sequence[Tensor]) -> int:
    """Count the bytes that a forward pass saves for its backward pass, parameters left out; each storage counts once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return sum(saved.values())


# -- models ------------------------------------------------------------------------------------------------------


def looped(preset: str, sizes: Sizes, **overrides: Any) -> LoopedForCausalLM:
    """Build one of ours."""
    fields: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": 4 * sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_loops": sizes.num_loops,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": max(sizes.seq_len, sizes.prompt_tokens + sizes.new_tokens),
    }
    model = LoopedForCausalLM(LoopConfig.from_preset(preset, **{**fields, **overrides}))
    # Fresh models have shut gates and zero output projections; nobody runs those, and denormal or zero activations are
    # not what their kernels are timed for.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def llama(sizes: Sizes) -> LlamaForCausalLM:
    """As many distinct layers as `looped` runs; SwiGLU at 8/3 of the width has the parameters of an MLP at 4 times it."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=round(8 / 3 * sizes.hidden_size),
            num_hidden_layers=sizes.num_layers * sizes.num_loops,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_heads,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.seq_len,
            use_cache=False,
        )
    )


def gpt2(sizes: Sizes) -> GPT2LMHeadModel:
    """As many distinct layers as `looped` runs, without dropout, which ours do not have."""
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=sizes.hidden_size,
            n_layer=sizes.num_layers * sizes.num_loops,
            n_head=sizes.num_heads,
            vocab_size=sizes.vocab_size,
            n_positions=sizes.seq_len,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # what transformers takes anyway, after a warning
    return model


def enable_checkpointing(model: Any) -> None:
    """Turn on one checkpoint a loop, by the name that this release of transformers has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def forward(model: Any, ids: Tensor) -> Callable[[], None]:
    """Return a forward pass without gradients or cache."""

    def run() -> None:
        model.eval()
        with torch.no_grad():
            model(ids, use_cache=False)

    return run


def training_step(model: Any, ids: Tensor) -> Callable[[], None]:
    """Return a forward and backward pass of the model's objective; of a random trajectory, always the same draw."""

    def run() -> None:
        model.train()
        if isinstance(model, LoopedForCausalLM):
            model.set_draw(0)
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return run


# -- the three questions -----------------------------------------------------------------------------------------


def measure_flops(sizes: Sizes, repeats: int) -> list[Comparison]:
    """Time per counted operation, ours against as many distinct layers of transformers' models."""
    ids = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.seq_len))
    ours = {"flt": looped("flt", sizes), "loopformer": looped("loopformer", sizes)}
    theirs = {"Llama": llama(sizes), "GPT-2": gpt2(sizes)}
    rows = []
    for what, make in (("forward", forward), ("training step", training_step)):
        runs = {name: make(model, ids) for name, model in (ours | theirs).items()}
        giga_flops = {name: count_flops(run) / 1e9 for name, run in runs.items()}
        times = interleaved(runs, repeats)
        cost = {name: [t / giga_flops[name] * 1e3 for t in values] for name, values in times.items()}
        rows += [
            compare(cost[a], cost[b], section="flops", name=f"{what}: {a} / {b}", unit="ms per GFLOP", target=1.05)
            for a in ours
            for b in theirs
        ]
    return rows


def measure_decoding(sizes: Sizes, repeats: int) -> list[Comparison]:
    """Greedy decoding through `generate`, with the cache against recomputing every token."""
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "flt": ("flt", {}),
        "loopformer": ("loopformer", {}),
        "flt with latent attention": ("flt", {"kv_lora_rank": sizes.kv_lora_rank}),
    }
    prompt = torch.randint(sizes.vocab_size, (1, sizes.prompt_tokens))
    rows = []
    for name, (preset, overrides) in variants.items():
        model = looped(preset, sizes, **overrides).eval()

        def decode(use_cache: bool, new_tokens: int, model: LoopedForCausalLM = model) -> Tensor:
            return model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, use_cache=use_cache)

        decode(True, 2)
        decode(False, 2)
        runs = {
            "cached": partial(decode, True, sizes.new_tokens),
            "recomputed": partial(decode, False, sizes.new_tokens),
        }
        times = interleaved(runs, repeats, warm_up=False)
        per_token = {k: [1e3 * t / sizes.new_tokens for t in v] for k, v in times.items()}
        rows.append(
            compare(
                per_token["cached"],
                per_token["recomputed"],
                invert=True,
                section="decoding",
                name=f"{sizes.new_tokens} tokens: {name}, recomputed / cached",
                unit="ms per token",
                target=10.0,
            )
        )
    return rows


def measure_checkpointing(sizes: Sizes, repeats: int) -> list[Comparison]:
    """Memory and time of a training step with one checkpoint a loop against none."""
    loops = sizes.checkpointed_loops
    ids = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.seq_len))
    rows = []
    for preset in ("flt", "loopformer"):
        plain, checkpointed = (looped(preset, sizes, num_loops=loops, objective="last_loop") for _ in range(2))
        enable_checkpointing(checkpointed)
        step = {False: training_step(plain, ids), True: training_step(checkpointed, ids)}
        saved, peak = {}, {}
        for flag, model in ((False, plain), (True, checkpointed)):
            model.train()
            saved[flag] = saved_bytes(
                lambda m=model: m(ids, labels=ids, use_cache=False).loss, list(model.parameters())
            )
            with PeakMemory() as memory:
                step[flag]()
            peak[flag] = memory.peak_bytes
        times = interleaved({"with": step[True], "without": step[False]}, repeats)
        title = f"{preset}, T = {loops}, checkpointed / not"
        rows += [
            compare([b[True] / MIB], [b[False] / MIB], section="checkpointing", name=f"{what}: {title}", unit="MiB", target=1 / 3)
            for what, b in (("saved by the forward", saved), ("peak of the step", peak))
        ]  # fmt: skip
        milliseconds = {k: [1e3 * t for t in v] for k, v in times.items()}
        rows.append(
            compare(
                milliseconds["with"],
                milliseconds["without"],
                section="checkpointing",
                name=f"time of the step: {title}",
                unit="ms",
                target=1.4,
            )
        )
    return rows


MEASURE: dict[str, Callable[[Sizes, int], list[Comparison]]] = {
    "flops": measure_flops,
    "decoding": measure_decoding,
    "checkpointing": measure_checkpointing,
}


# -- reporting ---------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Describe what the numbers depend on."""
    threads = torch.get_num_threads()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "clock": "CPU time" if threads == 1 else "wall time",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def render(rows: Sequence[Comparison], about: dict[str, Any]) -> Table:
    """Lay the comparisons out as a table."""
    table = Table(title="Speed", caption=", ".join(f"{key} {value}" for key, value in about.items()))
    for column in ("comparison", "unit", "ours", "compared with", "ratio", "quartiles", "target", "verdict"):
        table.add_column(column, justify="left" if column in ("comparison", "unit", "verdict") else "right")
    for i, row in enumerate(rows):
        bound = "at least" if row.at_least else "at most"
        table.add_row(
            row.name,
            row.unit,
            f"{row.ours:.2f}",
            f"{row.theirs:.2f}",
            f"{row.ratio:.3f}",
            "{:.3f} .. {:.3f}".format(*row.quartiles),
            f"{bound} {row.target:.3g}",
            "[green]pass[/]" if row.passes else "[red]miss[/]",
            end_section=i + 1 < len(rows) and rows[i + 1].section != row.section,
        )
    return table


def write_json(path: Path, rows: Sequence[Comparison], about: dict[str, Any], sizes: Sizes) -> None:
    """Write the results beside `path` and rename, so that no half-written file is left."""
    result = {
        "environment": about,
        "sizes": asdict(sizes),
        "comparisons": [asdict(row) | {"passes": row.passes} for row in rows],
    }
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="example: python benchmarks/speed.py --threads 1 --only decoding"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1; 2 shared cores are noisy)")
    parser.add_argument("--repeats", type=int, default=9, help="pairs that a ratio is the median of (default 9)")
    parser.add_argument("--width", type=int, help="hidden size, in heads of 64 (default 256)")
    parser.add_argument(
        "--prompt-tokens", type=int, help="length of the prompt that decoding starts from (default 128)"
    )
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this section; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, too")
    parser.add_argument("--fast", action="store_true", help="tiny sizes: checks that it runs, measures nothing")
    arguments = parser.parse_args(argv)
    if arguments.threads < 1 or arguments.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    if arguments.width is not None and (arguments.width < 64 or arguments.width % 64):
        parser.error("--width must be a multiple of 64")
    if arguments.prompt_tokens is not None and arguments.prompt_tokens < 1:
        parser.error("--prompt-tokens must be at least 1")
    if arguments.fast and (arguments.width or arguments.prompt_tokens):
        parser.error("--fast has sizes of its own; leave --width and --prompt-tokens out")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return 0 when every target is met and 1 otherwise."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    sizes = FAST if arguments.fast else Sizes()
    if (width := arguments.width) is not None:
        sizes = replace(sizes, hidden_size=width, num_heads=width // 64, kv_lora_rank=width // 4)
    if arguments.prompt_tokens is not None:
        sizes = replace(sizes, prompt_tokens=arguments.prompt_tokens)
    rows: list[Comparison] = []
    for section in arguments.only or SECTIONS:
        repeats = min(arguments.repeats, 3) if section == "decoding" else arguments.repeats  # recomputing takes long
        rows += MEASURE[section](sizes, repeats)
    about = environment()
    Console(width=160).print(render(rows, about))
    if arguments.json is not None:
        write_json(arguments.json, rows, about, sizes)
    return 0 if arguments.fast or all(row.passes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
