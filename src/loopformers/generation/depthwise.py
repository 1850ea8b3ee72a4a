"""Decoding in which no row waits for a deeper one: rows of a batch are in different loops at the same time.

All loops share one stack, so one call of it can run row 0 in its first loop, row 1 in its fifth and so on. A row that
leaves emits its token and starts the next one in the very next call; rows with more to do go on beside it. So a call always
has a full batch, and the number of calls is the mean of the rows' loops and not, token by token, that of the deepest row
(continuous depth-wise batching, Bae et al., Relaxed Recursive Transformers, arXiv 2410.20672).

Which tokens come out is what one row at a time would give: `tests/generation/test_depthwise.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from loopformers.generation.depthwise_store import (
    DepthwiseStore,
    EnteredSlot,
    Entering,
    attend_by_copies,
    attend_by_views,
)
from loopformers.generation.look import Look
from loopformers.model.cache import LoopedCache
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.nn.attention import AttentionContext
from loopformers.nn.layer import Modulation
from loopformers.nn.mask import packed_documents

if TYPE_CHECKING:
    from loopformers.generation.rules import ExitRule
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.schedule import Schedule

__all__ = ["can_decode_depthwise", "decode_depthwise"]

MOST_ENTERING = 256
"""Tokens that wait to enter a loop that they do not run: their keys and values there are computed together."""


def can_decode_depthwise(
    model: LoopedForCausalLM, input_ids: Tensor, generation_config: Any, options: dict[str, Any]
) -> bool:
    """Say whether this way of decoding knows what is asked; token by token all of it works.

    It runs two rows and more, of models that are a loop and nothing around it, with ordinary keys and values, from ids,
    with a cache; it keeps no scores of each step, and no streamer.
    """
    config = model.config
    longest = generation_config.max_length
    positions = options.get("position_ids")
    wants_steps = any(
        getattr(generation_config, f"output_{what}", None)
        for what in ("scores", "logits", "attentions", "hidden_states")
    )
    return (
        len(input_ids) > 1
        and input_ids.shape[1] > 0
        and config.num_prelude_layers == config.num_coda_layers == 0
        and config.kv_lora_rank is None
        and longest is not None
        and not (config.position_embedding == "learned" and longest - 1 > config.max_position_embeddings)
        and "flash" not in (config._attn_implementation or "sdpa")
        and isinstance(options.get(CACHE_NAME), LoopedCache)
        and "prepare_inputs_for_generation" not in vars(model)  # PEFT puts virtual tokens before the prompt there
        and options.get("inputs_embeds") is None
        and options.get("streamer") is None
        and not options.get("synced_gpus")
        and not wants_steps
        and (positions is None or packed_documents(positions) is None or options.get("attention_mask") is not None)
    )


def decode_depthwise(
    model: LoopedForCausalLM,
    rule: ExitRule,
    input_ids: Tensor,
    *,
    schedule: Schedule,
    cache: LoopedCache,
    attention_mask: Tensor | None,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, Any], Tensor],
    generation_config: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode greedily or by sampling; arguments and result are those of transformers' sampling loop.

    Args:
        model: The model.
        rule: Decides when a row leaves.
        input_ids: Prompts, (batch, seq), padded on the left; tokens that the cache holds included.
        schedule: The run that rows leave.
        cache: Filled by the prompt here, and with what was generated when all is done.
        attention_mask: 1 for text and 0 for padding, (batch, seq).
        logits_processor: Called for one row at a time.
        stopping_criteria: Called for one row at a time.
        generation_config: Sampling or not, and what to return.
    """
    prompt = model(
        input_ids[:, cache.get_seq_length() :],
        attention_mask=attention_mask,
        schedule=schedule,
        exit_rule=rule,
        logits_to_keep=1,
        **{CACHE_NAME: cache},
    )
    rows = _Rows(model, rule, schedule, cache, input_ids, generation_config.max_length)

    def next_token(ids: Tensor, logits: Tensor) -> bool:
        ids[:, -1:] = _choose(ids[:, :-1], logits, logits_processor, generation_config.do_sample)
        return bool(stopping_criteria(ids, None).all())

    rows.emit(list(range(len(input_ids))), prompt.logits[:, -1], next_token)
    while rows.running:
        rows.run_one_loop(next_token)
    sequences = rows.finish(generation_config._pad_token_tensor)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_NAME: cache})
    return sequences


