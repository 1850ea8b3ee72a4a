"""The figures of the stability study, in the form of arXiv 2605.18797: one panel a system, on the same axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loopformers.report.panels import Axis, Line, LinePanel, plot_line_panels, plot_map_panels
from loopformers.report.plots import ResidualMap
from loopformers.report.style import running_median
from loopformers.studies.group_figures import StudyFigure, line_of, unigram_level
from loopformers.studies.group_tables import NATS
from loopformers.studies.groups import Group, Groups, Spread, variant_name
from loopformers.studies.measures import budget_losses, loss
from loopformers.studies.results import CellResult

__all__ = ["stability_figures"]

SMOOTHING = 9
"""Updates of the running median over training losses."""

STEPS = "step (optimiser updates)"


def stability_figures(groups: Groups) -> list[StudyFigure]:
    """Return every figure that the results allow, in the order of the report."""
    makers = (final_losses, training_losses, gradient_norms, residual_norms, residual_maps, budgets, state_changes)
    return [figure for make in makers if (figure := make(groups)) is not None]


# -- one function a figure -------------------------------------------------------------------------------------


def final_losses(groups: Groups) -> StudyFigure | None:
    """Return the loss of every system by T, T = 1 included."""
    panels = []
    for variant in groups.variants:
        lines = []
        for system in groups.systems:
            own = groups.looped_of(system, variant)
            if own:
                once = groups.one_pass(own[0])
                chain = own if once is None else [once, *own]
                lines.append(line_of(system, [g.loops for g in chain], [g.spread(loss) for g in chain]))
        if lines:
            panels.append(LinePanel(title=variant_name(variant), lines=lines))
    if not panels:
        return None
    return StudyFigure(
        name="final-loss",
        figure=plot_line_panels(
            panels,
            x=Axis(label="loops trained with and run (T)", at_values=True),
            y=Axis(label=f"validation loss ({NATS})", levels=unigram_level(groups)),
        ),
        alt="Validation loss by number of loops for " + ", ".join(groups.systems),
        caption="A recurrence that is stable stays off the unigram level at every T; one whose loops are used falls with T. At "
        "T = 1 systems that differ in their recurrence alone are one model.",
        formula="cross entropy of the validation windows at T loops: median over seeds, and their range as a band",
    )


def training_losses(groups: Groups) -> StudyFigure | None:
    """Return the training loss over steps."""

    def line(group: Group) -> Line | None:
        steps, spreads = _over_steps(group, "loss", smoothing=SMOOTHING)
        return line_of(_loops(group), steps, spreads) if steps else None

    return _panels_by_system(
        groups,
        line,
        name="training-loss",
        what="Training loss by step",
        x=Axis(label=STEPS),
        y=Axis(label=f"training loss ({NATS})", levels=unigram_level(groups)),
        caption="A run that stays at the unigram level has learned how often tokens occur and nothing about context.",
        formula=f"cross entropy of the deepest trained loop, running median of {SMOOTHING} updates: median over seeds, and range",
    )


def gradient_norms(groups: Groups) -> StudyFigure | None:
    """Return the gradient norm over steps, of one seed: a median over seeds would hide how it swings."""

    def line(group: Group) -> Line | None:
        curves = group.results[0].curves
        return Line(label=_loops(group), x=curves["step"], y=curves["gradient_norm"]) if curves.get("step") else None

    return _panels_by_system(
        groups,
        line,
        name="gradient-norm",
        what="Gradient norm by step",
        x=Axis(label=STEPS),
        y=Axis(label="L2 norm before clipping", log=True),
        caption="One set of weights collects gradient from every loop. A norm that swings from step to step is oscillation.",
        formula=f"global L2 norm of the gradient before clipping, seed {_first_seed(groups)}, every update",
    )


def residual_norms(groups: Groups) -> StudyFigure | None:
    """Return the residual norm by loop at the end of training."""

    def line(group: Group) -> Line | None:
        spreads = [group.spread(_last_norm(loop)) for loop in range(group.loops)]
        if group.loops == 1 or not any(spreads):
            return None
        return line_of(_loops(group), list(range(1, group.loops + 1)), spreads)

    return _panels_by_system(
        groups,
        line,
        name="residual-norm",
        what="Residual norm by loop after training",
        x=Axis(label="loop", at_values=True),
        y=Axis(label="mean L2 norm of a token", log=True),
        caption="A residual stream that is far above that of other systems, or grows from loop to loop, is what the paper calls "
        "residual explosion.",
        formula="mean over tokens of the L2 norm of the residual stream before each loop's closing norm, mean of the last ten "
        "updates: median over seeds, and range",
    )


def residual_maps(groups: Groups) -> StudyFigure | None:
    """Return heat maps of the residual norm over training, of each system's deepest runs and one seed."""
    maps = []
    for variant in groups.variants:
        for system in groups.systems:
            own = groups.looped_of(system, variant)
            curves = own[-1].results[0].curves if own else {}
            norms = curves.get("residual_norms") or []
            deepest = max(map(len, norms), default=0)
            if deepest:
                title = own[-1].label + f", T = {own[-1].loops}"
                padded = [[*row, *[None] * (deepest - len(row))] for row in norms]
                maps.append(ResidualMap(title, curves["step"], padded))
    if not any(value for m in maps for row in m.norms for value in row):
        return None
    return StudyFigure(
        name="residual-map",
        figure=plot_map_panels(maps, columns=_columns(groups)),
        alt="Residual norm by loop and step, one map for each of " + ", ".join(m.label for m in maps),
        caption="The same norm over training. What brightens upwards grows from loop to loop, what brightens to the right grows "
        "over training.",
        formula=f"as in the figure before, at every update, seed {_first_seed(groups)}",
    )


