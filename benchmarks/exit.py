"""What adaptive exit saves and costs: its time against a fixed budget, and the loss of what stands in deeper cache rows.

    python benchmarks/exit.py --threads 1 --json exit.json
    python benchmarks/exit.py --hidden-size 768 --num-heads 6 --repeats 2
    python benchmarks/exit.py --sections rows --models runs/quickstart/flt runs/quickstart/elastic-flt

Time: a batch of 8 decodes under a rule that is calibrated to an average budget, and at the fixed budgets on both sides of the
average that it took, in turn and in one process; the ratio is to their interpolation, the prompt at the prompt's average and the
new tokens at theirs. The clock is `speed.py`'s.

Rows: trained models score held-out windows under rules, by the readable reference, with each of the things that
can stand in for the keys and values of a token that has left.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from loopformers import LoopConfig, LoopedForCausalLM
from loopformers.errors import ExitWarning
from loopformers.evaluation.exit import calibrate
from loopformers.generation import ExitRule, parse_exit_rule
from loopformers.generation.reference import DeeperRows, exit_reference
from loopformers.model.transformers_range import CACHE_NAME

sys.path.insert(0, str(Path(__file__).parent))
from speed import environment, seconds

SECTIONS = ("time", "rows")
TARGET = 1.15
ROWS_RULES = ("kl:0.1", "kl:0.01", "kl:0.0005", "state:0.3", "state:0.1")
DEEPER_ROWS = get_args(DeeperRows)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is timed; FLT Small has this width and depth, and a vocabulary of 151,936."""

    hidden_size: int = 384
    num_heads: int = 3
    num_layers: int = 6
    num_loops: int = 12
    vocab_size: int = 2048
    batch_size: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 128
    average_loops: float = 4.0


FAST = Sizes(
    hidden_size=24,
    num_heads=2,
    num_layers=2,
    num_loops=6,
    vocab_size=61,
    prompt_tokens=5,
    new_tokens=9,
    average_loops=3,
)


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """One rule on one model. Loops are of new tokens, seconds of the whole call; quartiles are of the ratios.

    `longest_row`: loops of the row that needs most of them in all, by those of the mean row; a batch takes as long as that row.
    """

    preset: str
    rule: str
    average_loops: float
    spread: float
    longest_row: float
    adaptive_seconds: float
    fixed_seconds: float
    ratio: float
    quartiles: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class RowsRow:
    """One rule on one model: mean loops and loss of each choice, and at full depth."""

    model: str
    rule: str
    deeper_rows: str
    average_loops: float
    loss: float
    over_exact: float
    full_loss: float


class Spread(ExitRule):
    """Leaves after a number of loops that is uniform on 1..2M-1 by token: exit at its most uneven, at no cost of deciding."""

    name = "spread"

    def __init__(self, average_loops: float) -> None:
        self.threshold = 0.0
        self.deepest = round(2 * average_loops - 1)

    def score(self, look: Any, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        if memory is None:
            drawn = 1 + (look.state[:, 0].abs() * 1e4).long() % self.deepest
            memory = torch.stack([drawn, torch.zeros_like(drawn)], dim=-1)
        memory = memory + torch.tensor([0, 1])
        return (memory[:, 0] - memory[:, 1]).float(), memory


def random_model(preset: str, sizes: Sizes) -> LoopedForCausalLM:
    """Build a model whose weights keep the size of what goes through them, so that its loops differ."""
    config = LoopConfig.from_preset(
        preset,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_hidden_layers=sizes.num_layers,
        num_loops=sizes.num_loops,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.prompt_tokens + sizes.new_tokens,
    )
    model = LoopedForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def measure_time(presets: Sequence[str], sizes: Sizes, repeats: int, on_row: Any) -> None:
    """Time rules against fixed budgets."""
    for preset in presets:
        model = random_model(preset, sizes)
        prompt = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.prompt_tokens))
        windows = [{"input_ids": torch.randint(sizes.vocab_size, (sizes.prompt_tokens,))} for _ in range(8)]
        calibrated = [calibrate(model, name, windows, average_loops=sizes.average_loops) for name in ("state", "kl")]
        for rule in (Spread(sizes.average_loops), *calibrated):

            def decode(model: LoopedForCausalLM = model, prompt: Tensor = prompt, **run: Any) -> Any:
                return model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                    pad_token_id=0, return_dict_in_generate=True, **{"max_new_tokens": sizes.new_tokens, **run},
                )  # fmt: skip

            loops = decode(exit_rule=rule)[CACHE_NAME].exit_loops.float()
            of_prompt, of_new = loops[:, : sizes.prompt_tokens], loops[:, sizes.prompt_tokens :]
            times = []
            for _ in range(repeats):
                adaptive = seconds(lambda: decode(exit_rule=rule))  # noqa: B023
                whole = _interpolated(lambda m: seconds(lambda: decode(num_loops=m)), of_new, sizes)
                prompts = [
                    _interpolated(lambda m: seconds(lambda: decode(num_loops=m, max_new_tokens=1)), part, sizes)
                    for part in (of_prompt, of_new)
                ]
                times.append((adaptive, whole + prompts[0] - prompts[1]))
            ratios = [adaptive / fixed for adaptive, fixed in times]
            first, _, third = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
            on_row(
                TimeRow(
                    preset=preset,
                    rule=str(rule) if rule.name != "spread" else f"spread over 1..{rule.deepest}",
                    average_loops=of_new.mean().item(),
                    spread=of_new.std().item(),
                    longest_row=(of_new.sum(dim=1).max() / of_new.sum(dim=1).mean()).item(),
                    adaptive_seconds=statistics.median(adaptive for adaptive, _ in times),
                    fixed_seconds=statistics.median(fixed for _, fixed in times),
                    ratio=statistics.median(ratios),
                    quartiles=(first, third),
                )
            )


