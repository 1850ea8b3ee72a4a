"""The figures of the elastic study: one panel a role, on the same axes, with the whole elastic model in each."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from loopformers.report.panels import Axis, Line, LinePanel, plot_line_panels
from loopformers.studies.elastic_comparison import (
    FULL,
    ROLES,
    against_controls,
    budgets_of,
    elastic_groups,
    layers_of,
    role_of,
    trained_for,
)
from loopformers.studies.elastic_tables import WITHIN
from loopformers.studies.group_figures import StudyFigure, line_of, unigram_level
from loopformers.studies.group_tables import NATS
from loopformers.studies.groups import Group, Groups, Spread, Variant, variant_name
from loopformers.studies.measures import budget_flops, budget_solved, loss_at

__all__ = ["elastic_figures"]

TRAINED_FOR = "one model for each M"
"""The line through controls, each at the budget that it was trained for."""

CUT = 0.8
"""Nats above the best loss at which figures of text are cut, so that hundredths are seen beside models that fail at M = 1."""

MEGAFLOP = 1e6

Place = Callable[[Group, int], float | None]
"""From a group and a number of loops to a position on the x axis."""


def elastic_figures(groups: Groups) -> list[StudyFigure]:
    """Return every figure that the results allow, in the order of the report."""
    makers = (loss_by_budget, loss_by_flops, ratios, solved_by_budget)
    return [figure for make in makers if (figure := make(groups)) is not None]


def loss_by_budget(groups: Groups) -> StudyFigure | None:
    """Return the loss by loops run."""
    return _losses(
        groups,
        name="budgets",
        place=lambda group, num_loops: num_loops,
        x=Axis(label="loops run (M)", log=True),
        formula="cross entropy of the validation windows at M loops, uniform step sizes",
        caption="Models with another number of distinct layers are in the next figure alone.",
        layers=_usual_layers(groups),
    )


def loss_by_flops(groups: Groups) -> StudyFigure | None:
    """Return the loss by operations of a forward."""
    return _losses(
        groups,
        name="flops",
        place=_megaflops,
        x=Axis(label="forward compute (MFLOP per token)", log=True),
        formula="cross entropy of the validation windows, against operations of a forward at M loops by the tokens of a window",
        caption="One point a number of loops, M = 1 to 2T.",
        layers=None,
    )


def ratios(groups: Groups) -> StudyFigure | None:
    """Return each elastic model's loss by its controls'."""
    panels = []
    for group in elastic_groups(groups):
        compared = against_controls(groups, group)
        lines = []
        for label, find in (("model trained for M", "fixed"), ("loopformer at M", "loopformer")):
            beside = [(at, other) for at in compared if (other := getattr(at, find)) is not None]
            if beside:
                places = [at.num_loops for at, _ in beside]
                lines.append(line_of(label, places, [at.ratio_to(other) for at, other in beside]))
        if lines:
            panels.append(LinePanel(title=group.label, lines=lines))
    if not panels:
        return None
    return StudyFigure(
        name="ratios",
        figure=plot_line_panels(
            panels,
            x=Axis(label="loops run (M)", log=True),
            y=Axis(label="loss / the control's", levels={f"goal: {1 + WITHIN:.2f}": 1 + WITHIN}),
            columns=2,
        ),
        alt="Loss of elastic models by that of their controls, at each number of loops",
        caption="One model for every budget against the best for each. The goal is reached where both lines are below the level, "
        "and the elastic model is better where both are below 1.",
        formula="loss of the elastic model at M by the control's at M, paired by seed: median over seeds, and range",
    )


def solved_by_budget(groups: Groups) -> StudyFigure | None:
    """Return the share of a task's questions that are answered exactly, by loops run."""

    def spread(group: Group, num_loops: int) -> Spread | None:
        return group.spread(lambda result: budget_solved(result).get(num_loops))

    panels = _panels(groups, lambda group, num_loops: num_loops, spread, layers=_usual_layers(groups))
    if not panels:
        return None
    return StudyFigure(
        name="solved",
        figure=plot_line_panels(
            panels,
            x=Axis(label="loops run (M)", log=True),
            y=Axis(label="questions answered exactly", limits=(0.0, 1.02)),
            columns=2,
            labels=_references(groups),
            own_legends=True,
        ),
        alt="Share of questions answered exactly by loops run, one panel for each of " + ", ".join(_titles(panels)),
        caption="Loops that are used answer more than one pass does.",
        formula="share of questions whose every target is the most likely token: median over seeds, and range",
    )


