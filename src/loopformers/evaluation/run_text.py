"""Perplexity of a text as one more column beside tasks: see `loopformers.evaluation.perplexity` for the protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from loopformers import __version__
from loopformers.errors import ConfigError
from loopformers.evaluation.harness import LoopformersLM
from loopformers.evaluation.perplexity import (
    Stream,
    evaluate_perplexity,
    read_stream,
    strided_windows,
    tokenize_stream,
)
from loopformers.evaluation.results import ModelInfo, Protocol, Score
from loopformers.evaluation.run_tasks import flops_per_token
from loopformers.schedule import Schedule

__all__ = ["PreparedText", "prepare_text"]

METRICS = ("token_perplexity", "byte_perplexity", "bits_per_byte", "accuracy")


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A text, ready to be put to models."""

    stream: Stream
    """The text."""
    protocol: Protocol
    """What it is and how it is cut."""
    num_requests: int = 1
    """It is scored in one go."""

    def score(self, lm: LoopformersLM, info: ModelInfo, schedule: Schedule | None, exit_rule: str | None) -> Score:
        """Return perplexities of the text, per token and per byte.

        Raises:
            ConfigError: An exit rule, with which there is no perplexity of one run.
        """
        if exit_rule is not None:
            raise ConfigError(f"exit_rule={exit_rule!r} and a perplexity: leave one of them out")
        start = time.perf_counter()
        ids, num_bytes = tokenize_stream(self.stream.text, lm.tokenizer)
        stride = max(1, lm.max_length // 2)
        windows = strided_windows(ids, context=lm.max_length, stride=stride, start_token=lm.tokenizer.bos_token_id)
        runs = None if schedule is None else [schedule]
        (result,) = evaluate_perplexity(lm.model, windows, num_bytes, runs=runs, batch_size=lm.batch_size)
        lm.on_progress(1)
        return Score(
            model=info.hash,
            num_loops=result.num_loops,
            schedule=result.schedule,
            exit_rule=None,
            flops_per_token=flops_per_token(lm.model, schedule),
            task=self.protocol.task,
            metric="token_perplexity",
            weight=0.0,
            values={name: getattr(result, name) for name in METRICS},
            standard_errors=dict.fromkeys(METRICS),
            questions={},
            seconds=time.perf_counter() - start,
        )


def prepare_text(source: str) -> PreparedText:
    """Read a text.

    Args:
        source: See `loopformers.evaluation.perplexity.read_stream`.

    Raises:
        DataError: It is missing, unreadable or empty.
    """
    stream = read_stream(source)
    protocol = Protocol(
        task=f"perplexity of {Path(source).name}",
        version="strided windows, stride of half a window",
        harness=f"loopformers {__version__}",
        source=Path(source).name,
        split="whole text",
        num_questions=1,
        limit=None,
        num_fewshot=0,
        seed=0,
        chat_template=False,
        prompts_hash=stream.digest,
        example=stream.text[:200],
    )
    return PreparedText(stream, protocol)
