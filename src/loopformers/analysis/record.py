"""Every loop's states, for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loopformers.errors import ConfigError, check_count
from loopformers.model.trunk import LoopedModel

__all__ = ["LoopTrace", "record_loops"]


@dataclass(slots=True)
class LoopTrace:
    """States that were recorded, detached and on the CPU.

    Attributes:
        max_bytes: What may be kept: a run of M loops over `batch x seq` new tokens takes M x batch x seq x dim numbers.
        runs: One entry a run, in order: every loop's states, (batch, new tokens, dim) each. A forward call is one run, and
            `generate` one for the prompt and one for each further token. A training call is one for each trajectory, except
            for a short one that is no more than the start of the long one: it is not run.
        num_bytes: What is kept so far.
    """

    max_bytes: int
    runs: list[list[Tensor]] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Every loop's states over the tokens of all runs, (batch, tokens, dim) each: what one forward over them gives.

        Raises:
            ConfigError: Nothing was recorded, or runs of unequal numbers of loops or rows, which do not join.
        """
        shapes = {(len(run), run[0].shape[0]) for run in self.runs}
        if len(shapes) != 1:
            raise ConfigError(
                f"the trace holds {len(self.runs)} runs of (loops, rows) {sorted(shapes)}, and states join over runs of equal "
                "ones; call the model inside the with block and without an exit rule, or take trace.runs one by one"
            )
        return tuple(torch.cat(loop, dim=1) for loop in zip(*self.runs, strict=True))

    def keep(self, loop_idx: int, state: Tensor) -> None:
        """Take a loop's state. A loop that the last run has already opens a new run, which shares the loops before it."""
        needed = self.num_bytes + state.nbytes
        if needed > self.max_bytes:
            raise ConfigError(
                f"max_bytes={self.max_bytes} is less than the {needed} bytes that run {len(self.runs)} would fill; record fewer "
                "tokens or loops, or raise max_bytes"
            )
        self.num_bytes = needed
        if not self.runs or loop_idx < len(self.runs[-1]):
            self.runs.append(self.runs[-1][:loop_idx] if self.runs else [])
        self.runs[-1].append(state.detach().cpu())


@contextmanager
def record_loops(model: nn.Module, *, max_bytes: int = 1 << 30) -> Iterator[LoopTrace]:
    """Record every loop's states of whatever the model runs inside the block: forward calls, training, `generate`.

    Runs under an exit rule are left out: their tokens leave after different loops, so no loop has the states of all.

    Args:
        model: A looped model of this package, or a wrapper around one (PEFT, DDP).
        max_bytes: Memory that states may take.

    Raises:
        ConfigError: The model holds none of ours; or, where it is called, states beyond `max_bytes`.

    Example:
        >>> from loopformers.testing import tiny_model
        >>> model = tiny_model("flt", num_loops=4)
        >>> with record_loops(model) as trace:
        ...     _ = model.generate(torch.tensor([[5, 6, 7]]), num_loops=2, max_new_tokens=3, do_sample=False)
        >>> len(trace.runs), len(trace.states), trace.states[-1].shape
        (3, 2, torch.Size([1, 5, 24]))
    """
    check_count("max_bytes", max_bytes)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    core = next((module for module in modules if isinstance(module, LoopedModel)), None)
    if core is None:
        raise ConfigError(f"a {type(model).__name__} has no loops to record; give a LoopedForCausalLM or a LoopedModel")
    trace = LoopTrace(max_bytes)

    def observe(loop_idx: int, residual: Tensor, state: Tensor) -> None:
        trace.keep(loop_idx, state)

    core.observers.append(observe)
    try:
        yield trace
    finally:
        core.observers.remove(observe)
