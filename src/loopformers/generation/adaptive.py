"""A forward call in which each token leaves when its rule says so, and loops after that are run without it.

Loops are the outer order and tokens the inner one, which is the same as token by token: what token j does in loop i
depends on earlier tokens' keys and values of that loop, and nothing else of theirs. So a prompt exits in one sweep of at
most T loops, and each loop runs on the tokens that are left, moved together (`Tokens`).

A token that left has no keys and values of deeper loops. It enters the next one as far as its state carries it, which gives
the first layer's; in the other layers those of its last loop stand in, and what is deeper takes the same (`LoopedCache`).
The readable truth that this module is tested against is `loopformers.generation.reference`, which names the other choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopformers.errors import ConfigError
from loopformers.generation.look import Look
from loopformers.generation.tokens import Tokens
from loopformers.model.outputs import LoopedCausalLMOutput
from loopformers.model.transformers_range import CACHE_NAME

if TYPE_CHECKING:
    from loopformers.generation.rules import ExitRule
    from loopformers.model.cache import LoopedCache, SlotSource
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.model.trunk import PreparedInputs
    from loopformers.schedule import Schedule

__all__ = ["adaptive_forward", "exit_logits"]

CHUNK_TOKENS = 2048
"""Tokens of a prompt that exit together: a rule on logits holds two loops' of each of them."""


def exit_logits(
    model: LoopedForCausalLM,
    input_ids: Tensor,
    rule: ExitRule,
    *,
    attention_mask: Tensor | None = None,
    num_loops: int | None = None,
    schedule: Any = None,
) -> tuple[Tensor, Tensor]:
    """Score tokens under an exit rule: what generation would have seen at each of them.

    Args:
        model: The model, in evaluation mode.
        input_ids: Tokens, (batch, seq).
        rule: The rule.
        attention_mask: 1 for text and 0 for padding, (batch, seq).
        num_loops: The most loops that a token may get; default: the trained T.
        schedule: Run that tokens leave, in place of `num_loops`.

    Returns:
        Logits (batch, seq, vocab) of the loop that each token left after, and the number of loops it got, (batch, seq), 0
        for padding.

    Raises:
        ConfigError: No legal schedule, mask or input.
    """
    output = model(
        input_ids,
        attention_mask=attention_mask,
        num_loops=num_loops,
        schedule=schedule,
        exit_rule=rule,
        use_cache=False,
    )
    return output.logits, output.exit_loops


