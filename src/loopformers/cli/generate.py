"""`loopformers generate`: continue a text, at one or several numbers of loops."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loopformers.cli.budgets import add_budget_arguments, parse_budgets
from loopformers.cli.console import argument_text, print_heading, print_json, print_note, read_stdin, write
from loopformers.cli.parser import count, number, seed
from loopformers.cli.paths import path
from loopformers.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from loopformers.generation.rules import ExitRule
    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.schedule import Schedule

__all__ = ["TextStream", "add_arguments", "run"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What half a character decodes to: a byte-level token may end inside one."""

MAX_NEW_TOKENS = 64
"""How many tokens are generated where nobody says how many, and the model's positions hold them."""

MAX_BEAMS = 1024
"""Each beam holds a cache of its own."""

HELD_OUT_WINDOWS = 32
HELD_OUT_TOKENS = 128
"""How much of the bundled validation text an exit rule is calibrated and measured on: a few seconds' worth."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Continue a text. Greedy unless --temperature, --top-k or --top-p is given (sampling) or --num-beams is above 1.\n"
        "Several numbers of loops give one text each, from the same seed. With --exit each token stops looping when the rule\n"
        "says so, after at most so many loops."
    )
    parser.epilog = (
        "examples:\n"
        '  loopformers generate runs/quickstart/elastic-flt --prompt "It was a" --num-loops 1,4,12\n'
        '  loopformers generate models/loopformer-3x8 --prompt "Once" --schedule coarse-first:4 --temperature 0.8 --seed 1\n'
        '  loopformers generate runs/quickstart/elastic-flt --prompt "It was a" --exit kl:5e-4\n'
        '  loopformers generate runs/quickstart/elastic-flt --prompt "It was a" --exit kl --average-loops 3'
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="folder of a checkpoint")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue; - reads it from stdin")
    add_budget_arguments(parser)
    parser.add_argument(
        "--exit",
        metavar="RULE",
        help="stop looping by token: kl:5e-4, entropy:0.01, state:0.05 or argmax:2; with --average-loops the name alone",
    )
    parser.add_argument(
        "--average-loops",
        type=number(above=0),
        metavar="M",
        help="set the threshold of --exit so that tokens of the bundled validation text get so many loops on average",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=count(),
        metavar="N",
        help=f"maximum number of new tokens (default: {MAX_NEW_TOKENS}, or fewer where the model has fewer positions)",
    )
    parser.add_argument(
        "--temperature",
        type=number(at_least=1e-6, at_most=1e6, advice="leave it out for greedy decoding"),
        metavar="X",
        help="sample, dividing logits by X",
    )
    parser.add_argument("--top-k", type=count(), metavar="K", help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        type=number(above=0, at_most=1),
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P",
    )
    parser.add_argument(
        "--num-beams", type=count(1, MAX_BEAMS), default=1, metavar="B", help="beam search (default: %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed for sampling (default: %(default)s)")
    parser.add_argument("--tokenizer", type=path, metavar="DIR", help="folder of the tokenizer (default: MODEL)")
    parser.add_argument("--json", action="store_true", help="print JSON: prompt, seed, and one sample a run")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    _check_exit(arguments)
    prompt = read_stdin("--prompt -") if arguments.prompt == "-" else argument_text("--prompt", arguments.prompt)
    from loopformers.cli.checkpoint import load_config, load_model, load_tokenizer
    from loopformers.model.saved_schedule import read_schedule
    from loopformers.model.tokenizer import continuation_text

    config = load_config(arguments.model)
    saved = read_schedule(arguments.model, config)
    schedules = parse_budgets(arguments.num_loops, arguments.schedule, config, default=saved)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    prompt_ids = _encode(tokenizer, prompt, config.vocab_size)
    options = _decoding(arguments, _new_tokens(arguments.max_new_tokens, len(prompt_ids), config))
    model = load_model(arguments.model)
    samples = []
    for schedule in schedules:
        on_text = None
        if not arguments.json and len(schedules) > 1:
            print_heading(_heading(schedule))
        model.model.warn_where_untrained(schedule)  # here, since notes go before the text
        rule = _exit_rule(arguments, model, tokenizer, schedule)  # may print some more
        if not arguments.json:
            write(prompt)
            on_text = write
        ids, loops = _generate(model, tokenizer, prompt_ids, schedule, options, arguments.seed, on_text, rule)
        if not arguments.json:
            write("\n\n" if len(schedules) > 1 and schedule is not schedules[-1] else "\n")
        sample = {
            "num_loops": schedule.num_loops,
            "schedule": str(schedule),
            "text": continuation_text(tokenizer, prompt_ids, ids),
            "token_ids": ids,
            "num_new_tokens": len(ids),
            "forward_flops_per_token": config.flops_per_token(schedule=schedule, seq_len=len(prompt_ids) + len(ids)),
        }
        if rule is not None:
            average = sum(loops) / len(loops)
            sample["exit"] = {"rule": str(rule), "average_loops": average, "loops": loops}
            print_note(
                f"exit {rule}: {average:.2f} of {schedule.num_loops} loops a token, over {len(loops)} new tokens"
            )
        samples.append(sample)
    if arguments.json:
        settings = {"prompt": prompt, "num_prompt_tokens": len(prompt_ids), "seed": arguments.seed, "decoding": options}
        print_json({"model": arguments.model, **settings, "samples": samples})
    return 0


class TextStream:
    """Hands on a text while it is generated, in whole characters: a streamer of `generate`.

    Args:
        tokenizer: Decodes.
        on_text: Called with each new piece.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.prompt_ids: list[int] = []
        self.ids: list[int] = []
        self.num_shown = 0
        self.is_prompt = True

    def put(self, value: Any) -> None:
        """Take the next tokens, of any shape; the first call brings the prompt, which is left out."""
        if self.is_prompt:
            self.is_prompt = False
            self.prompt_ids = value.flatten().tolist()
            return
        self.ids += value.flatten().tolist()
        text = self._text()
        if not text.endswith(REPLACEMENT):
            self._show(text)

    def end(self) -> None:
        """Show what is left."""
        self._show(self._text())

    def _text(self) -> str:
        from loopformers.model.tokenizer import continuation_text

        return continuation_text(self.tokenizer, self.prompt_ids, self.ids)

    def _show(self, text: str) -> None:
        if len(text) > self.num_shown:
            self.on_text(text[self.num_shown :])
            self.num_shown = len(text)


