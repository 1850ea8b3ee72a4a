"""Objectives: what labels train. Each works for every system and returns its parts for logging."""

from __future__ import annotations

from collections.abc import Mapping

from loopformers.objectives.contract import Objective
from loopformers.objectives.per_loop import every_loop, last_loop, last_third
from loopformers.objectives.shortcut import shortcut_consistency

__all__ = ["OBJECTIVES", "Objective"]

OBJECTIVES: Mapping[str, Objective] = {
    "last_loop": last_loop,
    "last_third": last_third,
    "every_loop": every_loop,
    "shortcut_consistency": shortcut_consistency,
}
