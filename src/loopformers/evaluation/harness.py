"""lm-evaluation-harness runs our models: the harness's `LM`, with a number of loops, a schedule or an exit rule.

A subclass of the harness's own `HFLM`, which keeps its rolling windows, stop strings and chat templates, so
that a prompt here is a prompt there. What differs:

- the model runs along a schedule, in scoring and in generation;
- a tokenizer whose template ends texts does not end contexts, and a rolling text has one start token, not two;
- choices of one question share the cache of their context: the context runs once, not once a choice. The cache of a looped
  model is exact, so the scores are those of whole sequences (up to rounding). Other models run whole sequences;
- logits are made for continuations alone, and summed in float64;
- requests that are too long are counted as they are cut (the harness cuts them on the left and keeps only a log line).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from loopformers.errors import ConfigError, DataError, NonFiniteError, check_count, unknown_name
from loopformers.evaluation.models import check_tokenizer, is_looped, load_any_model
from loopformers.model.generation_settings import blame_generation_settings
from loopformers.model.tokenizer import encode_prompt, framing, open_tokenizer
from loopformers.schedule import Schedule

__all__ = ["MODEL_NAME", "LoopformersLM", "register"]

MODEL_NAME = "loopformers"
"""What the harness knows the class by: `--model loopformers`."""

RUN_ARGUMENTS = {"num_loops", "schedule", "exit_rule"}
"""What every forward and every generation of a model is called with."""

MODEL_ARGUMENTS = ("pretrained", "tokenizer", *sorted(RUN_ARGUMENTS), "batch_size", "max_batch_size", "max_length", "device",
                   "dtype", "share_contexts", "add_bos_token")  # fmt: skip
"""What `--model_args` may hold."""

MAX_TIMES = 1000
"""Most searches for a batch size."""

HARNESS_DEVICE = "cuda:0"
"""What the harness's command line asks for unless told otherwise, whether the machine has it or not."""


def register() -> None:
    """Enter the class into the harness's registry of models."""
    import lm_eval.models  # noqa: F401  fills the registry with the harness's own, which it does only while it is empty
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=LoopformersLM)


@dataclass(frozen=True, slots=True)
class Row:
    """One continuation to score."""

    index: int
    """Of its request."""
    context: tuple[int, ...]
    """Tokens before it, at least one."""
    continuation: tuple[int, ...]
    """Tokens to score, at least one."""

    @property
    def length(self) -> int:
        """Tokens that the model reads: all but the last."""
        return len(self.context) + len(self.continuation) - 1


