from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loopformers.cli.main import main
from loopformers.cli.train import TrainingBar
from loopformers.training.recipe_file import dump, load, shipped

RECIPE = """\
model: {preset: elastic-flt, num_loops: 3, hidden_size: 24, num_attention_heads: 2, num_hidden_layers: 2}
data: {sources: texts, seq_len: 32, split_by: tail, cache_dir: cache}
training: {steps: 6, batch_size: 4, output_dir: run, checkpoint_interval: 4, report_to: none}
evaluation: {budgets: [1, "2/3,1/3"], windows: 5}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of someone with text files and a recipe."""
    (tmp_path / "texts").mkdir()
    for name, word in (("one", "calm"), ("two", "rough")):
        text = "".join(f"On day {n} the sea was {word}, and {n * 7} gulls came.\n" for n in range(300))
        (tmp_path / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "my.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C after an update, once."""
    show = TrainingBar.on_progress

    def on_progress(self: TrainingBar, progress: Any) -> None:
        show(self, progress)
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingBar, "on_progress", on_progress)


def test_train_interrupt_resume_generate(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert main(["train", "--config", "my.yaml"]) == 130
    output = capsys.readouterr()
    assert "elastic-flt, 2 layers x 3 loops, width 24" in output.out
    assert "texts: " in output.out
    assert (
        "Interrupted: stopped after step 3; a checkpoint was saved. The same command continues the run." in output.err
    )
    assert not (place / "run" / "result.json").exists()

    assert main(["train", "--config", "my.yaml"]) == 0
    output = capsys.readouterr()
    assert "step 4/6   loss " in output.err
    assert "step 1/6" not in output.err
    assert "tokens/s" in output.err
    assert "step 6/6   validation loss" in output.err
    assert "2/3,1/3" in output.out
    assert "nats per token" in output.out

    assert main(["train", "--config", "my.yaml", "--json"]) == 0
    again = capsys.readouterr()
    result = json.loads(again.out)
    assert (result["output_dir"], result["steps"]) == ("run", 6)
    assert [score["num_loops"] for score in result["budgets"]] == [3, 1, 2]
    assert "complete" in again.err

    assert main(["generate", "run", "--prompt", "On day", "--num-loops", "1,3", "--max-new-tokens", "4"]) == 0
    assert "On day" in capsys.readouterr().out
    assert load(place / "run" / "recipe.yaml").data.sources == ("texts",)


def test_json_is_all_that_stdout_gets(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "my.yaml", "--training.steps=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_seen"] == 2 * 4 * 32


def test_print_config_shows_what_would_run_and_runs_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOPFORMERS_MODEL__NUM_LOOPS", "12")
    monkeypatch.setenv("LOOPFORMERS_CONFIG", "my.yaml")
    assert main(["train", "--training.seed", "5", "--print_config"]) == 0
    text = capsys.readouterr().out
    fields = yaml.safe_load(text)
    assert (fields["model"]["num_loops"], fields["training"]["seed"], fields["data"]["seq_len"]) == (12, 5, 32)
    (place / "printed.yaml").write_text(text)
    assert dump(load("printed.yaml")) == text
    assert main(["train", "--print_config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"]["name"] == "muon_adamw"
    assert not (place / "run").exists()


def test_recipes_and_fields_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(shipped())
    assert main(["train", "--fields", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["training.clip"]["type"] == "a number or null"
    assert fields["model.num_loops"]["help"].startswith("T, loops")
    assert main(["train", "--list"]) == main(["train", "--fields"]) == 0
    assert "quickstart-flt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config", "my.yml"], "recipe='my.yml' is no file"),
        (["--config", "quickstart-ftl"], "did you mean 'quickstart-flt'?"),
        (["--config", "my.yaml", "--model.num_loop", "3"], "did you mean 'num_loops'?"),
        (["--config", "my.yaml", "--data.sources", "nowhere.txt"], "no file or folder at 'nowhere.txt'"),
        (["--config", "my.yaml", "--data.seq_len", "99999"], "seq_len=99999 is longer than the data"),
        (
            ["--config", "my.yaml", "--training.output_dir", "texts"],
            "contains files of something other than a training run",
        ),
        ([], "no recipe is given"),
    ],
)
def test_bad_input_ends_with_code_2_and_a_reason(
    arguments: list[str], text: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert text in output.err
    assert not (place / "run").exists()


def test_other_processes_leave_the_talking_to_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--config", "my.yaml", "--data.seq_len", "1"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_train_as_one_and_the_first_alone_speaks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--config", "my.yaml", "--json", "--training.steps", "4"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "--module", "loopformers", *arguments, "--training.output_dir", "two"],
        capture_output=True,
        text=True,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    assert done.stderr.count("step 1/4") == 1
    assert main(arguments) == 0
    one = json.loads(capsys.readouterr().out)
    assert two["loss"] == pytest.approx(one["loss"], abs=2e-3)
    assert (two["tokens_seen"], two["fingerprint"]) == (one["tokens_seen"], one["fingerprint"])
    first, second = (
        json.loads((place / folder / "metrics.jsonl").read_text().splitlines()[0]) for folder in ("run", "two")
    )
    assert second["loss_parts"] == pytest.approx(first["loss_parts"], rel=1e-5)
    assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)


def test_a_second_interrupt_says_that_no_checkpoint_was_saved(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_twice(self: TrainingBar, progress: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingBar, "on_progress", interrupt_twice)
    assert main(["train", "--config", "my.yaml"]) == 130
    assert "Interrupted immediately, without a new checkpoint. The same command continues" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_with_a_note(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(5, patch)
        assert main(["train", "--config", "my.yaml"]) == 130
    (place / "run" / "checkpoint-5" / "optimizer.pt").unlink()
    capsys.readouterr()
    assert main(["train", "--config", "my.yaml"]) == 0
    error = capsys.readouterr().err
    assert (
        "warning: 'run/checkpoint-5' is damaged: optimizer.pt is missing; training continues from checkpoint-4" in error
    )
    assert "warnings.warn" not in error