@torch.no_grad()
def adaptive_forward(
    model: LoopedForCausalLM,
    rule: ExitRule,
    *,
    schedule: Schedule,
    cache: LoopedCache | None = None,
    logits_to_keep: int | Tensor = 0,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> LoopedCausalLMOutput:
    """Run a forward call under an exit rule, without gradients. Other arguments are those of the model's `forward`.

    Args:
        model: The model.
        rule: Decides.
        schedule: The run that tokens leave: what is left of it is not run.
        cache: Goes on from it; None: from nothing.
        logits_to_keep: See `forward`.

    Raises:
        ConfigError: An attention function that cannot take masks.
    """
    implementation = model.config._attn_implementation or "sdpa"
    if "flash" in implementation:
        raise ConfigError(
            f"exit_rule with attn_implementation={implementation!r}, which takes no masks of single tokens; call "
            "model.set_attn_implementation('sdpa')"
        )
    inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    inputs |= {"attention_mask": attention_mask, "position_ids": position_ids}
    outer = cache
    cache = model.new_cache() if cache is None else cache
    given = input_ids if inputs_embeds is None else inputs_embeds
    num_tokens = 0 if given is None else given.shape[1]
    parts = []
    for part in _chunks(model, inputs, given, cache.get_seq_length()):
        prepared = model.model.prepare(**part, cache=cache, schedule=schedule)
        keep_logits = num_tokens == 1 or (isinstance(logits_to_keep, int) and logits_to_keep == 0)
        run = _ChunkRun(model, rule, prepared, schedule, cache, keep_logits)
        run.until_all_have_left()
        cache.advance(prepared.positions, prepared.valid, run.loops)
        parts.append(run)
    whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
    kept = slice(None) if whole else slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    if all(part.logits is not None for part in parts):
        logits = torch.cat([part.logits for part in parts if part.logits is not None], dim=1)[:, kept]
    else:
        logits = model.head(torch.cat([part.hidden for part in parts], dim=1)[:, kept])
    loops = torch.cat([part.loops for part in parts], dim=1)
    return LoopedCausalLMOutput(logits=logits, exit_loops=loops, **{CACHE_NAME: outer})


def _chunks(
    model: LoopedForCausalLM, inputs: dict[str, Tensor | None], given: Tensor | None, num_past: int
) -> Iterator[dict[str, Any]]:
    """Cut a call into calls of fewer tokens, one after the other.

    A coda attends to the coda's keys and values of earlier tokens, which they have when they have left, so a model with a
    coda takes one token at a time.
    """
    batch_size, num_new = (1, 1) if given is None else given.shape[:2]
    size = 1 if len(model.model.coda) else max(1, CHUNK_TOKENS // max(batch_size, 1))
    if num_new <= size:
        yield inputs
        return
    for start in range(0, num_new, size):
        part = slice(start, min(start + size, num_new))
        pieces = {name: None if x is None else x[:, part] for name, x in inputs.items()}
        mask = inputs["attention_mask"]
        if mask is not None and not (num_past and mask.shape[1] == num_new):  # it covers the cached tokens too
            pieces["attention_mask"] = mask[:, : mask.shape[1] - (num_new - part.stop)]
        yield pieces


class _ChunkRun:
    """The loops of one chunk.

    Attributes:
        hidden: Final hidden state of each token, (batch, seq, dim).
        logits: Logits of each token, (batch, seq, vocab), where the rule has made them and they are to be kept.
        loops: Loops that each token got, (batch, seq), 0 for padding.
    """

    def __init__(
        self,
        model: LoopedForCausalLM,
        rule: ExitRule,
        prepared: PreparedInputs,
        schedule: Schedule,
        cache: LoopedCache,
        keep_logits: bool,
    ) -> None:
        self.model, self.rule, self.schedule, self.cache = model, rule, schedule, cache
        self.prepared = prepared
        self.keep_logits = keep_logits
        self.tokens = Tokens.all(prepared)
        self.hidden = torch.empty_like(prepared.inputs)
        self.logits: Tensor | None = None
        self.loops = torch.zeros(prepared.inputs.shape[:2], dtype=torch.long, device=prepared.inputs.device)

    def until_all_have_left(self) -> None:
        """Run loops until no token is left, at most the schedule's."""
        trunk, num_loops = self.model.model, self.schedule.num_loops
        modulations = trunk.modulations(self.schedule, self.cache, self.prepared.inputs.device)
        tokens, memory, state = self.tokens, None, None
        for loop_idx in range(num_loops):
            rows = tokens.slots(self.cache)
            _, grid = trunk.one_loop(
                tokens.inputs,
                None if state is None else tokens.gridded(state),
                loop_idx,
                self.schedule.step_sizes[loop_idx],
                None if modulations is None else modulations[loop_idx],
                tokens.context,
                cache=rows,
            )
            state = tokens.flat(grid)
            look = Look(state, partial(self._finish, tokens, rows), self.model.head)
            if len(trunk.coda):
                _ = look.hidden  # every loop, so that the coda's rows hold this token's
            if loop_idx + 1 == num_loops:
                self._leave(tokens, slice(None), look, num_loops)
                return
            score, memory = self.rule.score(look, memory)
            leaves = score <= self.rule.threshold
            if loop_idx == 0:
                leaves = tokens.without_padding(leaves)
            num_leaving = int(leaves.sum())  # the one number that the host waits for in a loop
            if num_leaving == 0:
                continue
            all_leave = num_leaving == len(leaves)
            self._leave(tokens, slice(None) if all_leave else leaves, look, loop_idx + 1)
            leaving = tokens if all_leave else tokens.only(leaves)
            trunk.enter_loop(
                leaving.inputs,
                leaving.gridded(state if all_leave else state[leaves]),
                self.schedule.step_sizes[loop_idx + 1],
                None if modulations is None else modulations[loop_idx + 1],
                leaving.context_of_new,
                leaving.first_slot(self.cache, loop_idx + 1),
            )
            if all_leave:
                return
            stays = ~leaves
            tokens = tokens.only(stays)
            state, memory = state[stays], memory[stays]

    def _finish(self, tokens: Tokens, rows: SlotSource, state: Tensor) -> Tensor:
        trunk = self.model.model
        if not len(trunk.coda):
            return trunk.finish(state, self.prepared)
        prepared = replace(self.prepared, context=tokens.context)
        return tokens.flat(trunk.finish(tokens.gridded(state), prepared, rows))

    def _leave(self, tokens: Tokens, who: Any, look: Look, num_loops: int) -> None:
        """Write down what these tokens leave with."""
        row, col = tokens.row[who], tokens.col[who]
        self.hidden[row, col] = look.hidden[who]
        if self.prepared.valid is None:
            self.loops[row, col] = num_loops
        else:
            valid = self.prepared.valid[:, -self.loops.shape[1] :]
            self.loops[row, col] = num_loops * valid[row, col]
        if not (self.keep_logits and (look.has_logits or self.logits is not None)):
            return
        if self.logits is None:
            self.logits = look.logits.new_empty(*self.loops.shape, look.logits.shape[-1])
        self.logits[row, col] = look.logits[who]
