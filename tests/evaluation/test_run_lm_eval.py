from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from loopformers.evaluation.run_lm_eval import main


def test_the_harnesss_own_command_line_runs_our_model(elastic, tokenizer, tmp_path: Path, monkeypatch, capsys):
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
    arguments = f"pretrained={tmp_path / 'model'},schedule=1/2+1/4+1/4"
    main(["run", "--model", "loopformers", "--model_args", arguments, "--tasks", str(tmp_path / "sums.yaml")])
    assert "|sums " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"]])
def test_help_is_the_harnesss(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert "lm-eval" in capsys.readouterr().out
