"""Cache slots: the row of a cache that belongs to one layer in one loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

__all__ = ["SlotLayout", "Stage"]

Stage = Literal["prelude", "core", "coda"]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Numbers the rows of a cache: prelude, coda, then the core loop by loop.

    A slot depends on (stage, layer, loop) alone, never on how many loops a run has, so no slot moves when the budget
    changes.

    Example:
        >>> layout = SlotLayout(num_prelude_layers=1, num_core_layers=3, num_coda_layers=1)
        >>> layout.slot("core", 2, loop_idx=1), layout.num_slots(num_loops=2)
        (7, 8)
    """

    num_prelude_layers: int
    num_core_layers: int
    num_coda_layers: int

    def slot(self, stage: Stage, layer_idx: int, loop_idx: int = 0) -> int:
        """Return the row of a layer; the loop matters in the core only."""
        match stage:
            case "prelude":
                return layer_idx
            case "coda":
                return self.num_prelude_layers + layer_idx
            case "core":
                once = self.num_prelude_layers + self.num_coda_layers
                return once + loop_idx * self.num_core_layers + layer_idx
            case _:
                assert_never(stage)

    def slot_below(self, slot: int) -> int | None:
        """Return the row of the same layer in the loop before; None: this row is not in the core, or in its first loop."""
        below = slot - self.num_core_layers
        return below if below >= self.slot("core", 0) else None

    def num_slots(self, num_loops: int) -> int:
        """Return how many rows a run of `num_loops` fills."""
        return self.slot("core", 0, loop_idx=num_loops)
