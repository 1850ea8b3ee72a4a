"""Which runs a conditioned model's training has shown it, and the warning for those that it has not.

A model without conditioning is told nothing, and a run of another depth is more or fewer of the same passes. A conditioned
one is told a time, a step size or an index, and what it does with one that was never drawn is left to chance.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loopformers.errors import ScheduleWarning
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig

__all__ = ["schedule_warning", "untrained_on_purpose"]


@contextmanager
def untrained_on_purpose() -> Iterator[None]:
    """Leave out ScheduleWarning where budgets are compared: untrained ones are among them on purpose, and are marked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)
        yield


def schedule_warning(config: LoopConfig, run: Schedule) -> str | None:
    """Return what there is to say of a run that training did not draw, as far as a configuration tells, or None.

    T uniform steps are always trained. Shortcut consistency also draws every schedule of fewer steps on multiples of 1/T, or,
    for a model that is told its index, every smaller number of passes. Where an index is all that a loop is told, a run that
    stops after an earlier loop is the start of the longer one, so the objectives that decode several loops train those depths
    too. A recipe's own law of loops may have drawn more, which a configuration does not say.

    Args:
        config: Of the model.
        run: A run that it resolves.
    """
    trained = config.num_loops
    if config.conditioning == "none":
        return None
    if not config.understands_time:
        first = {"shortcut_consistency": 1, "every_loop": 1, "last_third": 2 * trained // 3 + 1}
        fewest = first.get(config.objective, trained)
        if fewest <= run.num_loops <= trained:
            return None
        seen = f"{trained} passes" if fewest == trained else f"{fewest} to {trained} passes"
    elif config.objective == "shortcut_consistency":
        if trained % run.grid == 0:
            return None
        seen = f"steps on multiples of 1/{trained}"
    else:
        if run == Schedule.uniform(trained):
            return None
        seen = f"{trained} steps of 1/{trained}"
    return (
        f"{_words(run) if config.understands_time else f'{run.num_loops} passes'} were never drawn in training, by the "
        f"configuration (objective={config.objective!r}, num_loops={trained}): this model is told "
        f"{_TOLD[config.conditioning]}, and has seen {seen}; {_remedy(config, run)}"
    )


_TOLD = {
    "loop_index": "the index of each loop",
    "time": "the time of each loop",
    "time_and_step": "the time and step size of each loop",
}


def _words(run: Schedule) -> str:
    return f"{run.num_loops} steps of 1/{run.grid}" if run.is_uniform else f"steps {run}"


def _remedy(config: LoopConfig, run: Schedule) -> str:
    trained = config.num_loops
    if config.objective != "shortcut_consistency":
        return f"run num_loops={trained}, or train with objective='shortcut_consistency'"
    if config.understands_time and run.num_loops <= trained:
        return f"run such steps, for example schedule='coarse-first:{run.num_loops}'"
    return f"run at most {trained} loops"
