"""Generate with as many loops as each token needs, at an average that you choose.

    python examples/adaptive_exit.py runs/quickstart/elastic-flt --average-loops 3

Finds the threshold that gives the average on held-out text, says what it costs there, and generates with it.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from transformers import AutoTokenizer

from loopformers import LoopedForCausalLM
from loopformers.errors import ExitWarning
from loopformers.evaluation.exit import calibrate, measure_exit
from loopformers.evaluation.text import read_documents, read_windows
from loopformers.model.transformers_range import CACHE_NAME


def main(argv: list[str] | None = None) -> None:
    """Calibrate, measure, generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder of a checkpoint and its tokenizer")
    parser.add_argument("--average-loops", type=float, default=3.0, help="default: %(default)s")
    parser.add_argument("--rule", default="kl", help="kl, entropy or state (default: %(default)s)")
    parser.add_argument("--prompts", nargs="+", default=["It was a", "The whale", "In the year"])
    parser.add_argument("--max-new-tokens", type=int, default=20)
    arguments = parser.parse_args(argv)

    model = LoopedForCausalLM.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    length = min(128, model.config.max_position_embeddings)
    held_out = read_windows(read_documents("bundled", "validation"), tokenizer, seq_len=length, num_windows=32).windows

    rule = calibrate(model, arguments.rule, held_out, average_loops=arguments.average_loops)
    print(f"{rule}: {measure_exit(model, rule, held_out)}")

    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(arguments.prompts, return_tensors="pt", padding=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)  # the line above says what it says
        output = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            exit_rule=rule,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
        )
    loops = output[CACHE_NAME].exit_loops  # (batch, tokens), 0 for padding
    for text, row in zip(tokenizer.batch_decode(output.sequences, skip_special_tokens=True), loops, strict=True):
        run = row[row > 0]
        print(f"{run.double().mean():.2f} loops a token, {' '.join(map(str, run.tolist()))}\n  {text}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
