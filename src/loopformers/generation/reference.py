"""Adaptive exit, slow and plain: every token runs every loop, and what a token that left computes is thrown away.

No cache, no compaction, no chunks. It is what `adaptive_forward` is tested against, and it knows the two other things that
could stand in deeper cache rows, so that the choice can be measured (`benchmarks/exit.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from loopformers.errors import ConfigError
from loopformers.generation.look import Look
from loopformers.nn.layer import Modulation

if TYPE_CHECKING:
    from loopformers.generation.rules import ExitRule
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["DeeperRows", "exit_reference"]

DeeperRows = Literal["enter", "copy", "project", "exact"]
"""What later tokens see, in deeper loops, of a token that has left:

- `enter`: it enters the next loop and goes no further. Its state gives the first layer's keys and values of that loop, which
  are the true ones; in the other layers those of its last loop stay. Deeper loops see the same. What our cache holds.
- `copy`: the keys and values of its last loop, in all layers.
- `project`: its stream skips the layers of deeper loops, and their keys and values are made of what enters them: the
  start of the stream, from its last state (the state propagation of CALM, Schuster et al. 2022).
- `exact`: its true keys and values, as though it had not left. Saves nothing; the loss that the others are compared with.
"""


@torch.no_grad()
def exit_reference(
    model: LoopedForCausalLM,
    input_ids: Tensor,
    rule: ExitRule,
    *,
    attention_mask: Tensor | None = None,
    num_loops: int | None = None,
    schedule: Any = None,
    deeper_rows: DeeperRows = "enter",
) -> tuple[Tensor, Tensor]:
    """Do what `exit_logits` does, in the plainest way.

    Args:
        model: The model, without a coda: this reference runs loops in the outer order.
        input_ids: Tokens, (batch, seq).
        rule: The rule.
        attention_mask: 1 for text and 0 for padding, (batch, seq).
        num_loops: The most loops that a token may get; default: the trained T.
        schedule: In place of `num_loops`.
        deeper_rows: What stands in for keys and values that were not computed.

    Returns:
        Logits (batch, seq, vocab) and loops (batch, seq).

    Raises:
        ConfigError: The model has a coda.
    """
    trunk = model.model
    if len(trunk.coda):
        raise ConfigError("the reference of adaptive exit takes no model with a coda; use exit_logits")
    run = model.config.resolve_schedule(num_loops, schedule)
    prepared = trunk.prepare(input_ids, attention_mask, None, None, None, run)
    modulations = trunk.modulations(run, None, input_ids.device)
    left = torch.zeros_like(input_ids, dtype=torch.bool)
    loops = torch.zeros_like(input_ids)
    entered = left  # left, and entered the loop behind: all that left but those that have just done so
    slots = [_Held(left) for _ in trunk.layers]
    state: Tensor | None = None
    memory: Tensor | None = None
    logits: Tensor | None = None
    signal: Tensor | None
    for loop_idx in range(run.num_loops):
        x = trunk.stream(prepared.inputs, state, run.step_sizes[loop_idx])
        for i, layer in enumerate(trunk.layers):
            x, signal = (x, None) if state is None else trunk.injection(i, x, state)
            modulation = None if modulations is None else Modulation(*modulations[loop_idx, i])
            slots[i].left = entered if deeper_rows == "enter" and i == 0 else left
            slot = slots[i] if deeper_rows in ("enter", "copy") else None
            out = layer(x, prepared.context, signal=signal, modulation=modulation, slot=slot)
            x = torch.where(left[..., None], x, out) if deeper_rows == "project" else out
        new = trunk.norm(x) if model.config.loop_norm else x
        state = new if state is None or deeper_rows == "exact" else torch.where(left[..., None], state, new)
        look = Look(state.flatten(0, 1), lambda flat: trunk.finish(flat, prepared), model.head)
        here = look.logits.unflatten(0, input_ids.shape)
        logits = here if logits is None else torch.where(left[..., None], logits, here)
        loops = loops + ~left
        score, memory = rule.score(look, memory)
        entered = left
        left = left | (score <= rule.threshold).unflatten(0, input_ids.shape)
        if prepared.valid is not None:
            left = left | ~prepared.valid
    assert logits is not None, "a schedule has at least one loop"
    return logits, loops if prepared.valid is None else loops * prepared.valid


@dataclass(eq=False)
class _Held:
    """Keys and values of one layer: new ones of the tokens that are looping, the last ones of those that have left."""

    left: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take this loop's, (batch, heads, seq, dim) twice, and return what is seen."""
        left = self.left[:, None, :, None]
        self.keys = keys if self.keys is None else torch.where(left, self.keys, keys)
        self.values = values if self.values is None else torch.where(left, self.values, values)
        return self.keys, self.values
