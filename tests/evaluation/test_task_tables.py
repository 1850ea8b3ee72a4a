from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest

from loopformers.errors import ConfigError
from loopformers.evaluation.results import Results
from loopformers.evaluation.task_tables import difference_table, differences, plot_accuracy, rows, score_table
from tests.evaluation.test_results import MODEL, PROTOCOL, score

ANSWERS = [1.0, 0.0, 1.0, 1.0]
OTHERS = [0.0, 0.0, 1.0, 1.0]


def answered(task: str, answers: list[float], **changes: object) -> object:
    share = sum(answers) / len(answers)
    return score(task=task, values={"acc": share}, standard_errors={"acc": 0.1}, questions={"acc": answers}, **changes)


OUTSIDE = replace(MODEL, hash="def", name="gpt2", kind="gpt2", trained_loops=None, training_flops=1e15)
NO_LOOPS = {"model": "def", "num_loops": None, "schedule": None, "flops_per_token": 9e5}
RESULTS = Results(
    (MODEL, OUTSIDE),
    tuple(replace(PROTOCOL, task=task) for task in ("piqa", "sciq", "wikitext")),
    (
        answered("piqa", ANSWERS),
        answered("sciq", ANSWERS, weight=0.5),
        score(task="wikitext", metric="word_perplexity", weight=0.0, values={"word_perplexity": 38.44},
              standard_errors={"word_perplexity": None}, questions={}),
        answered("piqa", OTHERS, num_loops=1, schedule="1/1", flops_per_token=3e5),
        answered("sciq", [0.0] * 4, num_loops=1, schedule="1/1", flops_per_token=3e5, weight=0.5),
        answered("piqa", ANSWERS, **NO_LOOPS),
    ),
)  # type: ignore[arg-type]  # fmt: skip


def test_a_row_is_a_model_at_a_budget_and_other_models_have_an_empty_budget():
    assert [(row.model.name, row.budget) for row in rows(RESULTS)] == [("flt", "3"), ("flt", "1"), ("gpt2", "\u2013")]


def test_unequal_steps_and_exit_rules_stand_beside_the_number_of_loops():
    only = score(num_loops=2, schedule="2/3,1/3", exit_rule="kl:0.01")
    (row,) = rows(Results((MODEL,), (PROTOCOL,), (only,)))
    assert row.budget == "2 (2/3,1/3) kl:0.01"


def test_the_mean_weighs_tasks_leaves_perplexity_out_and_is_missing_where_a_task_is():
    table = score_table(RESULTS, as_text=False).to_dict()["rows"]
    assert table[0]["mean"] == pytest.approx(0.75)
    assert table[0]["mean_stderr"] == pytest.approx(math.sqrt(0.1**2 + 0.05**2) / 1.5)
    assert table[1]["mean"] == pytest.approx((0.5 + 0.5 * 0) / 1.5)
    assert table[2]["mean"] is None


def test_readers_see_percent_with_errors_and_programs_see_numbers():
    text = score_table(RESULTS).to_markdown()
    assert "75.0 \u00b110.0" in text
    assert "38.44" in text
    assert "1e+15" in text
    (first, *_) = list(csv.DictReader(io.StringIO(score_table(RESULTS, as_text=False).to_csv())))
    assert float(first["piqa/acc"]) == 0.75
    assert float(first["piqa/acc_stderr"]) == 0.1
    assert float(first["wikitext/word_perplexity"]) == 38.44
    assert first["schedule"] == "1/3,1/3,1/3"
    json.dumps(score_table(RESULTS, as_text=False).to_dict(), allow_nan=False)


def test_the_note_says_how_tasks_were_asked_and_what_was_cut():
    note = score_table(Results((MODEL,), (replace(PROTOCOL, limit=3),), (score(num_cut=2),))).note
    assert "lm-eval 0.4.13, folder, validation split, the first 3 questions alone, 0 shots: piqa" in note
    assert "2 requests were cut" in note