NextToken = Callable[[Tensor, Tensor], bool]
"""(sequence so far and a place for the next token (1, seq + 1), logits (1, vocab)): fills the place, and says whether the row is
done."""


def _choose(ids: Tensor, logits: Tensor, processor: Callable[[Tensor, Tensor], Tensor], do_sample: bool) -> Tensor:
    scores = processor(ids, logits.to(copy=True, dtype=torch.float32))
    return (
        torch.multinomial(scores.softmax(dim=-1), num_samples=1) if do_sample else scores.argmax(dim=-1, keepdim=True)
    )


class _Rows:
    """Rows on their way, each with a token and a loop of its own.

    Attributes:
        ids: Tokens of all rows, (batch, max_length).
        length: Tokens that each row has.
        running: Rows that are not done.
        depth: Loops that each of these has run of its last token.
    """

    def __init__(
        self,
        model: LoopedForCausalLM,
        rule: ExitRule,
        schedule: Schedule,
        cache: LoopedCache,
        input_ids: Tensor,
        max_length: int,
    ) -> None:
        self.model, self.rule, self.schedule, self.cache = model, rule, schedule, cache
        self.device = input_ids.device
        batch_size, num_prompt = input_ids.shape
        assert cache.positions is not None, "the prompt has been cached"
        valid = torch.ones_like(cache.positions, dtype=torch.bool) if cache.valid is None else cache.valid
        self.ids = input_ids.new_zeros(batch_size, max_length)
        self.ids[:, :num_prompt] = input_ids
        self.length = [num_prompt] * batch_size
        self.loops: list[list[int]] = [[] for _ in range(batch_size)]
        self.running = list(range(batch_size))
        self.depth = [0] * batch_size
        self.first_text = valid.long().argmax(dim=1)
        self.offset = cache.positions[:, -1] - num_prompt + 1  # from columns to positions
        self.inputs = torch.zeros(batch_size, 1, model.config.hidden_size, dtype=model.dtype, device=self.device)
        self.state = self.inputs.clone()
        self.memory: Tensor | None = None
        # One call prepares every position that may come: the function and the rotary tables of all of them.
        every = torch.arange(max_length - 1, device=self.device)[None]  # the last token is not run
        self.context = model.model.prepare(torch.zeros_like(every), None, every, None, None, schedule).context
        rotary = self.context.rotary
        self.tables = None if rotary is None else torch.stack([table[0, 0] for table in rotary])
        self.by_views = self.device.type == "cpu" and model.config._attn_implementation == "sdpa"
        self.modulations = model.model.modulations(schedule, cache, self.device)
        self.step_sizes = torch.tensor(schedule.step_sizes, device=self.device, dtype=model.dtype)
        self.windows = [model.config.window("core", i) for i in range(model.config.num_hidden_layers)]
        self.store = DepthwiseStore(cache, schedule.num_loops, max_length)
        self.entering: list[Entering] = []

    @property
    def column(self) -> list[int]:
        """Where the last token of each running row stands, in the sequence and in the cache."""
        return [self.length[row] - 1 for row in self.running]

    def run_one_loop(self, next_token: NextToken) -> None:
        """Run one loop of every running row, and let those that leave emit their tokens."""
        self.store.reach(max(self.depth) + 1, max(self.column) + 1)
        if self._must_enter():
            self._enter()
        self.state = self._loop()
        self.depth = [depth + 1 for depth in self.depth]
        trunk = self.model.model
        prepared: Any = None  # only a coda would look at it
        look = Look(self.state[:, 0], lambda state: trunk.finish(state, prepared), self.model.head)
        leaves = self._decide(look)
        out = [i for i, leaving in enumerate(leaves) if leaving]
        if not out:
            return
        for i in out:
            self.loops[self.running[i]].append(self.depth[i])
        self._enter_next([i for i in out if self.depth[i] < self.schedule.num_loops])
        logits = look.logits[out] if look.has_logits else self.model.head(look.hidden[out])
        self.emit(out, logits, next_token)

    def _enter_next(self, which: list[int]) -> None:
        """Let tokens that leave enter the loop behind, and their keys and values stand in for those of deeper ones."""
        if not which:
            return
        self.store.reach(max(self.depth[i] for i in which) + 1, max(self.column) + 1)
        at = torch.tensor(which, device=self.device)
        for i, inputs, state in zip(which, self.inputs[at], self.state[at], strict=True):  # copies, for rows move on
            row, depth = self.running[i], self.depth[i]
            column = self.length[row] - 1
            self.store.fill_deeper(row, column, depth)
            self.entering.append(Entering(row, column, depth, inputs, state))

    def _must_enter(self) -> bool:
        """Whether the coming call reads what a token that has left is to write, or many are waiting."""
        depth = dict(zip(self.running, self.depth, strict=True))
        is_read = any(depth.get(entering.row, 0) >= entering.loop_idx for entering in self.entering)
        return is_read or len(self.entering) >= MOST_ENTERING

    def _enter(self) -> None:
        """Write the keys and values of tokens in the loop that they enter, many in one call."""
        entering, self.entering = self.entering, []
        if not entering:
            return
        inputs, state = torch.stack([x.inputs for x in entering]), torch.stack([x.state for x in entering])
        loop = torch.tensor([x.loop_idx for x in entering], device=self.device)
        modulation = None if self.modulations is None else self.modulations[loop].permute(1, 2, 0, 3)[..., None, :]
        tables = self._tables([x.row for x in entering], [x.column for x in entering])
        context = AttentionContext(self.context.function, {}, tables, tables)
        step_sizes = self.step_sizes[loop][:, None, None]
        self.model.model.enter_loop(inputs, state, step_sizes, modulation, context, EnteredSlot(self.store, entering))

    def emit(self, which: list[int], logits: Tensor, next_token: NextToken) -> None:
        """Choose the next token of some running rows, and start it where the row is not done.

        Args:
            which: Indices into `running`.
            logits: Of each, (len(which), vocab).
            next_token: Chooses, and says whether the row is done.
        """
        going, done = [], set()
        for at, i in enumerate(which):
            row = self.running[i]
            self.length[row] += 1
            if next_token(self.ids[row : row + 1, : self.length[row]], logits[at : at + 1]):
                done.add(i)
            else:
                self.depth[i] = 0
                going.append(i)
        if going:
            trunk, at_going = self.model.model, torch.tensor(going, device=self.device)
            rows = [self.running[i] for i in going]
            columns = [self.length[row] - 1 for row in rows]
            inputs = trunk.embed_tokens(self.ids[rows, columns][:, None])
            if self.model.config.position_embedding == "learned":
                inputs = inputs + trunk.embed_positions(self._positions(rows, columns)[:, None])
            self.inputs[at_going] = inputs
        if done:
            self._keep([i for i in range(len(self.running)) if i not in done])

    def _positions(self, rows: list[int], columns: list[int]) -> Tensor:
        """Return the position of one token of each of some rows, (rows,)."""
        return torch.tensor(columns, device=self.device) + self.offset[rows]

    def _tables(self, rows: list[int], columns: list[int]) -> tuple[Tensor, Tensor] | None:
        """Return the rotary tables of the same, (rows, 1, 1, dim) each."""
        if self.tables is None:
            return None
        cos, sin = self.tables[:, self._positions(rows, columns), None, None]
        return cos, sin

    def _loop(self) -> Tensor:
        """As `LoopedModel.one_loop`, with each row in a loop of its own; in its first loop a row sees no state."""
        trunk, state = self.model.model, self.state
        loop = torch.tensor(self.depth, device=self.device)
        fresh = (loop == 0)[:, None, None]
        modulation = None if self.modulations is None else self.modulations[loop].permute(1, 2, 0, 3)[..., None, :]
        rows = torch.tensor(self.running, device=self.device)
        column = torch.tensor(self.column, device=self.device)
        line = loop * self.store.batch_size + rows
        places = line * self.store.capacity + column
        contexts = self._contexts(rows, line, column)
        stream: Any = trunk.stream
        restarted = stream(self.inputs, state, self.step_sizes[loop][:, None, None])
        x = torch.where(fresh, stream(self.inputs, None, 1.0), restarted)
        for i, layer in enumerate(trunk.layers):
            entered, signal = trunk.injection(i, x, state)
            x = layer(
                x if entered is x else torch.where(fresh, x, entered),
                contexts[i],
                signal=None if signal is None else torch.where(fresh, x, signal),  # a query made of the stream itself
                modulation=None if modulation is None else Modulation(*modulation[i]),
                slot=self.store.slot(i, places),
            )
        return trunk.norm(x) if self.model.config.loop_norm else x

    def _contexts(self, rows: Tensor, line: Tensor, column: Tensor) -> list[AttentionContext]:
        """Return what each layer attends with: rows, their lines and the columns of their tokens, (rows,) each."""
        tables = self._tables(self.running, self.column)
        if self.by_views:
            first_text = self.first_text.tolist()
            views = self.store.views(
                (loop_idx, row, first_text[row], column + 1)
                for loop_idx, row, column in zip(self.depth, self.running, self.column, strict=True)
            )
            none: dict[int | None, Tensor | None] = dict.fromkeys(self.windows)
            return [AttentionContext(attend_by_views(*of_layer), none, tables) for of_layer in views]
        num_keys = max(self.column) + 1
        function = attend_by_copies(self.context.function, line, num_keys)
        return [AttentionContext(function, self._masks(rows, column, num_keys), tables)] * len(self.windows)

    def _masks(self, rows: Tensor, column: Tensor, num_keys: int) -> dict[int | None, Tensor | None]:
        """Return which keys each row's one query sees: its own text up to now, (rows, 1, 1, keys), by window."""
        keys = torch.arange(num_keys, device=self.device)
        seen = (keys >= self.first_text[rows, None]) & (keys <= column[:, None])
        masks: dict[int | None, Tensor | None] = {}
        for window in set(self.windows):
            mask = seen if window is None else seen & (keys > column[:, None] - window)
            masks[window] = mask[:, None, None]
        return masks

    def _decide(self, look: Look) -> list[bool]:
        """Ask the rule, apart for rows after their first loop, which have nothing to remember."""
        score = look.state.new_empty(len(self.depth), dtype=torch.float32)
        for first in (True, False):
            part = [i for i, depth in enumerate(self.depth) if (depth == 1) == first]
            if not part:
                continue
            at = torch.tensor(part, device=self.device)
            found, memory = self.rule.score(look.only(at), None if first or self.memory is None else self.memory[at])
            score[at] = found.float()
            if self.memory is None:
                self.memory = memory.new_zeros(len(self.depth), *memory.shape[1:])
            self.memory[at] = memory
        deepest = self.schedule.num_loops
        leaves = (score <= self.rule.threshold).tolist()  # the one thing in a call that the host waits for
        return [leaving or depth == deepest for leaving, depth in zip(leaves, self.depth, strict=True)]

    def _keep(self, stays: list[int]) -> None:
        at = torch.tensor(stays, device=self.device, dtype=torch.long)
        self.running = [self.running[i] for i in stays]
        self.depth = [self.depth[i] for i in stays]
        self.inputs, self.state = self.inputs[at], self.state[at]
        self.memory = None if self.memory is None else self.memory[at]

    def finish(self, pad: Tensor | None) -> Tensor:
        """Hand the keys and values to the cache, and return the sequences, (batch, longest), padded on the right."""
        self._enter()
        longest = max(self.length)
        num_new = longest - 1 - self.cache.get_seq_length()
        filler = 0 if pad is None else int(pad)
        if num_new > 0:
            assert self.cache.positions is not None, "the prompt has been cached"
            loops = torch.tensor([[*row, *[0] * (num_new - len(row))] for row in self.loops], device=self.device)
            positions = self.cache.positions[:, -1:] + torch.arange(1, num_new + 1, device=self.device)
            valid = self.cache.valid
            if valid is not None or bool((loops == 0).any()):
                past = torch.ones_like(self.cache.positions, dtype=torch.bool) if valid is None else valid
                valid = torch.cat([past, loops > 0], dim=1)
            self.store.give_back(longest - 1)
            self.cache.advance(positions, valid, loops)
        ended = torch.arange(longest, device=self.device) >= torch.tensor(self.length, device=self.device)[:, None]
        return self.ids[:, :longest].masked_fill(ended, filler)