class _FiniteLogits:
    """Lets logits through as they are, unless there is no highest one: a logits processor of `generate`."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not scores.amax().isfinite():
            raise NonFiniteError(
                f"at {_heading(self.schedule)} the model's logits are not finite after {input_ids.shape[1]} tokens, so no next "
                "token can be chosen: its weights are damaged, or its states overflow; use fewer loops, or an earlier "
                "checkpoint"
            )
        return scores


def _generate(
    model: LoopedForCausalLM,
    tokenizer: Any,
    prompt_ids: list[int],
    schedule: Schedule,
    options: dict[str, Any],
    seed: int,
    on_text: Callable[[str], None] | None,
    rule: ExitRule | None,
) -> tuple[list[int], list[int]]:
    """Return the new tokens, and under a rule the loops that each of them took."""
    import warnings

    import torch

    from loopformers.errors import ExitWarning
    from loopformers.model.generation_settings import blame_generation_settings
    from loopformers.model.quiet import quiet_transformers
    from loopformers.model.tokenizer import continuation_text
    from loopformers.model.transformers_range import CACHE_NAME

    torch.manual_seed(seed)
    stream = None if on_text is None or options["num_beams"] > 1 else TextStream(tokenizer, on_text)
    stop = model.generation_config.eos_token_id  # several where a chat template ends turns with a token of its own
    stop = tokenizer.eos_token_id if stop is None else stop
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([prompt_ids], device=model.device)
    blame = blame_generation_settings(model.generation_config, model.name_or_path)
    with warnings.catch_warnings(), quiet_transformers(), blame:  # reminders would interrupt the text
        warnings.simplefilter("ignore", ExitWarning)  # _exit_rule has said it, with the loss
        output: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            schedule=schedule,
            streamer=stream,
            tokenizer=tokenizer,  # for the stop strings of a generation configuration
            eos_token_id=stop,
            pad_token_id=pad,
            use_cache=True,
            return_dict_in_generate=True,
            logits_processor=[_FiniteLogits(schedule)],
            **({} if rule is None else {"exit_rule": rule}),
            **options,
        )
    new: list[int] = output.sequences[0, len(prompt_ids) :].tolist()
    # A token comes out of the position before its own, and the last one was not run.
    loops = [] if rule is None else output[CACHE_NAME].exit_loops[0, len(prompt_ids) - 1 :].tolist()
    if on_text is not None and stream is None:
        on_text(continuation_text(tokenizer, prompt_ids, new))
    return new, loops


def _check_exit(arguments: argparse.Namespace) -> None:
    if arguments.exit is None:
        if arguments.average_loops is not None:
            raise ConfigError("--average-loops sets the threshold of a rule; name one, such as --exit kl")
        return
    if arguments.num_beams > 1:
        raise ConfigError("--exit with --num-beams: loops are counted by token, and beams share tokens; leave one out")
    if arguments.average_loops is None:
        from loopformers.generation.rules import parse_exit_rule

        parse_exit_rule(arguments.exit)
    elif ":" in arguments.exit:
        raise ConfigError(
            f"--exit {arguments.exit} has a threshold, and --average-loops would set it; write --exit "
            f"{arguments.exit.partition(':')[0]}, or leave --average-loops out"
        )


def _exit_rule(
    arguments: argparse.Namespace, model: LoopedForCausalLM, tokenizer: Any, schedule: Schedule
) -> ExitRule | None:
    """Return the rule that was asked for, calibrated where that was asked for, and say what an untrained model pays."""
    if arguments.exit is None:
        return None
    from loopformers.evaluation.exit import calibrate, measure_exit
    from loopformers.generation.rules import parse_exit_rule
    from loopformers.generation.untrained import exit_warning, why_untrained

    rule = None if arguments.average_loops is not None else parse_exit_rule(arguments.exit)
    if rule is not None and why_untrained(model.config) is None:
        return rule
    windows = _held_out(model, tokenizer)
    if rule is None:
        rule = calibrate(model, arguments.exit, windows, average_loops=arguments.average_loops, schedule=schedule)
        print_note(f"--exit {rule} gives {arguments.average_loops:g} loops on average on the bundled validation text")
    if why_untrained(model.config) is not None:
        measure_exit(model, rule, windows, schedule=schedule)
        print_note(f"warning: {exit_warning(model, rule)}")
    return rule


def _held_out(model: LoopedForCausalLM, tokenizer: Any) -> Sequence[dict[str, Any]]:
    """A few windows of the bundled validation text."""
    from loopformers.cli.text import check_tokenizer
    from loopformers.evaluation.text import read_documents, read_windows

    check_tokenizer(tokenizer, model.config.vocab_size, "the model")
    seq_len = min(model.config.max_position_embeddings, HELD_OUT_TOKENS)
    documents = read_documents("bundled", "validation")
    return read_windows(documents, tokenizer, seq_len=seq_len, num_windows=HELD_OUT_WINDOWS).windows


def _new_tokens(asked: int | None, num_prompt: int, config: LoopConfig) -> int:
    """Return how many tokens to generate; refuse more than the model has positions for, and note more than it was made for."""
    limit = config.max_position_embeddings
    left = limit - num_prompt
    number = asked or (min(MAX_NEW_TOKENS, left) if left > 0 else MAX_NEW_TOKENS)
    if number <= left:
        return number
    text = f"a prompt of {num_prompt} tokens and {number} new ones are more than the {limit} positions that this model "
    remedy = "shorten the prompt" if left < 1 else f"shorten the prompt, or give --max-new-tokens {left}"
    if config.position_embedding == "learned":
        raise ConfigError(f"{text}learned; {remedy}")
    print_note(f"warning: {text}is made for, and what comes after them may be worse; {remedy}")
    return number


def _decoding(arguments: argparse.Namespace, max_new_tokens: int) -> dict[str, Any]:
    """Return arguments of the model's `generate`."""
    sampling = {"temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given:
        given.setdefault("top_k", 0)  # transformers would cut to 50 tokens unasked
    return {
        "max_new_tokens": max_new_tokens,
        "num_beams": arguments.num_beams,
        "do_sample": bool(given),
        **given,
    }


def _encode(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    from loopformers.model.tokenizer import encode_prompt

    ids = encode_prompt(tokenizer, prompt)
    if not ids:
        raise ConfigError(f"--prompt {prompt!r} holds no token, and there is nothing to continue; give some text")
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"the tokenizer gives token {max(ids)}, and the model knows {vocab_size}; give the model's own with --tokenizer"
        )
    return ids


def _heading(schedule: Schedule) -> str:
    loops = f"{schedule.num_loops} loop{'s' if schedule.num_loops > 1 else ''}"
    return loops if schedule.is_uniform else f"{loops}: {schedule}"
