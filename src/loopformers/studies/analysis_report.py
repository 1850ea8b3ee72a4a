"""What `loopformers analyze` shows: two tables, figures with their formulas, a page, and what was seen in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopformers.analysis.profile import LoopMeasures, ModelProfile, RunProfile
from loopformers.report.loop_plots import (
    LensGrid,
    PathPanel,
    SimilarityMap,
    plot_lens,
    plot_over_loops,
    plot_paths,
    plot_similarity_maps,
)
from loopformers.report.page import Page, Picture, Prose, Section
from loopformers.report.plots import Curve, figure_bytes
from loopformers.report.tables import Column, Table, Value
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["analysis_files", "loops_table", "picture_names", "runs_table", "summarise"]

Profiles = Mapping[str, ModelProfile]
"""By the model's label, in order; all over the same text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One measure of each loop: how it is named and drawn.

    Args:
        key: Field of `LoopMeasures`; the picture's file is named after it.
        title: In tables.
        unit: Its unit; empty: a ratio.
        formula: How it is computed.
        caption: What it means.
        log: Logarithmic y axis.
        factor: From the measured unit to the shown one.
    """

    key: str
    title: str
    unit: str = ""
    formula: str
    caption: str
    log: bool = False
    factor: float = 1.0

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def value(self, loop: LoopMeasures) -> float | None:
        """Return the shown value."""
        raw: float | None = getattr(loop, self.key)
        return None if raw is None else raw * self.factor


MOVEMENT = (
    Measure(
        key="state_norm",
        title="state norm",
        unit="L2, mean over tokens",
        formula="|h_t|, mean over tokens",
        caption="How large states are. Where loops chain raw states this may grow with every loop; a closing norm fixes it.",
        log=True,
    ),
    Measure(
        key="relative_change",
        title="relative change",
        formula="|h_t - h_{t-1}| / |h_t|, mean over tokens",
        caption="How far a loop moves a token. 0 is a fixed point. Growth along the state itself counts here; CKA ignores it.",
    ),
    Measure(
        key="update_cosine",
        title="cosine of successive updates",
        formula="cos(h_t - h_{t-1}, h_{t-1} - h_{t-2}), mean over tokens",
        caption="1: loops go on in one direction, which one larger step could do; 0: each takes a new one; -1: back and forth.",
    ),
)

GEOMETRY = (
    Measure(
        key="anisotropy",
        title="anisotropy",
        formula="mean of cos(h_i, h_j) over all pairs i < j of a sequence's tokens, mean over sequences",
        caption="1: all tokens point the same way; 0: no direction is preferred.",
    ),
    Measure(
        key="curvature",
        title="curvature",
        unit="radians",
        formula="arccos(cos(v_i, v_{i+1})), v_i = h_{i+1} - h_i along the sequence; mean over positions and sequences",
        caption="How sharply the way from token to token turns; 1.57 is a right angle.",
    ),
    Measure(
        key="prompt_entropy",
        title="prompt entropy",
        unit="nats",
        formula="-sum of l ln l over the eigenvalues l of K / trace K, K = Z Z^T, rows of Z centred over the sequence and of "
        "length 1; mean over sequences",
        caption="How evenly a sequence's tokens spread over directions.",
    ),
    Measure(
        key="relative_prompt_entropy",
        title="prompt entropy, share of its maximum",
        formula="prompt entropy / min(ln S, ln d), S tokens of width d",
        caption="The same, comparable between widths and window lengths.",
    ),
)

LENS = (
    Measure(
        key="loss",
        title="loss",
        unit="nats per token",
        formula="-ln p(next token), p = softmax(head(norm(h_t))), mean over targets",
        caption="What each loop's state is worth to the head (logit lens). A model trained on its last loop alone may say "
        "little before it: that is no budget's loss where step sizes differ.",
    ),
    Measure(
        key="settled",
        title="settled tokens",
        unit="%",
        formula="share of targets whose depth is at most t; depth = min{t: argmax z_s = argmax z_M for all s >= t}",
        caption="After which loop a token's likeliest continuation no longer changes: the depth that it needs.",
        factor=100,
    ),
)

MEASURES = (*MOVEMENT, *GEOMETRY, *LENS)

CKA, PATHS = "cka", "trajectories"
"""Names of pictures beside those of measures."""


def runs_table(profiles: Profiles) -> Table:
    """Return one row a run: how far it moves, and what that is worth."""
    columns = (
        Column(key="run", title="run"),
        Column(key="loops", title="loops", align="right"),
        Column(key="first", title="loss, loop 1", unit="nats per token", align="right", format=".3f"),
        Column(key="last", title="loss, last loop", unit="nats per token", align="right", format=".3f"),
        Column(key="ends", title="CKA, loop 1 and last", align="right", format=".3f"),
        Column(key="mean", title="CKA, mean of pairs", align="right", format=".3f"),
        Column(key="change", title="relative change, last loop", align="right", format=".3f"),
        Column(key="cosine", title="update cosine, last loop", align="right", format=".2f"),
        Column(key="depth", title="depth needed", unit="mean loops", align="right", format=".2f"),
    )
    rows = tuple(
        {
            "run": label,
            "loops": run.num_loops,
            "first": run.loops[0].loss,
            "last": run.loops[-1].loss,
            "ends": run.cka[0][-1] if run.num_loops > 1 else None,
            "mean": run.mean_cka,
            "change": run.loops[-1].relative_change,
            "cosine": run.loops[-1].update_cosine,
            "depth": run.mean_depth_needed,
        }
        for label, run in _runs(profiles)
    )
    profile = next(iter(profiles.values()))
    return Table(
        title="Runs",
        columns=columns,
        rows=rows,
        note=f"{profile.num_windows:,} windows, {profile.num_tokens:,} tokens, {profile.num_targets:,} targets. A CKA near 1 "
        "between different loops is stagnation: they say the same.",
    )


def loops_table(profiles: Profiles) -> Table:
    """Return one row a loop of each run, with every measure."""
    rows: list[Mapping[str, Value]] = [
        {"run": label, "loop": loop.loop, **{m.key: m.value(loop) for m in MEASURES}}
        for label, run in _runs(profiles)
        for loop in run.loops
    ]
    columns = (
        Column(key="run", title="run"),
        Column(key="loop", title="loop", align="right"),
        *(Column(key=m.key, title=m.title, unit=m.unit, align="right", format=".3f") for m in MEASURES),
    )
    return Table(title="Loops", columns=columns, rows=tuple(rows))


def summarise(profiles: Profiles) -> str:
    """Say in a sentence a model how far its first run moves from loop 1 on, and what that gains."""
    sentences = []
    for label, profile in profiles.items():
        run = profile.runs[0]
        if run.num_loops == 1:
            sentences.append(f"{label} runs one loop, so nothing moves.")
            continue
        settled = next(loop.loop for loop in run.loops if loop.settled >= 0.9)
        sentences.append(
            f"{label}: the states of loop 1 and loop {run.num_loops} have a CKA of {run.cka[0][-1]:.2f}, the loss read from them "
            f"goes from {run.loops[0].loss:.2f} to {run.loops[-1].loss:.2f} nats per token, and nine tokens in ten have "
            f"settled after loop {settled}."
        )
    return " ".join(sentences)


def analysis_files(
    page_name: str, profiles: Profiles, *, decode: Callable[[int], str], source: str, footer: str = ""
) -> dict[str, str | bytes]:
    """Draw the page, and every picture as PNG.

    Args:
        page_name: Of the HTML file.
        profiles: By the model's label.
        decode: The text of a token.
        source: What text was run, in words.
        footer: Where the numbers come from.

    Returns:
        Contents by file name.
    """
    figures = _Figures()
    movement = [figures.measure(measure, profiles) for measure in MOVEMENT if _is_known(measure, profiles)]
    similarity = []
    if any(run.num_loops > 1 for _, run in _runs(profiles)):
        movement.append(figures.paths(profiles))
        similarity.append(Section("Do loops say the same?", [figures.similarity(profiles)]))
    page = Page(
        title="What loops do: " + " and ".join(profiles),
        lead=summarise(profiles),
        sections=[
            Section("Runs", [Prose(source), runs_table(profiles)]),
            Section("How far do loops move a token?", movement),
            *similarity,
            Section("How do tokens lie?", [figures.measure(measure, profiles) for measure in GEOMETRY]),
            Section(
                "What would each loop answer?",
                [
                    *(figures.measure(measure, profiles) for measure in LENS),
                    *(figures.lens(model, profile.runs[0], decode) for model, profile in profiles.items()),
                ],
            ),
            Section("Every loop", [loops_table(profiles)]),
        ],
        footer=footer,
    )
    return {**figures.files, page_name: page.to_html()}


def picture_names(labels: Iterable[str]) -> list[str]:
    """Return the names of all files that the pictures of models may have, by the models' labels."""
    stems = [*(_picture_name(measure) for measure in MEASURES), CKA, PATHS, *map(_lens_name, labels)]
    return [f"{stem}.png" for stem in stems]


