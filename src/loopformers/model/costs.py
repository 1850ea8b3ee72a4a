"""What a looped model costs: parameters, floating-point operations, cache bytes, each with the run as an argument.

A multiplication and an addition count as two operations, matrix products and attention scores alone are counted (what
torch's FlopCounterMode counts), and attention counts the whole square, as kernels without block skipping compute it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from loopformers.nn.conditioning import NUM_FREQUENCIES
from loopformers.recurrence.injection import INJECTIONS
from loopformers.recurrence.stream import STREAMS
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig

__all__ = ["Costs"]

BACKWARD_FACTOR = 2
"""A backward pass costs two forward passes: one for each operand's gradient."""


class Costs:
    """The cost methods of LoopConfig."""

    def parameter_groups(self) -> dict[str, int]:
        """Return the number of parameters by part of the model."""
        c = cast("LoopConfig", self)
        d = c.hidden_size
        layer = self._layer_matrix_parameters() + (2 * d if c.learned_norms == "all" else 0)
        embedders = self._num_embedders
        modulation = c.num_hidden_layers * (4 * d * d + 4 * d) if embedders else 0
        return {
            "embedding": c.vocab_size * d,
            "positions": c.max_position_embeddings * d if c.position_embedding == "learned" else 0,
            "prelude": c.num_prelude_layers * layer,
            "core": c.num_hidden_layers * layer,
            "coda": c.num_coda_layers * layer,
            "conditioning": embedders * (2 * NUM_FREQUENCIES * d + d + d * d + d) + modulation,
            "recurrence": sum(math.prod(shape) for shapes in self._recurrence_shapes for shape in shapes),
            "norm": d if c.learned_norms != "none" else 0,
            "head": 0 if c.tie_word_embeddings else c.vocab_size * d,
        }

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied matrix counts once."""
        return sum(self.parameter_groups().values())

    def forward_flops(
        self, *, batch_size: int = 1, seq_len: int, num_loops: int | None = None, schedule: Any = None
    ) -> int:
        """Return the operations of one forward pass over `batch_size` sequences of `seq_len` tokens.

        Args:
            batch_size: Sequences.
            seq_len: Tokens in each.
            num_loops: Budget M; default T.
            schedule: Or a schedule.
        """
        c = cast("LoopConfig", self)
        run = c.resolve_schedule(num_loops, schedule)
        head = 2 * c.hidden_size * c.vocab_size * batch_size * seq_len
        prelude = self._once_flops(c.num_prelude_layers, batch_size, seq_len)
        return prelude + self._run_flops(run, batch_size, seq_len) + head

    def flops_per_token(self, num_loops: int | None = None, *, seq_len: int, schedule: Any = None) -> float:
        """Return the operations of a forward pass over one sequence of `seq_len` tokens, per token."""
        return self.forward_flops(seq_len=seq_len, num_loops=num_loops, schedule=schedule) / seq_len

    def training_flops(
        self, *, batch_size: int = 1, seq_len: int, num_loops: int | None = None, short: Schedule | None = None
    ) -> float:
        """Return the operations of one forward and backward pass of the objective, both trajectories counted.

        Without `short`, shortcut consistency counts the mean over M = 1..T-1 of its short trajectory.
        """
        c = cast("LoopConfig", self)
        run = c.resolve_schedule(num_loops)
        head = 2 * c.hidden_size * c.vocab_size * batch_size * seq_len
        shorts: list[Schedule] = []
        forward = float(self._once_flops(c.num_prelude_layers, batch_size, seq_len))  # all trajectories share it
        forward += self._run_flops(run, batch_size, seq_len)
        match c.objective:
            case "every_loop" | "last_third":
                first = 0 if c.objective == "every_loop" else 2 * run.num_loops // 3
                extra = run.num_loops - first - 1
                forward += (extra + 1) * head + extra * self._once_flops(c.num_coda_layers, batch_size, seq_len)
            case "shortcut_consistency":
                shorts = [short] if short is not None else [Schedule.uniform(m) for m in range(1, run.num_loops)]
                forward += 2 * head + _mean([self._short_flops(run, s, batch_size, seq_len) for s in shorts])
            case _:
                forward += head
        apart = [self._frequency_flops(s) if c.shared_loops(run, s) < s.num_loops else 0 for s in shorts]
        constant = self._frequency_flops(run) + _mean(apart)
        return (1 + BACKWARD_FACTOR) * forward - constant

    def training_flops_per_token(self, num_loops: int | None = None, *, seq_len: int) -> float:
        """Return `training_flops` of one sequence, per token."""
        return self.training_flops(seq_len=seq_len, num_loops=num_loops) / seq_len

    def kv_bytes_per_token(self, num_loops: int | None = None, *, bytes_per_element: int = 2) -> int:
        """Return what one cached token of one sequence takes; latent attention keeps the latent alone."""
        c = cast("LoopConfig", self)
        loops = c.resolve_schedule(num_loops).num_loops
        numbers = c.kv_lora_rank or 2 * cast(int, c.num_key_value_heads) * cast(int, c.head_dim)
        return c.slot_layout.num_slots(loops) * numbers * bytes_per_element

    def _layer_matrix_parameters(self) -> int:
        c = cast("LoopConfig", self)
        d = c.hidden_size
        queries, keys = (
            cast(int, c.num_attention_heads) * cast(int, c.head_dim),
            cast(int, c.num_key_value_heads) * cast(int, c.head_dim),
        )
        key_value = 2 * d * keys if c.kv_lora_rank is None else c.kv_lora_rank * (d + 2 * keys)
        mlp = (3 if c.hidden_act == "swiglu" else 2) * d * cast(int, c.intermediate_size)
        return 2 * d * queries + key_value + mlp

    def _once_flops(self, num_layers: int, batch_size: int, seq_len: int) -> int:
        c = cast("LoopConfig", self)
        matrices = 2 * self._layer_matrix_parameters() * batch_size * seq_len
        scores = 4 * cast(int, c.num_attention_heads) * cast(int, c.head_dim) * batch_size * seq_len * seq_len
        return num_layers * (matrices + scores)

    def _run_flops(self, run: Schedule, batch_size: int, seq_len: int) -> int:
        """Operations of the core, the coda and the conditioning along a schedule."""
        c = cast("LoopConfig", self)
        d, loops = c.hidden_size, run.num_loops
        modulation = 2 * c.num_hidden_layers * 4 * d * d if c.conditioning != "none" else 0
        conditioning = self._frequency_flops(run) + loops * (self._num_embedders * 2 * d * d + modulation)
        recurrence = (loops - 1) * self._recurrence_flops * batch_size * seq_len
        return (
            self._once_flops(c.num_coda_layers + c.num_hidden_layers * loops, batch_size, seq_len)
            + recurrence
            + conditioning
        )

    def _short_flops(self, long: Schedule, short: Schedule, batch_size: int, seq_len: int) -> int:
        """Operations of a short trajectory beside a long one: the loops that they share run once."""
        c = cast("LoopConfig", self)
        shared = c.shared_loops(long, short)
        if shared == short.num_loops:
            return self._once_flops(c.num_coda_layers, batch_size, seq_len)
        saved = self._once_flops(c.num_hidden_layers * shared, batch_size, seq_len)
        saved += max(shared - 1, 0) * self._recurrence_flops * batch_size * seq_len
        return self._run_flops(short, batch_size, seq_len) - saved

    def _frequency_flops(self, run: Schedule) -> int:
        """Operations on frequency embeddings, which are constants: no gradient goes into them."""
        c = cast("LoopConfig", self)
        return run.num_loops * self._num_embedders * 2 * NUM_FREQUENCIES * 2 * c.hidden_size

    @property
    def _recurrence_shapes(self) -> tuple[list[torch.Size], list[torch.Size]]:
        """Shapes of the parameters that the stream start and the injection own."""
        c = cast("LoopConfig", self)
        stream: Any = STREAMS[c.stream]  # classes hash, whatever a type checker makes of their instances' __hash__
        injection: Any = INJECTIONS[c.injection]
        return _shapes(stream, c.hidden_size), _shapes(injection, c.hidden_size)

    @property
    def _recurrence_flops(self) -> int:
        """Operations per token that a loop after the first adds: a product for each matrix of the stream start, and one a
        layer for each of the injection."""
        c = cast("LoopConfig", self)
        stream, injection = (2 * sum(math.prod(s) for s in shapes if len(s) == 2) for shapes in self._recurrence_shapes)
        return stream + c.num_hidden_layers * injection

    @property
    def _num_embedders(self) -> int:
        c = cast("LoopConfig", self)
        return {"none": 0, "loop_index": 1, "time": 1, "time_and_step": 2}[c.conditioning]


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


@functools.cache
def _shapes(kind: Callable[..., nn.Module], hidden_size: int) -> list[torch.Size]:
    """Shapes of the parameters of a stream start or an injection, which is built once, without memory."""
    with torch.device("meta"):
        return [p.shape for p in kind(hidden_size, nn.Identity()).parameters()]
