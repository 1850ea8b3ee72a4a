"""Which models were trained to be left early, and the warning for those that were not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from loopformers.errors import ExitWarning, warn_caller

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["exit_warning", "note_measurement", "warn_where_untrained", "why_untrained"]

_MEASURED: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def why_untrained(config: LoopConfig) -> str | None:
    """Return why the states that tokens leave with were never decoded in training, or None where they were.

    A token that leaves after loop i has run the first i loops of the schedule. `every_loop` decodes each of those states.
    So does shortcut consistency in a model that is told no time: its short runs of i passes are the same loops. A model
    that is told its time learns runs that end at time 1, and the first i of T loops end at i/T.
    """
    match config.objective:
        case "every_loop":
            return None
        case "shortcut_consistency" if not config.understands_time:
            return None
        case "shortcut_consistency":
            return "its short runs in training end at time 1, and a token that leaves early stops before it"
        case "last_third":
            return "objective='last_third' decodes the last third of the loops alone"
        case _:
            return f"objective={config.objective!r} decodes the last loop alone"


def exit_warning(model: LoopedForCausalLM, rule: object) -> str | None:
    """Return what there is to warn of, with the loss that was measured, or None."""
    reason = why_untrained(model.config)
    if reason is None:
        return None
    measured = _MEASURED.get(model, {}).get(str(rule))
    cost = measured or (
        "what that costs here has not been measured: loopformers.evaluation.exit.measure_exit(model, rule, windows) does"
    )
    return f"exit rule {rule} on a model that was not trained for it: {reason}; {cost}"


def note_measurement(model: LoopedForCausalLM, rule: object, text: str) -> None:
    """Keep what a rule was measured to cost, for the warning."""
    _MEASURED.setdefault(model, {})[str(rule)] = text


def warn_where_untrained(model: LoopedForCausalLM, rule: object) -> None:
    """Warn with ExitWarning where a model was not trained to be left early."""
    text = exit_warning(model, rule)
    if text is not None:
        warn_caller(text, ExitWarning)
