from __future__ import annotations

import re

import pytest
import torch

from loopformers.analysis.profile import profile_model
from loopformers.studies.analysis_report import (
    MEASURES,
    analysis_files,
    loops_table,
    picture_names,
    runs_table,
    summarise,
)
from loopformers.testing import tiny_model

IDS = torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(2))


def profiles(**models):
    return {
        label.replace("_", "-"): profile_model(
            model, [{"input_ids": row} for row in IDS], [model.config.resolve_schedule(schedule=s) for s in schedules]
        )
        for label, (model, schedules) in models.items()
    }


@pytest.fixture(scope="module")
def two():
    return profiles(
        loopformer=(tiny_model("loopformer"), ["uniform:3", "2/3,1/3"]),
        base_loop=(tiny_model("base-loop"), ["uniform:3", "uniform:2"]),
    )


def test_the_page_has_every_figure_with_its_formula_and_a_png_of_each(two):
    files = analysis_files("report.html", two, decode=lambda i: f"<{i}>", source="Three windows.")
    text = files.pop("report.html")
    assert sorted(files) == sorted(picture_names(two))
    assert all(content.startswith(b"\x89PNG") for content in files.values())
    pictures = sorted(name.removesuffix(".png") for name in files)
    named = [measure.key.replace("_", "-") for measure in MEASURES]
    assert pictures == sorted([*named, "cka", "trajectories", "lens-loopformer", "lens-base-loop"])
    assert len(re.findall("<img ", text)) == len(pictures) == len(re.findall('class="formula"', text))
    assert all(alt.strip() for alt in re.findall(r'alt="([^"]*)"', text))
    assert "loopformer, 2/3,1/3" in text
    assert "base-loop, 2 loops" in text


def test_tables_have_a_row_a_run_and_a_row_a_loop(two):
    assert [row["run"] for row in runs_table(two).rows] == [
        "loopformer, 3 loops", "loopformer, 2/3,1/3", "base-loop, 3 loops", "base-loop, 2 loops",
    ]  # fmt: skip
    run = two["loopformer"].runs[0]
    row = runs_table(two).rows[0]
    assert (row["first"], row["last"]) == (run.loops[0].loss, run.loops[2].loss)
    assert (row["ends"], row["depth"]) == (run.cka[0][2], run.mean_depth_needed)
    loops = loops_table(two).rows
    assert len(loops) == 3 + 2 + 3 + 2
    assert loops[0]["settled"] == pytest.approx(100 * run.loops[0].settled)
    assert loops[2]["settled"] == pytest.approx(100)


def test_the_summary_says_what_each_model_does(two):
    said = summarise(two)
    run = two["loopformer"].runs[0]
    assert f"loopformer: the states of loop 1 and loop 3 have a CKA of {run.cka[0][2]:.2f}" in said
    assert "base-loop: " in said


def test_one_loop_and_loops_that_do_nothing_are_reported_too():
    one = profiles(flt=(tiny_model("flt"), ["uniform:1"]))
    assert summarise(one) == "flt runs one loop, so nothing moves."
    files = analysis_files("one.html", one, decode=str, source="Three windows.")
    assert "Do loops say the same?" not in files["one.html"]
    inert = profiles(flt=(tiny_model("flt", randomize=False), ["uniform:3"]))
    assert "CKA of 1.00" in summarise(inert)
    assert "trajectories.png" in analysis_files("page.html", inert, decode=str, source="Three windows.")
