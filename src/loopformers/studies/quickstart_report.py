"""What the quickstart shows: two tables, four pictures, a page, and the sentences that say what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopformers.report.page import Block, Page, Picture, Sample, Section, save_page
from loopformers.report.plots import (
    Curve,
    ResidualMap,
    figure_bytes,
    gradient_norm_panel,
    loss_panel,
    plot_budgets,
    plot_over_steps,
    plot_residual_maps,
    plot_residual_norms,
)
from loopformers.report.tables import Column, Table, Value
from loopformers.studies.quickstart import QuickstartSettings, SystemResult, read_records

__all__ = ["budget_table", "sample_table", "summarise", "systems_table", "write_report"]


def write_report(path: Path, settings: QuickstartSettings, results: Sequence[SystemResult], folder: Path) -> Path:
    """Write the page.

    Args:
        path: The HTML file.
        settings: Of the run.
        results: Trained systems, at least one.
        folder: The run's, which holds each system's log.
    """
    records = {result.system: read_records(folder, result.system) for result in results}
    blocks: list[Section] = [
        Section("How each system ended", [systems_table(results), _details(results)]),
        Section("Training", [_losses(settings, results, records), _gradient_norms(results, records)]),
        Section("Inside the loop", [_residual_norms(results, records), _residual_maps(results, records)]),
        Section("One model, several budgets", [budget_table(results), _budgets(results), *_samples(results)]),
    ]
    page = Page(
        title="Quickstart: three looped transformers",
        lead=summarise(results),
        sections=blocks,
        footer=_footer(settings),
    )
    return save_page(page, path)


def _details(results: Sequence[SystemResult]) -> Table:
    columns = (
        Column(key="system", title="system"),
        Column(key="reason", title="what the verdict rests on"),
        Column(key="bits", title="loss", unit="bits per byte", align="right", format=".3f"),
        Column(key="parameters", title="parameters", align="right", format=",d"),
        Column(key="flops", title="training compute", unit="TFLOP", align="right", format=".2f"),
    )
    rows: tuple[Mapping[str, Value], ...] = tuple(
        {
            "system": result.system,
            "reason": result.reason,
            "bits": result.bits_per_byte,
            "parameters": result.num_parameters,
            "flops": result.training_flops / 1e12,
        }
        for result in results
    )
    return Table(title="Verdicts and costs", columns=columns, rows=rows)


def _curves(results: Sequence[SystemResult], records: Mapping[str, list[dict[str, Any]]], key: str) -> list[Curve]:
    return [
        Curve(result.system, [r["step"] for r in records[result.system]], [r[key] for r in records[result.system]])
        for result in results
    ]


def _losses(
    settings: QuickstartSettings, results: Sequence[SystemResult], records: Mapping[str, list[dict[str, Any]]]
) -> Picture:
    # An objective of several terms has a loss of another scale: its long trajectory's cross entropy compares with others.
    curves = [
        Curve(
            result.system,
            [r["step"] for r in records[result.system]],
            [r["loss_parts"].get("cross_entropy", r["loss"]) for r in records[result.system]],
        )
        for result in results
    ]
    smoothing = 9 if settings.num_steps >= 50 else 1
    panel = loss_panel(
        curves, unigram_cross_entropy=results[0].unigram_loss, smoothing=smoothing, title="Training loss at T loops"
    )
    return Picture(
        content=figure_bytes(plot_over_steps([panel])),
        alt="Training loss by step for " + ", ".join(records),
        caption="A model that stays at the unigram level has learned how often tokens occur and nothing about context.",
        formula="cross entropy of the full run of T loops, mean over the batch's targets",
    )


def _gradient_norms(results: Sequence[SystemResult], records: Mapping[str, list[dict[str, Any]]]) -> Picture:
    panel = gradient_norm_panel(_curves(results, records, "gradient_norm"))
    return Picture(
        content=figure_bytes(plot_over_steps([panel])),
        alt="Gradient norm by step for " + ", ".join(records),
        caption="One set of weights collects gradient from every loop. A norm that swings from step to step is oscillation.",
        formula="global L2 norm of the gradient before clipping",
    )


def _residual_norms(results: Sequence[SystemResult], records: Mapping[str, list[dict[str, Any]]]) -> Picture:
    curves = []
    for result in results:
        norms = records[result.system][-1]["residual_norms"]
        curves.append(Curve(result.system, list(range(1, len(norms) + 1)), norms))
    return Picture(
        content=figure_bytes(plot_residual_norms(curves)),
        alt="Residual norm by loop after the last update for " + ", ".join(records),
        caption="A residual stream far above that of the others is what the paper on FLT calls explosion.",
        formula="mean over tokens of the L2 norm of the residual stream before each loop's closing norm, last update",
    )


def _residual_maps(results: Sequence[SystemResult], records: Mapping[str, list[dict[str, Any]]]) -> Picture:
    maps = [
        ResidualMap(
            result.system,
            [r["step"] for r in records[result.system]],
            [r["residual_norms"] for r in records[result.system]],
        )
        for result in results
    ]
    return Picture(
        content=figure_bytes(plot_residual_maps(maps)),
        alt="Residual norm by loop and step for " + ", ".join(records),
        caption="The same norm over training.",
        formula="as beside it, at every update",
    )


def _budgets(results: Sequence[SystemResult]) -> Picture:
    curves = [
        Curve(result.system, [b["num_loops"] for b in result.budgets], [b["perplexity"] for b in result.budgets])
        for result in results
    ]
    return Picture(
        content=figure_bytes(plot_budgets(curves, trained_loops={r.system: r.num_loops for r in results})),
        alt="Perplexity by number of loops for " + ", ".join(result.system for result in results),
        caption="Validation perplexity of each model when it runs M loops.",
        formula="exp of the cross entropy over all validation targets",
    )


def _samples(results: Sequence[SystemResult]) -> list[Block]:
    elastic = elastic_result(results)
    if elastic is None:
        return []
    return [
        Sample(title=f"{elastic.system}, {_loops(s['num_loops'])}", prompt=s["prompt"], continuation=s["continuation"])
        for s in elastic.samples
    ]


def _footer(settings: QuickstartSettings) -> str:
    return (
        f"{settings.num_layers} layers of width {settings.hidden_size}, T = {settings.num_loops} loops, "
        f"{settings.num_steps} updates of {settings.batch_size} x {settings.seq_len} tokens of {settings.source!r}, "
        f"Muon at {settings.matrix_lr:g} and AdamW, seed {settings.seed}. Validation: "
        f"{settings.num_validation_windows} windows at most. Made by loopformers quickstart."
    )


def systems_table(results: Sequence[SystemResult]) -> Table:
    """Return one row a system: how it ended, and how it got there."""
    columns = (
        Column(key="system", title="system"),
        Column(key="loss", title="validation loss", unit="nats per token", align="right", format=".3f"),
        Column(key="perplexity", title="perplexity", align="right", format=".1f"),
        Column(key="unigram_loss", title="unigram level", unit="nats per token", align="right", format=".3f"),
        Column(key="verdict", title="verdict"),
        Column(key="spread", title="gradient norm spread", unit="std of log", align="right", format=".2f"),
        Column(key="residual_norm", title="residual norm, last loop", align="right", format=".1f"),
    )
    rows: list[Mapping[str, Value]] = [
        {
            "system": result.system,
            "loss": result.loss,
            "perplexity": result.perplexity,
            "unigram_loss": result.unigram_loss,
            "verdict": result.verdict,
            "spread": result.log_gradient_norm_std,
            "residual_norm": result.last_residual_norm,
        }
        for result in results
    ]
    loops = ", ".join(sorted({str(result.num_loops) for result in results}))
    return Table(
        title=f"Trained and run at T = {loops} loops",
        columns=columns,
        rows=tuple(rows),
        note="The unigram level is the loss of token frequencies alone: a model that sits there ignores its context.",
    )


def budget_table(results: Sequence[SystemResult]) -> Table:
    """Return one row a system: its perplexity at each number of loops."""
    budgets = sorted({budget["num_loops"] for result in results for budget in result.budgets})
    columns = (
        Column(key="system", title="system"),
        *(Column(key=str(m), title=f"M = {m}", align="right", format=".1f") for m in budgets),
    )
    rows: list[Mapping[str, Value]] = [
        {"system": result.system, **{str(b["num_loops"]): b["perplexity"] for b in result.budgets}}
        for result in results
    ]
    return Table(
        title="Validation perplexity by number of loops M",
        columns=columns,
        rows=tuple(rows),
        note="Each system is one model: nothing is trained again for another budget.",
    )


def sample_table(results: Sequence[SystemResult]) -> Table | None:
    """Return what the elastic model writes at each budget, or None where none was trained."""
    elastic = elastic_result(results)
    if elastic is None:
        return None
    return Table(
        title=f"{elastic.system} writes on, at several budgets",
        columns=(Column(key="num_loops", title="loops", align="right"), Column(key="text", title="text")),
        rows=tuple({"num_loops": s["num_loops"], "text": s["prompt"] + s["continuation"]} for s in elastic.samples),
        note="A few hundred updates make no author: compare budgets, not prose.",
    )


def elastic_result(results: Sequence[SystemResult]) -> SystemResult | None:
    """Return the first system that is trained for every budget."""
    return next((result for result in results if result.system in ("elastic-flt", "loopformer")), None)


def summarise(results: Sequence[SystemResult]) -> str:
    """Say in a few sentences what was seen."""
    if not results:
        return "No system was trained."
    sentences = []
    for verdict in dict.fromkeys(result.verdict for result in results):
        group = [result for result in results if result.verdict == verdict]
        endings = [f"{r.system} ({r.loss:.2f} nats per token, {_distance(r)})" for r in group]
        listed = " and ".join([*([", ".join(endings[:-1])] if endings[:-1] else []), endings[-1]])
        sentences.append(f"{verdict.capitalize()} at T = {group[0].num_loops}: {listed}.")
    elastic = elastic_result(results)
    if elastic is not None and elastic.budgets:
        scored = {b["num_loops"]: b["perplexity"] for b in elastic.budgets}
        shown = sorted({min(scored), max(scored), elastic.num_loops} & scored.keys())
        told = ", ".join(f"{scored[m]:.1f} with {_loops(m)}" for m in shown)
        best, worst = min(scored, key=scored.__getitem__), max(scored, key=scored.__getitem__)
        sentences.append(
            f"One {elastic.system} model answers at any budget: perplexity {told}; {scored[worst] / scored[best] - 1:.1%} "
            f"lie between its best ({_loops(best)}) and its worst ({_loops(worst)})."
        )
    return " ".join(sentences)


def _distance(result: SystemResult) -> str:
    gap = result.unigram_loss - result.loss
    return f"{abs(gap):.2f} {'below' if gap >= 0 else 'above'} the unigram level"


def _loops(number: int) -> str:
    return f"{number} loop" if number == 1 else f"{number} loops"
