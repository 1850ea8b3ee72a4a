from __future__ import annotations

import dataclasses
from typing import Any

from loopformers.studies.quickstart import SystemResult
from loopformers.studies.quickstart_report import budget_table, sample_table, summarise, systems_table


def make_result(system: str, *, loss: float, verdict: str = "stable", **fields: Any) -> SystemResult:
    defaults: dict[str, Any] = {
        "num_loops": 12, "num_parameters": 1234, "tokens_seen": 100, "training_flops": 2.5e12, "unigram_loss": 6.4,
        "perplexity": 111.0, "bits_per_byte": 2.0, "reason": "because", "log_gradient_norm_std": 0.25,
        "last_residual_norm": 31.0, "samples": ({"num_loops": 1, "prompt": "It", "continuation": " was"},),
        "budgets": tuple({"num_loops": m, "perplexity": p} for m, p in ((1, 120.0), (4, 105.0), (16, 109.0))),
    }  # fmt: skip
    return SystemResult(system=system, loss=loss, verdict=verdict, **{**defaults, **fields})


def test_the_summary_groups_systems_by_what_became_of_them() -> None:
    results = [
        make_result("elastic-flt", loss=4.7),
        make_result("lt", loss=6.45, verdict="collapsed"),
        make_result("flt", loss=4.8),
    ]
    assert summarise(results) == (
        "Stable at T = 12: elastic-flt (4.70 nats per token, 1.70 below the unigram level) and flt (4.80 nats per token, "
        "1.60 below the unigram level). Collapsed at T = 12: lt (6.45 nats per token, 0.05 above the unigram level). One "
        "elastic-flt model answers at any budget: perplexity 120.0 with 1 loop, 109.0 with 16 loops; 14.3% lie between its "
        "best (4 loops) and its worst (1 loop)."
    )


def test_the_summary_says_no_more_than_the_results_do() -> None:
    assert summarise([]) == "No system was trained."
    assert "budget" not in summarise([make_result("flt", loss=4.8)])


def test_tables_show_every_system_and_budget() -> None:
    results = [make_result("lt", loss=6.45, last_residual_norm=None), make_result("elastic-flt", loss=4.7)]
    systems, budgets, samples = systems_table(results), budget_table(results), sample_table(results)
    assert systems.texts()[0][0] == "lt"
    assert "6.450" in systems.texts()[0]
    assert [column.title for column in budgets.columns] == ["system", "M = 1", "M = 4", "M = 16"]
    assert budgets.texts()[1] == ["elastic-flt", "120.0", "105.0", "109.0"]
    assert samples is not None
    assert samples.texts() == [["1", "It was"]]
    assert sample_table(results[:1]) is None


def test_systems_with_other_budgets_share_a_table() -> None:
    other = dataclasses.replace(make_result("flt", loss=4.8), budgets=({"num_loops": 2, "perplexity": 99.0},))
    table = budget_table([make_result("lt", loss=6.45), other])
    assert [column.key for column in table.columns] == ["system", "1", "2", "4", "16"]