class _Figures:
    """Draws figures, keeps each as a PNG, and returns it as a picture of the page."""

    def __init__(self) -> None:
        self.files: dict[str, str | bytes] = {}

    def _picture(self, figure: Figure, name: str, alt: str, caption: str, formula: str) -> Picture:
        self.files[f"{name}.png"] = figure_bytes(figure, "png")
        return Picture(content=figure_bytes(figure), alt=alt, caption=caption, formula=formula)

    def measure(self, measure: Measure, profiles: Profiles) -> Picture:
        """Draw a measure over loops."""
        curves = [
            Curve(label, [loop.loop for loop in run.loops], [measure.value(loop) for loop in run.loops])
            for label, run in _runs(profiles)
        ]
        figure = plot_over_loops(curves, y_label=measure.label, log=measure.log)
        alt = f"{measure.title} by loop for " + ", ".join(curve.label for curve in curves)
        return self._picture(figure, _picture_name(measure), alt, measure.caption, measure.formula)

    def similarity(self, profiles: Profiles) -> Picture:
        """Draw the CKA maps; of two models side by side."""
        maps = [SimilarityMap(label, run.cka) for label, run in _runs(profiles)]
        if len(profiles) == 2:  # a row a schedule
            half = len(maps) // 2
            maps = [m for pair in zip(maps[:half], maps[half:], strict=True) for m in pair]
        return self._picture(
            plot_similarity_maps(maps),
            CKA,
            "Similarity of every two loops for " + ", ".join(m.label for m in maps),
            "Bright off the diagonal: two loops hold the same up to rotation and scale, which is stagnation. All maps have one "
            "colour scale; 1 is what rounds to 1.00.",
            "CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|), Frobenius norms; X, Y the states of two loops, all tokens by width, "
            "centred over tokens",
        )

    def paths(self, profiles: Profiles) -> Picture:
        """Draw trajectories, one panel a model."""
        panels = []
        for model, profile in profiles.items():
            x, y = profile.plane_shares
            shares = "nothing moves" if math.isnan(x) else f"{x:.0%} and {y:.0%}"
            panels.append(
                PathPanel(
                    f"{model}: {shares}",
                    [
                        (_schedule_label(run) if len(profile.runs) > 1 else "mean token", run.mean_path)
                        for run in profile.runs
                    ],
                    profile.runs[0].token_paths,
                )
            )
        return self._picture(
            plot_paths(panels, x_label="first direction (1 = r)", y_label="second direction (1 = r)"),
            PATHS,
            "Ways of tokens from loop to loop for " + ", ".join(profiles),
            "Where loops take tokens, from their state after loop 1, as a share of the last state's norm. In the title: how "
            "much of all movement lies along each direction.",
            "B^T (h_t - h_1) / r; B: the two leading eigenvectors of E[(h_t - m)(h_t - m)^T], m the token's mean over loops; r: "
            "mean |h_M|",
        )

    def lens(self, label: str, run: RunProfile, decode: Callable[[int], str]) -> Picture:
        """Draw the lens of a run."""
        grid = LensGrid(
            given=[decode(token.input_id) for token in run.lens],
            following=[decode(token.target_id) for token in run.lens],
            answers=[[decode(token.loops[t].token_ids[0]) for token in run.lens] for t in range(run.num_loops)],
            probabilities=[[token.loops[t].probabilities[0] for token in run.lens] for t in range(run.num_loops)],
            settled=[token.depth_needed for token in run.lens],
        )
        return self._picture(
            plot_lens(grid, title=label),
            _lens_name(label),
            f"Likeliest next token by loop and position for {label}",
            f"{label}: the likeliest next token after each loop, at the end of one window. The frame begins "
            "where the answer stays.",
            "argmax of softmax(head(norm(h_t))), and its probability",
        )


def _runs(profiles: Profiles) -> list[tuple[str, RunProfile]]:
    """Return every run under a label that names what tells it from the others: its model, its schedule, or both."""
    runs = []
    for model, profile in profiles.items():
        for run in profile.runs:
            parts = [model] if len(profiles) > 1 or len(profile.runs) == 1 else []
            parts += [_schedule_label(run)] if len(profile.runs) > 1 else []
            runs.append((", ".join(parts), run))
    return runs


def _schedule_label(run: RunProfile) -> str:
    uniform = Schedule.uniform(run.num_loops)
    return f"{run.num_loops} loops" if run.schedule == str(uniform) else run.schedule


def _is_known(measure: Measure, profiles: Profiles) -> bool:
    return any(measure.value(loop) is not None for _, run in _runs(profiles) for loop in run.loops)


def _picture_name(measure: Measure) -> str:
    return measure.key.replace("_", "-")


def _lens_name(label: str) -> str:
    return "lens-" + "".join(c if c.isalnum() or c in "-." else "-" for c in label)
