from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopformers.cli.main import main
from loopformers.evaluation.results import read_results

FILES = ("results.json", "table.md", "table.tex", "table.csv", "table.json", "accuracy.svg")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Four questions of sciq, of which a fixture of a folder makes no more than it needs."""
    rows = [
        {"question": f"What holds {n} planets?", "distractor1": "soup", "distractor2": "rope", "distractor3": "glue",
         "correct_answer": "gravity", "support": ""}
        for n in range(4)
    ]  # fmt: skip
    (tmp_path / "data" / "sciq").mkdir(parents=True)
    (tmp_path / "data" / "sciq" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path / "data"


def test_a_table_and_a_figure_of_two_models_at_two_budgets(checkpoints, questions, tmp_path, capsys):
    models = [str(checkpoints / name) for name in ("elastic-flt", "lt")]
    command = ["evaluate", "tasks", *models, "--tasks", "sciq", "--data", str(questions), "--num-loops", "1,3"]
    assert main([*command, "--output-dir", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "elastic-flt" in shown
    assert "Differences" in shown
    for name in FILES:
        assert (tmp_path / "out" / name).stat().st_size > 0
    assert len(read_results(tmp_path / "out").scores) == 4


def test_the_same_command_goes_on_where_it_was_stopped(checkpoints, questions, tmp_path, capsys, monkeypatch):
    command = ["evaluate", "tasks", str(checkpoints / "lt"), "--tasks", "sciq", "--data", str(questions), "--json"]
    command += ["--output-dir", str(tmp_path / "out")]
    assert main([*command, "--num-loops", "1"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*command, "--num-loops", "1,2"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["scores"]["rows"][0] == first["scores"]["rows"][0]
    assert [row["num_loops"] for row in second["scores"]["rows"]] == [1, 2]
    monkeypatch.setattr("loopformers.evaluation.run_tasks.PreparedTask.score", None)  # would fail if it were called
    assert main([*command, "--num-loops", "1,2"]) == 0
    assert json.loads(capsys.readouterr().out) == second


def test_results_merge_and_render_again(checkpoints, questions, tmp_path, capsys):
    for name in ("lt", "elastic-flt"):
        command = ["evaluate", "tasks", str(checkpoints / name), "--tasks", "sciq", "--data", str(questions)]
        assert main([*command, "--output-dir", str(tmp_path / name)]) == 0
    capsys.readouterr()
    merge = ["evaluate", "table", str(tmp_path / "lt"), str(tmp_path / "elastic-flt" / "results.json")]
    assert main([*merge, "--output-dir", str(tmp_path / "both"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in table["scores"]["rows"]] == ["lt", "elastic-flt"]
    assert table["differences"]["rows"][0]["baseline"] == "lt, 3 loops"
    assert all((tmp_path / "both" / name).exists() for name in FILES)
    assert main([*merge, "--output-dir", str(tmp_path / "both")]) == 2
    assert "already contains results.json" in capsys.readouterr().err


def test_results_of_other_protocols_neither_merge_nor_mix(checkpoints, questions, tmp_path, capsys):
    command = ["evaluate", "tasks", str(checkpoints / "lt"), "--tasks", "sciq", "--data", str(questions)]
    assert main([*command, "--output-dir", str(tmp_path / "all")]) == 0
    assert main([*command, "--output-dir", str(tmp_path / "two"), "--limit", "2"]) == 0
    assert main(["evaluate", "table", str(tmp_path / "all"), str(tmp_path / "two")]) == 2
    assert "two protocols of sciq differ in num_questions 4 and 2, limit None and 2" in capsys.readouterr().err
    assert main([*command, "--output-dir", str(tmp_path / "all"), "--limit", "2"]) == 2
    assert "another --output-dir" in capsys.readouterr().err


def test_a_text_is_one_more_column(checkpoints, questions, tmp_path, capsys):
    (tmp_path / "story.txt").write_text("The sea was grey and nobody came. " * 20, encoding="utf-8")
    command = ["evaluate", "tasks", str(checkpoints / "lt"), "--tasks", "sciq", "--data", str(questions), "--json"]
    command += ["--perplexity", str(tmp_path / "story.txt"), "--output-dir", str(tmp_path / "out")]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["scores"]["rows"]
    assert row["perplexity of story.txt/token_perplexity"] > 1
    assert row["mean"] == row["sciq/acc"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tasks", "sciqq"], "did you mean 'sciq'"),
        (["--tasks", ","], "no tasks to evaluate"),
        (["--tasks", "sciq", "--num-loops", "two"], "is not a number of loops"),
        (["--tasks", "sciq", "--num-loops", "0"], "num_loops=0"),
        (["--tasks", "sciq", "--schedule", "1/2,1/3"], "must sum to 1"),
        (["--tasks", "sciq", "--limit", "0"], "--limit: 0 must be"),
        (["--tasks", "sciq", "--num-fewshot", "-1"], "--num-fewshot: -1 must be"),
        (["--tasks", "sciq", "--batch-size", "0"], "--batch-size: 0 must be"),
        (["--tasks", "sciq", "--chat-template"], "has no chat template"),
        (["--tasks", "sciq", "--tokenizer", "nowhere"], "holds no tokenizer"),
        (["--tasks", "sciq", "--max-length", "99"], "99 is more than the 40 positions"),
        (["--tasks", "race"], "no questions of race"),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(
    arguments, text, checkpoints, questions, tmp_path, capsys, monkeypatch
):
    from loopformers.evaluation import task_list

    monkeypatch.setattr(task_list, "_all", task_list._usual)  # all of the harness's tasks take a while to read
    command = ["evaluate", "tasks", str(checkpoints / "loopformer"), "--data", str(questions), *arguments]
    assert main([*command, "--output-dir", str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_is_refused(questions, tmp_path, capsys):
    for name, text in (("no/where", "neither a folder here"), (str(tmp_path), "holds no config.json")):
        command = ["evaluate", "tasks", name, "--tasks", "sciq", "--data", str(questions)]
        assert main([*command, "--output-dir", str(tmp_path / "out")]) == 2
        assert text in capsys.readouterr().err


def test_without_lm_eval_its_extra_is_named(checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", "tasks", str(checkpoints / "lt"), "--tasks", "sciq"]) == 2
    assert "pip install 'loopformers[eval]'" in capsys.readouterr().err