# -- parts -----------------------------------------------------------------------------------------------------


def _losses(
    groups: Groups, *, name: str, place: Place, x: Axis, formula: str, caption: str, layers: int | None
) -> StudyFigure | None:
    panels = _panels(groups, place, lambda group, m: group.spread(loss_at(m)), layers=layers)
    values = [value for panel in panels for line in panel.lines for value in line.y if value is not None]
    if not values:
        return None
    is_task = any(budget_solved(result) for group in groups for result in group.results)
    limits, cut = None, ""
    if not is_task and max(values) > min(values) + CUT:
        limits = (min(values) - 0.05 * CUT, min(values) + CUT)
        cut = f" The axis is cut {CUT:g} nats above the least loss; the table has what lies above."
    levels = {} if limits else unigram_level(groups)
    return StudyFigure(
        name=name,
        figure=plot_line_panels(
            panels,
            x=x,
            y=Axis(label=f"validation loss ({NATS})", levels=levels, limits=limits),
            columns=2,
            labels=_references(groups),
            own_legends=True,
        ),
        alt=f"Validation loss against {x.label}, one panel for each of " + ", ".join(_titles(panels)),
        caption=f"{FULL} is in each panel; the line of {TRAINED_FOR} joins controls of fixed depth, each at its own T. "
        f"{caption}{cut}",
        formula=f"{formula}: median over seeds, and range",
    )


def _panels(
    groups: Groups,
    place: Place,
    spread: Callable[[Group, int], Spread | None],
    *,
    layers: int | None,
) -> list[LinePanel]:
    """Return a panel for each variant and role, with the references in each; `layers`: groups of another number are left out."""
    panels = []
    for variant in groups.variants:
        shown = [g for g in groups if g.variant == variant and layers in (None, layers_of(g))]
        references = [_line(g, place, spread, _name(groups, g)) for g in shown if g.system == FULL]
        references.append(_fixed_line(groups, variant, place, spread))
        for role in ROLES:
            own = [g for g in shown if role_of(g) == role and g.system != FULL]
            lines = [line for line in (_line(g, place, spread, _name(groups, g)) for g in own) if line is not None]
            known = [line for line in references if line is not None]
            if lines or (known and role == ROLES[0]):
                title = f"{variant_name(variant)}: {role}" if variant else role
                panels.append(LinePanel(title=title, lines=[*known, *lines]))
    return panels


def _line(group: Group, place: Place, spread: Callable[[Group, int], Spread | None], label: str) -> Line | None:
    points = [(x, s) for m in budgets_of(group) if (x := place(group, m)) is not None and (s := spread(group, m))]
    return line_of(label, [x for x, _ in points], [s for _, s in points]) if points else None


def _fixed_line(
    groups: Groups, variant: Variant, place: Place, spread: Callable[[Group, int], Spread | None]
) -> Line | None:
    fixed = [(m, trained_for(groups, m, variant)) for m in sorted({group.loops for group in groups})]
    points = [
        (x, s)
        for m, group in fixed
        if group is not None and (x := place(group, m)) is not None and (s := spread(group, m))
    ]
    return line_of(TRAINED_FOR, [x for x, _ in points], [s for _, s in points]) if len(points) > 1 else None


def _references(groups: Groups) -> list[str]:
    """Return the labels of the lines that stand in every panel."""
    return [
        *(_name(groups, group) for group in groups if group.system == FULL and not group.variant),
        FULL,
        TRAINED_FOR,
    ]


def _name(groups: Groups, group: Group) -> str:
    """Return a group's name in a legend: its T stands there where the system has several."""
    same = [g for g in groups if (g.system, g.variant) == (group.system, group.variant)]
    return f"{group.system}, T = {group.loops}" if len(same) > 1 else group.system


def _titles(panels: list[LinePanel]) -> list[str]:
    return [panel.title for panel in panels]


def _usual_layers(groups: Groups) -> int | None:
    return statistics.mode(layers_of(group) for group in groups)


def _megaflops(group: Group, num_loops: int) -> float | None:
    spread = Spread.of(budget_flops(result).get(num_loops) for result in group.results)
    return None if spread is None else spread.median / MEGAFLOP