class LoopformersLM(HFLM):
    """A causal language model in the harness: one of ours along a schedule, or any other.

    Args:
        pretrained: A model, or what `load_any_model` opens.
        tokenizer: A tokenizer, or its folder; default: the model's own.
        num_loops: M, of our models; default: the trained number.
        schedule: A `Schedule`, or text that `Schedule.parse` reads. The harness's `--model_args` are separated by commas, so
            step sizes may be joined by plus signs: `1/2+1/4+1/4`.
        exit_rule: Text that `loopformers.generation.parse_exit_rule` reads, or its result. Scores are then those of the
            states with which tokens leave.
        batch_size: Sequences a forward; `auto`: as many as memory takes, at most `max_batch_size`; `auto:N` finds that
            number N times anew on the way from long to short requests.
        max_batch_size: Where `auto` begins.
        max_length: Tokens that the model sees at once; default: its positions. Longer requests are cut on the left, as
            everywhere in the harness, and counted.
        device: See `load_any_model`.
        dtype: See `load_any_model`.
        share_contexts: Whether choices share their context's cache. Off, each runs as a whole sequence.
        unknown: Other arguments of the harness's models, each of which is refused by name.
        add_bos_token: Whether texts start with the tokenizer's start token; default: as the tokenizer has it. That of a run
            of ours has none, as its training text had none.

    Raises:
        ConfigError: An argument that is unknown here, a schedule that the model cannot run, one for a model that has no
            loops, more tokens than learned positions, a tokenizer that is not the model's or has no end token, or a start
            token that it does not have.
        CheckpointError: Nothing can be opened under the name.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        num_loops: int | None = None,
        schedule: Schedule | str | None = None,
        exit_rule: Any = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        share_contexts: bool = True,
        add_bos_token: bool | None = None,
        **unknown: Any,
    ) -> None:
        _check_arguments(unknown)
        if device == HARNESS_DEVICE and not torch.cuda.is_available():
            device = None
        if isinstance(pretrained, str):
            pretrained, tokenizer = load_any_model(pretrained, tokenizer=tokenizer, device=device, dtype=dtype)
        else:
            tokenizer = _opened(tokenizer, pretrained)
            check_tokenizer(pretrained, tokenizer, type(pretrained).__name__)
        self.begin_tokens = _begin_tokens(tokenizer, add_bos_token)
        """What texts begin with. None is closed by an end token."""
        self.run_arguments = _run_arguments(pretrained, num_loops, schedule, exit_rule)
        check_count("max_batch_size", max_batch_size)
        batch_size = _batch_size(batch_size)
        if max_length is not None:
            _check_max_length(pretrained, max_length)
        with _without_remarks():  # on models that are given rather than named
            super().__init__(
                pretrained=pretrained,
                tokenizer=tokenizer,
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                max_length=max_length,
                add_bos_token=add_bos_token,
            )
        self.share_contexts = share_contexts and is_looped(pretrained) and "exit_rule" not in self.run_arguments
        self.num_cut = 0
        """Requests cut to `max_length` since the last reset."""
        self.on_progress: Callable[[int], None] = lambda num_requests: None
        """Called with the number of requests that have been answered since the last call."""

    # -- tokens --------------------------------------------------------------------------------------------------

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context: of our models the last one that training saw there."""
        if not is_looped(self.model):
            return int(super().prefix_token_id)
        begin = _begin_tokens(self.tokenizer, self.add_bos_token)
        return begin[-1] if begin else int(self.tokenizer.eos_token_id)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the ids of a text, begun as texts are (unless `add_special_tokens` is False) and never closed."""
        ids = encode_prompt(self.tokenizer, string, begin=() if add_special_tokens is False else self.begin_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the ids of texts and 1 where they are text and 0 where they are padding, both (texts, longest)."""
        texts = [tuple(self.tok_encode(text, left_truncate_len=left_truncate_len)) for text in strings]
        left = padding_side == "left"
        ids = self._padded(texts, left=left)
        mask = self._mask([len(text) for text in texts], left=left)
        return ids, torch.ones_like(ids) if mask is None else mask

    # -- scoring -------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Score continuations: (log-likelihood in nats, whether greedy decoding gives it) for each request."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Score whole texts, each token once with as much context as fits."""
        begin, self.begin_tokens = self.begin_tokens, ()  # the harness puts the start token in front itself
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.begin_tokens = begin

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        rows = [row for index, request in enumerate(requests) for row in self._rows(index, *request[1:])]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for batch, is_shared in self._batches(rows):
            scored = self._score_shared(batch) if is_shared else self._score_whole(batch)
            for row, (nats, is_greedy) in zip(batch, scored, strict=True):
                before, was_greedy = answers[row.index]
                answers[row.index] = before + nats, was_greedy and is_greedy
            self.on_progress(len(batch))
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:  # windows of a rolling request have no key of their own
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _rows(self, index: int, context: list[int], continuation: list[int]) -> list[Row]:
        """Return what is scored for a request: one row, cut on the left where it is too long.

        A continuation that is too long by itself (the harness refuses it) goes in windows, as a rolling text does: each
        token once, with as much before it as fits.
        """
        if not continuation:
            raise DataError("a continuation of 0 tokens has no likelihood; the tokenizer turned its text into nothing")
        tokens, size = context + continuation, self.max_length
        self.num_cut += len(tokens) > size + 1
        rows = []
        for start in range(len(context), len(tokens), size):
            scored = tokens[start : start + size]
            before = tokens[max(0, start - (size + 1 - len(scored))) : start]
            rows.append(Row(index, tuple(before), tuple(scored)))
        return rows

    def _batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[Row], bool]]:
        """Yield rows that run together, longest first, and whether they go by shared contexts."""
        by_context: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            by_context.setdefault(row.context, []).append(row)
        shared: list[list[Row]] = []
        alone: list[list[Row]] = []
        for context, group in by_context.items():
            if self.share_contexts and len(group) > 1 and len(context) > 1:
                shared.append(group)
            else:
                alone += [[row] for row in group]
        limits = _Limits(self, len(rows))
        for groups, is_shared in ((shared, True), (alone, False)):
            batch: list[Row] = []
            for group in sorted(groups, key=lambda g: (-max(row.length for row in g), g[0].index)):
                most = limits.most(batch + group, len(group))
                if batch and len(batch) + len(group) > most:
                    yield batch, is_shared
                    batch = []
                batch = batch + group
                while len(batch) > most:
                    yield batch[:most], is_shared
                    batch = batch[most:]
            if batch:
                yield batch, is_shared

    def _score_whole(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Run contexts with their continuations, padded on the right, which no token of theirs can see."""
        sequences = [(row.context + row.continuation)[:-1] for row in rows]
        ids = self._padded(sequences)
        first = min(len(row.context) for row in rows) - 1  # logits before it predict contexts alone
        logits = self._run(ids, keep=ids.shape[1] - first)
        parts = [logits[i, len(row.context) - 1 - first : row.length - first] for i, row in enumerate(rows)]
        return self._answers(torch.cat(parts), rows)

    def _score_shared(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Run each context once, then all continuations upon its cache."""
        contexts = list(dict.fromkeys(row.context for row in rows))
        owner = torch.tensor([contexts.index(row.context) for row in rows], device=self.device)
        cache = self.model.new_cache()
        ids, mask = self._padded(contexts, left=True), self._mask([len(c) for c in contexts], left=True)
        first = self._run(ids, mask, cache, keep=1)[owner]  # (rows, 1, vocab) predicts each continuation's first token
        given = [row.continuation[:-1] for row in rows]
        if not any(given):
            return self._answers(first[:, 0], rows)
        cache.batch_select_indices(owner)
        lengths = [max(1, len(g)) for g in given]  # a row that gives nothing reads one padding token
        past = torch.ones_like(ids) if mask is None else mask
        mask_new = self._mask(lengths)
        mask_new = past.new_ones(len(rows), max(lengths)) if mask_new is None else mask_new
        logits = self._run(self._padded(given), torch.cat([past[owner], mask_new], dim=1), cache)
        parts = [torch.cat([first[i], logits[i, : len(g)]]) for i, g in enumerate(given)]
        return self._answers(torch.cat(parts), rows)

    def _run(self, ids: Tensor, mask: Tensor | None = None, cache: Any = None, *, keep: int = 0) -> Tensor:
        """Return logits of the last `keep` positions (0: all), (batch, keep, vocab)."""
        arguments: dict[str, Any] = dict(self.run_arguments)
        if mask is not None:
            arguments["attention_mask"] = mask
        if cache is not None:
            arguments["past_key_values"] = cache
        else:
            arguments["use_cache"] = False
        logits: Tensor = self.model(ids, logits_to_keep=keep, **arguments).logits
        return logits if keep == 0 else logits[:, -keep:]

    def _answers(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Turn logits of all continuations' tokens, one row after the other, (tokens, vocab), into answers."""
        targets = torch.tensor([token for row in rows for token in row.continuation], device=logits.device)
        logits = logits.float()
        chosen = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)
        if not chosen.isfinite().all():
            schedule = self.run_arguments.get("schedule")
            raise NonFiniteError(
                f"the model's likelihoods are not finite{'' if schedule is None else f' at schedule {schedule}'}: its "
                "weights are damaged, or its states overflow; give fewer loops, float32 weights, or an earlier checkpoint"
            )
        is_greedy = logits.argmax(dim=1) == targets
        sizes = [len(row.continuation) for row in rows]
        return [
            (float(nats.double().sum()), bool(hits.all()))
            for nats, hits in zip(chosen.cpu().split(sizes), is_greedy.cpu().split(sizes), strict=True)
        ]

    def _padded(self, sequences: Sequence[tuple[int, ...]], *, left: bool = False) -> Tensor:
        longest = max(1, *map(len, sequences))
        pad = self.tokenizer.pad_token_id
        rows = [
            [pad] * (longest - len(s)) + list(s) if left else list(s) + [pad] * (longest - len(s)) for s in sequences
        ]
        return torch.tensor(rows, device=self.device)

    def _mask(self, lengths: Sequence[int], *, left: bool = False) -> Tensor | None:
        """Return 1 for text and 0 for padding, (batch, longest); None where all lengths are equal."""
        longest = max(lengths)
        if min(lengths) == longest:
            return None
        place = torch.arange(longest, device=self.device)
        length = torch.tensor(lengths, device=self.device)[:, None]
        return (place >= longest - length if left else place < length).long()

    # -- generation ----------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> Any:
        """Return a conversation as the tokenizer's chat template puts it.

        Raises:
            ConfigError: The tokenizer has none.
        """
        _check_chat_template(self.tokenizer)
        return super().apply_chat_template(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> Any:
        """Return the text of the chat template, see the harness.

        Raises:
            ConfigError: One is asked for, and the tokenizer has none.
        """
        if chat_template:
            _check_chat_template(self.tokenizer)
        return super().chat_template(chat_template)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Continue texts until a stop string, the end token or the allowed number of tokens."""
        for request in requests:
            if given := sorted(RUN_ARGUMENTS & request.args[1].keys()):
                raise ConfigError(
                    f"{given[0]} among generation arguments would hold for texts and not for scores; give it to the model: "
                    f"--model_args {given[0]}=.."
                )
            wanted = int(request.args[1].get("max_gen_toks", self.max_gen_toks))
            if wanted >= self.max_length:
                raise DataError(
                    f"the task asks for {wanted} new tokens and the model sees {self.max_length}; give the task fewer "
                    "(generation_kwargs: max_gen_toks), or leave it out"
                )
        texts = super().generate_until(requests, disable_tqdm=disable_tqdm)
        self.on_progress(len(texts))
        return texts

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        with blame_generation_settings(self.model.generation_config, self.model.name_or_path):
            return super()._model_generate(context, max_length, stop, **options, **self.run_arguments)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self._run(inps, attn_mask)


class _Limits:
    """How many sequences run together: a number, or what memory takes, found anew in N parts of the requests."""

    def __init__(self, lm: LoopformersLM, num_rows: int) -> None:
        self.lm, self.num_rows = lm, num_rows
        self.num_seen = 0
        self.found: dict[int, int] = {}

    def most(self, rows: Sequence[Row], num_new: int) -> int:
        """Return the limit for a batch of these rows, of which so many are new; requests come longest first."""
        if self.lm.batch_size != "auto":
            return int(self.lm.batch_size)
        part = int(self.num_seen * self.lm.batch_schedule / self.num_rows)
        self.num_seen += num_new
        if part not in self.found:
            row = max(rows, key=lambda row: row.length)
            request = (None, list(row.context), list(row.continuation))
            self.found[part] = int(self.lm._detect_batch_size([request]))
        return self.found[part]


def _batch_size(value: int | str) -> int | str:
    """Return a batch size as the harness takes it.

    Raises:
        ConfigError: It is neither a whole number, `auto` nor `auto:N`.
    """
    if isinstance(value, str):
        name, colon, times = value.partition(":")
        if name == "auto" and (not colon or (times.isascii() and times.isdigit() and 1 <= int(times) <= MAX_TIMES)):
            return value
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise ConfigError(
                f"batch_size={value!r} must be a whole number, auto, or auto:N with N from 1 to {MAX_TIMES}"
            )
        value = int(value)
    check_count("batch_size", value)
    return value


def _check_arguments(unknown: Mapping[str, Any]) -> None:
    for name, value in unknown.items():
        if name == "trust_remote_code" and not value:
            continue
        if name == "trust_remote_code":
            raise ConfigError("trust_remote_code=True: code in a checkpoint never runs here; leave it out")
        raise ConfigError(unknown_name("model argument", name, MODEL_ARGUMENTS))


def _check_chat_template(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the model's tokenizer has no chat template; leave --apply_chat_template out")


def _run_arguments(model: Any, num_loops: int | None, schedule: Any, exit_rule: Any) -> dict[str, Any]:
    """Return what every forward of a model is called with."""
    if not is_looped(model):
        given = {"num_loops": num_loops, "schedule": schedule, "exit_rule": exit_rule}
        if asked := {name: value for name, value in given.items() if value is not None}:
            name, value = next(iter(asked.items()))
            raise ConfigError(
                f"{name}={value!r} for a {model.config.model_type} model, which has no loops; leave {name} out"
            )
        return {}
    if isinstance(schedule, str):
        schedule = schedule.replace("+", ",")
    arguments = {"schedule": model.config.resolve_schedule(num_loops=num_loops, schedule=schedule)}
    if exit_rule is not None:
        if isinstance(exit_rule, str):
            from loopformers.generation import parse_exit_rule

            exit_rule = parse_exit_rule(exit_rule)
        arguments["exit_rule"] = exit_rule
    return arguments


def _opened(tokenizer: Any, model: Any) -> Any:
    """Return the tokenizer of a model that is given rather than named."""
    if tokenizer is None:
        raise ConfigError(
            f"a {type(model).__name__} object brings no tokenizer; give tokenizer=, or the model's folder in its place"
        )
    if isinstance(tokenizer, str | os.PathLike):
        return open_tokenizer(tokenizer, remedy="give the folder of the model's tokenizer")
    return tokenizer


def _begin_tokens(tokenizer: Any, add_bos_token: bool | None) -> tuple[int, ...]:
    begin, _ = framing(tokenizer)
    if add_bos_token is None:
        return begin
    if add_bos_token and not begin:
        if tokenizer.bos_token_id is None:
            raise ConfigError("add_bos_token=True, but the tokenizer has no start token; leave it out")
        return (tokenizer.bos_token_id,)
    return begin if add_bos_token else ()


def _check_max_length(model: Any, max_length: int) -> None:
    check_count("max_length", max_length, at_least=2)
    config = model.config
    positions = getattr(config, "max_position_embeddings", None)
    has_end = getattr(config, "position_embedding", None) == "learned" or not is_looped(model)
    if has_end and positions is not None and max_length > positions:
        raise ConfigError(
            f"max_length={max_length} is more than the {positions} positions of the model; give at most those"
        )


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Silence the harness's logger."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
