"""Stream starts: what the residual stream of a loop is made of.

Add one: write a class with this contract and enter it in `STREAMS`; it may own parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from loopformers.nn.init import as_role

__all__ = ["STREAMS", "Adapter", "Balanced", "Carry", "Inputs", "InputsPlusState", "Norm", "Stream"]

Norm = Callable[[Tensor], Tensor]


class Stream(nn.Module):
    """Contract: where the loops after the first start. The first starts from `norm(inputs)` in all of them.

    Args:
        hidden_size: Width of the stream.
        norm: Norm at the start of a loop; the identity in models that chain raw states.
    """

    uses_step_size = False
    """Whether `restart` depends on the step size. Where it does not, runs of other step sizes may share their loops."""

    def __init__(self, hidden_size: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs: Tensor, state: Tensor | None, step_size: float) -> Tensor:
        """Return the stream at the start of a loop.

        Args:
            inputs: Embeddings, or the prelude's output, not normed, (batch, seq, dim).
            state: State after the previous loop, same shape; None in the first loop.
            step_size: Δ of this loop.
        """
        return self.norm(inputs) if state is None else self.restart(inputs, state, step_size)

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the stream at the start of a loop after the first."""
        raise NotImplementedError


class Carry(Stream):
    """`x = h`: a loop goes on where the last one ended (LT; the LoopFormer family)."""

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the state."""
        return state


class InputsPlusState(Stream):
    """`x = norm(e + h)`, `e` not normed: input injection (LT_i)."""

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the normed sum."""
        return self.norm(inputs + state)


class Inputs(Stream):
    """`x = norm(e)`: every loop starts over, and the state comes in by the injection alone (LT_ia, FLT_res, FLT)."""

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the normed inputs."""
        return self.norm(inputs)


class Balanced(Stream):
    """`x = h + norm(e)`: inputs and state come in at equal size, and no parameter is added.

    Where loops end in a norm both have a root mean square of 1, in every loop and however training moves the embeddings.
    In `norm(e + h)` the inputs' share is what their rows happen to have grown to.
    """

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the sum of state and normed inputs."""
        return state + self.norm(inputs)


class Adapter(Stream):
    """`x = norm(W_e norm(e) + W_h h)`, both matrices the identity at the start: a learned mix of inputs and state.

    Two maps of the stream per loop let a model keep, turn or drop what it carries, channel by channel; without them the
    sum is normed in every loop, so that what a loop wrote fades by a fixed factor in each later one. A linear map of the
    concatenated inputs and state is the adapter of recurrent-depth models (arXiv 2502.05171), there randomly initialised
    and on noise in place of a first state.
    """

    def __init__(self, hidden_size: int, norm: Norm) -> None:
        super().__init__(hidden_size, norm)
        self.inputs_proj = as_role("identity", nn.Linear(hidden_size, hidden_size, bias=False))
        self.state_proj = as_role("identity", nn.Linear(hidden_size, hidden_size, bias=False))

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the normed sum of the two maps."""
        return self.norm(self.inputs_proj(self.norm(inputs)) + self.state_proj(state))


STREAMS: dict[str, type[Stream]] = {
    "state": Carry,
    "inputs_plus_state": InputsPlusState,
    "inputs": Inputs,
    "balanced": Balanced,
    "adapter": Adapter,
}
