"""What an exit rule sees of the tokens that are still looping."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

__all__ = ["Look"]


class Look:
    """Tokens after a loop; what a rule does not ask for is not computed.

    Args:
        state: State of each, (tokens, dim).
        finish: Turns it into final hidden states, of the same shape.
        head: Turns those into logits.
    """

    def __init__(self, state: Tensor, finish: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor]) -> None:
        self.state = state
        self._finish, self._head = finish, head

    @cached_property
    def hidden(self) -> Tensor:
        """Final hidden states, as though the loop had been the last, (tokens, dim)."""
        return self._finish(self.state)

    @cached_property
    def logits(self) -> Tensor:
        """Logits of the same, (tokens, vocab)."""
        return self._head(self.hidden)

    @property
    def has_logits(self) -> bool:
        """Whether the rule has asked for them."""
        return "logits" in self.__dict__

    def only(self, at: Tensor) -> Look:
        """Return some of the tokens; what is computed is computed for all of them, once. `at`: indices."""
        return Look(self.state[at], lambda _: self.hidden[at], lambda _: self.logits[at])