def test_differences_are_paired_by_question():
    found = {(d.other, d.task): d for d in differences(RESULTS)}
    piqa = found["flt, 1 loop", "piqa"]
    single = [b - a for a, b in zip(ANSWERS, OTHERS, strict=True)]
    mean = sum(single) / 4
    assert piqa.difference == pytest.approx(mean)
    assert piqa.standard_error == pytest.approx(math.sqrt(sum((d - mean) ** 2 for d in single) / 3 / 4))
    assert piqa.is_noise
    unpaired = math.sqrt(2 * 0.25)
    assert piqa.standard_error < unpaired
    assert found["flt, 1 loop", "mean"].difference == pytest.approx((mean - 0.5 * 0.75) / 1.5)
    assert ("gpt2", "mean") not in found  # one task is no mean
    assert ("flt, 1 loop", "wikitext") not in found


def test_a_difference_beyond_chance_is_called_better_or_worse():
    many = [1.0] * 60 + [0.0] * 40
    fewer = [1.0] * 30 + [0.0] * 70
    pair = Results(
        (MODEL,), (PROTOCOL,), (answered("piqa", many), answered("piqa", fewer, num_loops=1, schedule="1/1"))
    )  # type: ignore[arg-type]
    (worse,) = difference_table(differences(pair)).to_dict()["rows"]
    (better,) = difference_table(differences(pair, baseline=1)).to_dict()["rows"]
    assert (worse["verdict"], better["verdict"]) == ("worse", "better")
    assert worse["difference"] == -better["difference"] == pytest.approx(-30)


@pytest.mark.parametrize(("num_different", "p_value"), [(0, 1), (1, 1), (4, 2 / 2**4), (6, 2 / 2**6), (11, 2 / 2**11)])
def test_few_different_answers_are_judged_by_coins_and_not_by_a_normal_law(num_different, p_value):
    mine, theirs = [1.0] * 40, [0.0] * num_different + [1.0] * (40 - num_different)
    pair = (answered("piqa", theirs), answered("piqa", mine, num_loops=1, schedule="1/1"))
    (found,) = differences(Results((MODEL,), (PROTOCOL,), pair))  # type: ignore[arg-type]
    assert found.p_value == pytest.approx(p_value)
    assert found.is_noise is (num_different < 6)


def test_the_test_of_many_answers_meets_that_of_some():
    p_values = []
    for num_better, num_worse in ((32, 18), (33, 18)):  # 50 different answers are flipped, 51 are taken as normal
        same = [1.0] * 20
        mine = [1.0] * num_better + [0.0] * num_worse + same
        theirs = [0.0] * num_better + [1.0] * num_worse + same
        pair = (answered("piqa", theirs), answered("piqa", mine, num_loops=1, schedule="1/1"))
        p_values.append(differences(Results((MODEL,), (PROTOCOL,), pair))[0].p_value)  # type: ignore[arg-type]
    assert p_values[0] == pytest.approx(0.065, abs=0.01)  # exact: 0.0649
    assert p_values[1] == pytest.approx(0.036, abs=0.01)


def test_a_row_differs_from_itself_by_noise():
    again = Results((MODEL,), (PROTOCOL,), (score(), score(num_loops=1, schedule="1/1")))
    assert [d.is_noise for d in differences(again)] == [True]


def test_a_baseline_that_is_no_row_is_refused():
    with pytest.raises(ConfigError, match="baseline=3 and there are 3 rows"):
        differences(RESULTS, baseline=3)


def test_the_figure_has_a_line_a_model_over_operations():
    axes = plot_accuracy(RESULTS).axes[0]
    (line, *_) = axes.get_lines()
    assert list(line.get_xdata()) == [3e5, 7e5]
    assert list(line.get_ydata()) == pytest.approx([100 / 3, 75])
    assert axes.get_xlabel() == "operations per token (FLOPs)"


def test_a_figure_without_a_complete_row_is_refused():
    partial = Results((MODEL,), (PROTOCOL,), (score(weight=0.0),))
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_accuracy(partial)
