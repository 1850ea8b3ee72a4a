"""What the page on evaluation shows runs, on tiny checkpoints and the first questions of the real sets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from loopformers.cli.main import main
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.evaluation.harness import LoopformersLM
from loopformers.evaluation.task_data import PACKAGED
from loopformers.evaluation.task_list import groups
from loopformers.testing import tiny_model
from tests.evaluation.conftest import needs_package_data

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^loopformers (evaluate (?:tasks|table) .*)$", PAGE, flags=re.MULTILINE)


@needs_package_data
def test_every_command_on_tasks_runs(quickstart_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) >= 5
    others = COMMANDS[0].replace("elastic-flt", "flt") + " --output-dir runs/others"
    for command in (others, *COMMANDS):
        words = shlex.split(re.sub(r"--limit \d+", "--limit 2", command.split(" #")[0]))
        words = ["runs/quickstart/flt" if word.endswith(".gguf") else word for word in words]
        code = main(words)
        output = capsys.readouterr()
        if words[1] == "tasks" and "--data" not in words:  # the harness's own source, and tests are offline
            assert code == 2
            assert "this process is offline" in output.err
        else:
            assert code == 0, f"{command}\n{output.err}"
            assert "Scores" in output.out
    for name in ("results.json", "table.md", "table.tex", "table.csv", "table.json", "accuracy.svg"):
        assert f"`{name}`" in PAGE
        assert (quickstart_models / "runs" / "both" / name).exists()


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "evaluate.md", "exec"), {})
    assert capsys.readouterr().out.strip() == block.rstrip().rpartition("# ")[2]


def test_the_page_names_the_groups_with_their_metrics() -> None:
    for name, group in groups().items():
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \| 0 \|$", PAGE, flags=re.MULTILINE)
        counted = {metric: len(re.findall(rf"\b{metric}\b", row)) for metric in ("acc", "acc_norm")}
        stated = list(group["metadata"]["metrics"].values())
        assert counted == {metric: stated.count(metric) for metric in ("acc", "acc_norm")}
        assert {entry["num_fewshot"] for entry in group["task"]} == {0}


def test_the_page_names_what_the_package_has() -> None:
    (sentence,) = re.findall(r"`--data package` takes (.*?), whole", PAGE, flags=re.DOTALL)
    named = re.split(r", | and ", re.sub(r"\s+", " ", sentence).partition(": ")[2])
    assert len(named) == len(PACKAGED)  # ARC is two tasks there, and LAMBADA is none of its sets


def test_the_class_that_the_page_names_takes_those_arguments() -> None:
    tokenizer = bundled_tokenizer()
    model = tiny_model("flt", vocab_size=len(tokenizer))
    assert LoopformersLM(model, tokenizer=tokenizer, num_loops=4).run_arguments["schedule"].num_loops == 4
