"""What `lt-balanced` is made of: streams that change a thing or two each, for the study's ablation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loopformers.model.presets import PRESETS
from loopformers.nn.init import as_role
from loopformers.recurrence.stream import STREAMS, Norm, Stream


class RawInputs(Stream):
    """`x = h + e`: the inputs' share is what their rows have grown to."""

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the sum."""
        return state + inputs


class NormedSum(Stream):
    """`x = norm(h + norm(e))`: the stream starts at a root mean square of 1, so that layers write 1.4 times as much."""

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the normed sum."""
        return self.norm(state + self.norm(inputs))


class Weighted(Stream):
    """`x = a h + b norm(e)`: a shared scale sets how much layers write, the ratio how long a state lasts."""

    state_weight, inputs_weight = 1.0, 1.0

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the weighted sum."""
        return self.state_weight * state + self.inputs_weight * self.norm(inputs)


class Leaky(Weighted):
    """The state decays: 0.9 of it is kept."""

    state_weight = 0.9


class MoreState(Weighted):
    """The state weighs twice the inputs."""

    state_weight = 2.0


class MoreInputs(Weighted):
    """The inputs weigh twice the state."""

    state_weight = 0.5


class SmallWrites(Weighted):
    """Layers write sqrt(6) times less, as residuals scaled by 1/sqrt(N T) do at N T = 6."""

    state_weight = inputs_weight = 6**0.5


class LargeWrites(Weighted):
    """Layers write twice as much."""

    state_weight = inputs_weight = 0.5


class Mapped(Stream):
    """`x = h + B norm(e)`, B the identity at the start: a learned map of the inputs."""

    def __init__(self, hidden_size: int, norm: Norm) -> None:
        super().__init__(hidden_size, norm)
        self.inputs_proj = as_role("identity", nn.Linear(hidden_size, hidden_size, bias=False))

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the sum."""
        return state + self.inputs_proj(self.norm(inputs))


class Gated(Mapped):
    """`x = sigmoid(G h + 2) h + B norm(e)`: each token's state decides what it keeps, 0.88 of everything at the start."""

    def __init__(self, hidden_size: int, norm: Norm) -> None:
        super().__init__(hidden_size, norm)
        self.gate = as_role("output", nn.Linear(hidden_size, hidden_size, bias=False))

    def restart(self, inputs: Tensor, state: Tensor, step_size: float) -> Tensor:
        """Return the gated sum."""
        return torch.sigmoid(self.gate(state) + 2) * state + self.inputs_proj(self.norm(inputs))


VARIANTS: dict[str, type[Stream]] = {
    "raw-inputs": RawInputs,
    "normed-sum": NormedSum,
    "leaky": Leaky,
    "more-state": MoreState,
    "more-inputs": MoreInputs,
    "small-writes": SmallWrites,
    "large-writes": LargeWrites,
    "mapped": Mapped,
    "gated": Gated,
}
STREAMS.update(VARIANTS)
PRESETS.update({f"lt-{name}": {**PRESETS["lt"], "stream": name} for name in VARIANTS})