def _interpolated(seconds_at: Callable[[int], float], loops: Tensor, sizes: Sizes) -> float:
    """Return the time of a budget that is the mean of `loops`, from those of the whole numbers on both sides of it."""
    average = loops.mean().item()
    low = min(math.floor(average), sizes.num_loops - 1)
    below, above = seconds_at(low), seconds_at(low + 1)
    return below + (average - low) * (above - below)


def measure_rows(folders: Sequence[str], data: str, num_windows: int, on_row: Any) -> None:
    """Score trained models with each stand-in for deeper rows."""
    from loopformers.cli.checkpoint import load_config, load_model
    from loopformers.cli.text import add_text_arguments, read_scored_text

    parser = argparse.ArgumentParser()
    add_text_arguments(parser)
    options = parser.parse_args(["--data", data, "--windows", str(num_windows)])
    for folder in folders:
        model = load_model(folder)
        windows = read_scored_text(options, {folder: load_config(folder)})[folder].windows
        ids, labels = (torch.stack([torch.as_tensor(row[name]) for row in windows]) for name in ("input_ids", "labels"))

        def loss(logits: Tensor, labels: Tensor = labels) -> float:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()

        with torch.no_grad():
            full = loss(model(ids, use_cache=False).logits)
        for rule in map(parse_exit_rule, ROWS_RULES):
            found = {rows: exit_reference(model, ids, rule, deeper_rows=rows) for rows in DEEPER_ROWS}
            exact = loss(found["exact"][0])
            for rows, (logits, loops) in found.items():
                on_row(
                    RowsRow(
                        model=Path(folder).name,
                        rule=str(rule),
                        deeper_rows=rows,
                        average_loops=loops.float().mean().item(),
                        loss=loss(logits),
                        over_exact=loss(logits) - exact,
                        full_loss=full,
                    )
                )


def as_table(title: str, rows: Sequence[Any]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="left" if isinstance(getattr(rows[0], name), str) else "right")
    for row in rows:
        values = []
        for name, value in asdict(row).items():
            if isinstance(value, tuple):
                values.append(" to ".join(f"{x:.2f}" for x in value))
            else:
                digits = 4 if name in ("loss", "over_exact", "full_loss") else 2
                values.append(value if isinstance(value, str) else f"{value:.{digits}f}")
        table.add_row(*values)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and, on request, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=["time"], help="default: time")
    parser.add_argument("--presets", nargs="+", default=["flt", "loopformer"], help="timed (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=[], metavar="DIR", help="trained models whose rows are scored")
    parser.add_argument("--data", default="bundled", help="what they are scored on, or task (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=192, help="of it (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each (default: %(default)s)")
    for name in ("vocab_size", "hidden_size", "num_heads", "num_layers", "batch_size", "new_tokens"):
        default = getattr(Sizes(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of what is timed (default: {default})")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--fast", action="store_true", help="tiny sizes, whose numbers say nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    arguments = parser.parse_args(argv)
    if min(arguments.repeats, arguments.threads, arguments.windows) < 1:
        parser.error("--repeats, --threads and --windows must be at least 1")
    if "rows" in arguments.sections and not arguments.models:
        parser.error("the rows section scores trained models; name them with --models")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    sizes = FAST if arguments.fast else Sizes()
    given = {name: value for name, value in vars(arguments).items() if name in asdict(sizes) and value is not None}
    sizes = replace(sizes, **given)
    times: list[TimeRow] = []
    rows: list[RowsRow] = []
    console = Console()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        if "time" in arguments.sections:
            measure_time(arguments.presets, sizes, arguments.repeats, times.append)
            console.print(as_table(f"adaptive / fixed, batch {sizes.batch_size}, target {TARGET}", times))
        if "rows" in arguments.sections:
            measure_rows(arguments.models, arguments.data, arguments.windows, rows.append)
            console.print(as_table("what stands in deeper cache rows", rows))
    if arguments.json is not None:
        record = {"environment": environment(), "sizes": asdict(sizes), "seed": arguments.seed}
        record |= {"time": [asdict(row) for row in times], "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
