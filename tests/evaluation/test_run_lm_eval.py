from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from loopformers.evaluation.run_lm_eval import main


@pytest.fixture
def arguments(elastic, tokenizer, tmp_path: Path, monkeypatch) -> list[str]:
    """A model, a task of two questions, and the command that runs them."""
    elastic.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "sums.jsonl").write_text('{"q": "the sea", "a": " was"}\n{"q": "no", "a": " sea"}', encoding="utf-8")
    (tmp_path / "sums.yaml").write_text(
        json.dumps(
            {
                "task": "sums",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}, "cache_dir": str(tmp_path)},
                "test_split": "test",
                "output_type": "loglikelihood",
                "doc_to_text": "{{q}}",
                "doc_to_target": "{{a}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1},
            }
        ),
        encoding="utf-8",
    )
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)  # it asks pip and git
    monkeypatch.setattr("lm_eval.utils.setup_logging", lambda *_: None)
    monkeypatch.setattr("lm_eval._cli.run.setup_logging", lambda *_: None, raising=False)
    few = functools.partial(TaskManager, include_defaults=False)  # reading all of the harness's tasks takes a while
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    model = ["--model", "loopformers", "--model_args", f"pretrained={tmp_path / 'model'},schedule=1/2+1/4+1/4"]
    return ["run", *model, "--tasks", str(tmp_path / "sums.yaml")]


def test_the_harnesss_own_command_line_runs_our_model(arguments, capsys):
    assert main(arguments) == 0
    assert "|sums " in capsys.readouterr().out


def test_the_harnesss_usual_options_act(arguments, tmp_path: Path, capsys):
    options = [
        "--batch_size",
        "auto",
        "--max_batch_size",
        "3",
        "--device",
        "cpu",
        "--limit",
        "0.5",
        "--num_fewshot",
        "0",
    ]
    places = ["--output_path", str(tmp_path / "out"), "--use_cache", str(tmp_path / "cache"), "--log_samples"]
    assert main([*arguments, *options, *places]) == 0
    assert "|sums " in capsys.readouterr().out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(file.read_text(encoding="utf-8"))["n-samples"]["sums"] == {"original": 2, "effective": 1}


def test_answers_are_cached_by_model_and_run(arguments, tmp_path: Path, capsys):
    """The harness keys answers by question alone: another number of loops would read this one's."""
    cache = ["--use_cache", str(tmp_path / "cache")]
    assert main([*arguments, *cache]) == 0
    assert main([*arguments, f"--use_cache={tmp_path / 'cache'}"]) == 0
    assert len(list(tmp_path.glob("cache-*_rank0.db"))) == 1
    arguments[4] = arguments[4].replace("1/2+1/4+1/4", "1/2+1/2")
    assert main([*arguments, *cache]) == 0
    assert len(list(tmp_path.glob("cache-*_rank0.db"))) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--trust_remote_code"], "--trust_remote_code: code in a checkpoint or a dataset never runs"),
        (["--device", "banana"], "device='banana' is not a torch device"),
        (["--device", "meta"], "device='meta' cannot run a model here"),
        (["--batch_size", "many"], "batch_size='many' must be a whole number, auto, or auto:N"),
        (["--apply_chat_template"], "the model's tokenizer has no chat template"),
        (["--tasks", "no-such-task"], "lm-eval refuses the arguments"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(options, text, arguments, capsys):
    assert main([*arguments, *options]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert text in error[0]


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"]])
def test_help_is_the_harnesss(argv, capsys):
    assert main(argv) == 0
    assert "lm-eval" in capsys.readouterr().out
