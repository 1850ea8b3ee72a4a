"""Draw docs/images/tour.svg: `python docs/images/tour.py [FILE]`.

The page is opaque, so it reads on light and dark backgrounds alike; the colours are Okabe and Ito's, which colour-blind
readers tell apart, and each is labelled in words too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, PALE, PAPER = "#222222", "#666666", "#ffffff"
STACK, RECURRENCE, CONDITIONING, SCHEDULE = "#0072B2", "#C04F00", "#007A5A", "#8A4A78"
LOOP_LEFT = (1.9, 4.85, 7.8)
LOOP_WIDTH, LAYERS = 1.75, 3
TIME_LEFT, TIME_RIGHT = 1.9, 9.55
STEPS = (5, 2, 1)  # coarse-first:3 on a grid of 8


def box(axes: Any, x: float, y: float, width: float, height: float, *, edge: str, fill: str, text: str = "") -> None:
    """Draw a rounded box with a text in its middle."""
    style = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=edge, lw=1.4))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, fontsize=10)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], *, colour: str, line: Any = "-") -> None:
    """Draw an arrow."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, lw=1.7, color=colour, ls=line))


def draw_loop(axes: Any, number: int, left: float) -> None:
    """Draw one loop of the stack and what it is told."""
    bottom, height, gap = 2.95, 0.4, 0.14
    for layer in range(LAYERS):
        y = bottom + layer * (height + gap)
        box(axes, left, y, LOOP_WIDTH, height, edge=STACK, fill="#E3F0F8", text=f"layer {layer + 1}")
        if layer:
            arrow(axes, (left + LOOP_WIDTH / 2, y - gap), (left + LOOP_WIDTH / 2, y), colour=STACK)
    top = bottom + LAYERS * (height + gap) - gap
    axes.text(left + LOOP_WIDTH / 2, top + 0.42, f"loop {number}", ha="center", color=INK, fontsize=10, weight="bold")
    # What the loop is told: t, its start, and Δ, its step size.
    start, step, grid = sum(STEPS[: number - 1]), STEPS[number - 1], sum(STEPS)
    arrow(axes, (left + LOOP_WIDTH / 2, 2.3), (left + LOOP_WIDTH / 2, bottom), colour=CONDITIONING)
    told = f"t = {start}/{grid},  Δ = {step}/{grid}"
    axes.text(left + LOOP_WIDTH / 2, 2.08, told, ha="center", color=CONDITIONING, fontsize=10)


def draw_recurrence(axes: Any) -> None:
    """Draw what goes from loop to loop."""
    entry, middle, exit_height = 3.15, 3.69, 4.23
    box(axes, 0.25, 2.95, 0.95, 1.48, edge=INK, fill=PAPER, text="tokens\n↓\n$e$")
    arrow(axes, (1.2, entry), (LOOP_LEFT[0], entry), colour=RECURRENCE, line=(0, (3, 2)))
    for i, left in enumerate(LOOP_LEFT):
        right = left + LOOP_WIDTH
        following = LOOP_LEFT[i + 1] if i + 1 < len(LOOP_LEFT) else 10.05
        state = right + 0.42 if i + 1 < len(LOOP_LEFT) else 9.95
        axes.text(state, exit_height + 0.02, f"$h_{i + 1}$", ha="center", va="center", color=INK, fontsize=13)
        arrow(axes, (right, exit_height), (state - 0.16, exit_height), colour=INK)
        if i + 1 == len(LOOP_LEFT):
            break
        for height in (exit_height, middle, entry):
            arrow(axes, (state + 0.16, exit_height - 0.04), (following, height), colour=RECURRENCE)
        start = ((state, exit_height - 0.2), (following, 2.95))
        arrow(axes, *start, colour=RECURRENCE, line=(0, (3, 2)))
        axes.text(state + 0.12, 4.62, "injection", ha="center", color=RECURRENCE, fontsize=8.5)
        axes.text(state - 0.02, 2.85, "stream start", ha="center", color=RECURRENCE, fontsize=8.5)
    box(axes, 10.35, 3.83, 1.05, 0.8, edge=INK, fill=PAPER, text="norm, head\n↓\nlogits")
    arrow(axes, (10.1, exit_height), (10.35, exit_height), colour=INK)


def draw_schedule(axes: Any) -> None:
    """Draw the axis of time, cut into step sizes."""
    width, grid, left = TIME_RIGHT - TIME_LEFT, sum(STEPS), TIME_LEFT
    for i, step in enumerate(STEPS):
        right = left + width * step / grid
        label = f"Δ{'₁₂₃'[i]} = {step}/{grid}"
        axes.add_patch(
            FancyBboxPatch((left, 1.05), right - left, 0.36, boxstyle="square,pad=0", fc="#F3E7EF", ec=SCHEDULE, lw=1.4)
        )
        axes.text((left + right) / 2, 1.23, label, ha="center", va="center", color=INK, fontsize=9.5)
        loop_middle = LOOP_LEFT[i] + LOOP_WIDTH / 2
        axes.plot([left, loop_middle], [1.45, 1.98], color=SCHEDULE, lw=1.1, ls=(0, (3, 2)))
        left = right
    axes.text(TIME_LEFT - 0.12, 1.23, "time 0", ha="right", va="center", color=SCHEDULE, fontsize=10)
    axes.text(TIME_RIGHT + 0.12, 1.23, "1", ha="left", va="center", color=SCHEDULE, fontsize=10)


def draw_legend(axes: Any) -> None:
    """Say what each colour stands for."""
    words = (
        (STACK, "stack", "N layers, the same\nweights in every loop"),
        (RECURRENCE, "recurrence", "where a loop starts, and\nwhat its layers see of $h$"),
        (CONDITIONING, "conditioning", "whether a loop is told\nits time and step size"),
        (SCHEDULE, "schedule", "how many loops, and which\nstep sizes: chosen per run"),
    )
    for i, (colour, word, meaning) in enumerate(words):
        x = 0.3 + 2.85 * i
        axes.add_patch(FancyBboxPatch((x, 0.2), 0.1, 0.5, boxstyle="square,pad=0", fc=colour, ec=colour))
        axes.text(x + 0.2, 0.6, word, va="center", color=colour, fontsize=11, weight="bold")
        axes.text(x + 0.2, 0.26, meaning, va="center", color=INK, fontsize=8.5)


def main() -> None:
    """Draw the picture into the file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    with mpl.rc_context({"svg.hashsalt": "tour", "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"}):
        figure = Figure(figsize=(11.7, 5.35), facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, 11.7), ylim=(0, 5.35))
        axes.axis("off")
        for i, left in enumerate(LOOP_LEFT):
            draw_loop(axes, i + 1, left)
        draw_recurrence(axes)
        draw_schedule(axes)
        draw_legend(axes)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main()