def budgets(groups: Groups) -> StudyFigure | None:
    """Return the loss of each trained model by loops run."""

    def line(group: Group) -> Line | None:
        counts = sorted({m for result in group.results for m in budget_losses(result)})
        if group.loops == 1:  # it stands for T = 1 of all systems, which are one model there, and at M = 1 alone
            counts = [m for m in counts if m == 1]
        spreads = [Spread.of(budget_losses(result).get(m) for result in group.results) for m in counts]
        return line_of(_loops(group), counts, spreads) if counts else None

    return _panels_by_system(
        groups,
        line,
        name="budgets",
        what="Validation loss by loops run",
        x=Axis(label="loops run (M)", log=True),
        y=Axis(label=f"validation loss ({NATS})", levels=unigram_level(groups)),
        caption="One model trained at T loops, run at fewer and at more of them. Flat: more loops change nothing.",
        formula="cross entropy of the validation windows at M loops: median over seeds, and range",
    )


def state_changes(groups: Groups) -> StudyFigure | None:
    """Return how far each loop moves the state, after training."""

    def line(group: Group) -> Line | None:
        spreads = [group.spread(_state_change(loop)) for loop in range(group.loops - 1)]
        if group.loops < 2 or not any(spreads):
            return None
        return line_of(_loops(group), list(range(2, group.loops + 1)), spreads)

    return _panels_by_system(
        groups,
        line,
        name="state-change",
        what="Relative change of the state by loop",
        x=Axis(label="loop", at_values=True),
        y=Axis(label="relative change of the state", log=True),
        caption="A change that falls towards zero says that the loops have come to a fixed point: those after it do nothing.",
        formula="mean over tokens of |h_i - h_{i-1}| / |h_{i-1}| on validation windows: median over seeds, and range",
    )


# -- parts -----------------------------------------------------------------------------------------------------


def _by_system(groups: Groups, make: Callable[[Group], Line | None]) -> list[LinePanel]:
    """Return a panel for each variant and looped system: a line a number of loops, T = 1 among them."""
    panels = []
    for variant in groups.variants:
        for system in groups.systems:
            own = groups.looped_of(system, variant)
            if not own:
                continue
            once = groups.one_pass(own[0])
            made = [make(group) for group in (own if once is None else [once, *own])]
            lines = [line for line in made if line is not None]
            if lines:
                panels.append(LinePanel(title=own[0].label, lines=lines))
    return panels


def _panels_by_system(
    groups: Groups,
    make: Callable[[Group], Line | None],
    *,
    name: str,
    what: str,
    x: Axis,
    y: Axis,
    caption: str,
    formula: str,
) -> StudyFigure | None:
    """Return the figure of `_by_system`'s panels, or None where nothing made a line."""
    panels = _by_system(groups, make)
    if not panels:
        return None
    labels = [f"T = {count}" for count in sorted({group.loops for group in groups})]
    return StudyFigure(
        name=name,
        figure=plot_line_panels(panels, x=x, y=y, columns=_columns(groups), labels=labels),
        alt=f"{what}, one panel for each of " + ", ".join(panel.title for panel in panels),
        caption=caption,
        formula=formula,
    )


def _columns(groups: Groups) -> int:
    """Return how many panels stand in a row: with variants, a row is a variant."""
    looped = len({group.system for group in groups.looped()})
    return max(1, min(looped, 4)) if len(groups.variants) > 1 else 3


def _loops(group: Group) -> str:
    return f"T = {group.loops}"


def _over_steps(group: Group, key: str, *, smoothing: int) -> tuple[list[float], list[Spread | None]]:
    """Return the steps and the spread over seeds at each; a seed that ended early is missing from there on."""
    smoothed: list[Mapping[float, float]] = []
    for result in group.results:
        steps, values = result.curves.get("step") or [], result.curves.get(key) or []
        curve = running_median([math.nan if value is None else value for value in values], smoothing)
        smoothed.append(dict(zip(steps, curve, strict=True)))
    steps = sorted({step for curve in smoothed for step in curve})
    return steps, [Spread.of(curve.get(step) for curve in smoothed) for step in steps]


def _last_norm(loop: int) -> Callable[[CellResult], float | None]:
    """Return the measure of a loop's residual norm, mean of the last ten updates that ran it."""

    def measure(result: CellResult) -> float | None:
        rows: Sequence[Sequence[Any]] = result.curves.get("residual_norms") or []
        last = [row[loop] for row in rows[-10:] if len(row) > loop and row[loop] is not None]
        return sum(last) / len(last) if last else None

    return measure


def _state_change(loop: int) -> Callable[[CellResult], float | None]:
    def measure(result: CellResult) -> float | None:
        changes: Sequence[float] = result.loop_use.get("state_changes") or []
        return changes[loop] if len(changes) > loop else None

    return measure


def _first_seed(groups: Groups) -> str:
    return ", ".join(sorted({str(group.results[0].axes["seed"]) for group in groups}))
