"""One tiny run by each style of tokenizer, and everything that reads a trained model upon it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, pipeline

import loopformers  # noqa: F401  enters the model with transformers
from loopformers import LoopedForCausalLM
from loopformers.cli.main import main
from loopformers.data.packing import pack_documents
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.evaluation.harness import LoopformersLM
from loopformers.evaluation.text import read_documents
from loopformers.training.recipe import DataRecipe, EvaluationRecipe, ModelRecipe, Recipe, TrainingRecipe
from loopformers.training.run import prepare
from tests.tokenizer_styles import STYLES, save_style

PROMPT = "On day 7 the sea"
SEQ_LEN = 23


@dataclass
class Trained:
    style: str
    folder: str
    text: str
    root: Path

    def bare(self, text: str) -> list[int]:
        """What training text of these characters was encoded as, by the tokenizer as its user brought it."""
        ids: list[int] = STYLES[self.style]()(text, add_special_tokens=False)["input_ids"]
        return ids

    def continuation(self, prompt: str, num_tokens: int) -> list[int]:
        model = LoopedForCausalLM.from_pretrained(self.folder).eval()
        ids = torch.tensor([self.bare(prompt)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
        new: list[int] = output[0, ids.shape[1] :].tolist()
        return new


def recipe(root: Path, style: str, text: str, **data: Any) -> Recipe:
    sizes = {"num_loops": 2, "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    tokenizer = "bundled" if style == "bundled" else save_style(style, root / "tokenizer")
    fields: dict[str, Any] = {"split_by": "tail", "cache_dir": str(root / "cache"), **data}
    return Recipe(
        model=ModelRecipe(preset="lt-input", overrides=sizes),
        data=DataRecipe(sources=(text,), seq_len=SEQ_LEN, tokenizer=tokenizer, **fields),
        training=TrainingRecipe(steps=4, batch_size=4, output_dir=str(root / "run"), report_to=()),
        evaluation=EvaluationRecipe(budgets=(1, 2), windows=3),
    )


@pytest.fixture(scope="module", params=sorted(STYLES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp(request.param)
    text = root / "days.txt"
    text.write_text("".join(f"On day {n} the sea was calm, and {n * 7} gulls came.\n" for n in range(200)))
    run = prepare(recipe(root, request.param, str(text)))
    run.train()
    return Trained(request.param, run.recipe.training.output_dir, str(text), root)


def test_the_end_token_is_a_target_and_the_only_addition_to_training_text(trained: Trained) -> None:
    run = prepare(recipe(trained.root / "again", trained.style, trained.text, isolate_documents=False))
    stream = np.concatenate([run.train_windows[i]["input_ids"] for i in range(len(run.train_windows))])
    text = Path(trained.text).read_text()
    assert stream.tolist() == trained.bare(text)[: len(stream)]
    held_out = pack_documents(read_documents(trained.text, "all"), run.tokenizer, 7, cache_dir=trained.root / "cache")
    assert held_out.stream.tokens.tolist() == [*trained.bare(text), run.tokenizer.eos_token_id]
    for window in held_out:
        assert window["labels"].tolist() == window["input_ids"].tolist(), "padding by the end token hides no target"


def test_the_folder_names_the_ids_of_its_tokenizer_and_can_pad_on_the_left(trained: Trained) -> None:
    config = json.loads((Path(trained.folder) / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] == getattr(tokenizer, name)
    assert tokenizer.eos_token_id == STYLES[trained.style]().eos_token_id
    assert config["pad_token_id"] is not None
    assert config["vocab_size"] == len(tokenizer) >= tokenizer.vocab_size
    batch = tokenizer([PROMPT, "On"], padding=True, return_tensors="pt")
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert batch["input_ids"][0].tolist() == trained.bare(PROMPT)
    num_padded = len(trained.bare(PROMPT)) - len(trained.bare("On"))
    assert batch["attention_mask"][1].tolist() == [0] * num_padded + [1] * len(trained.bare("On"))
    model = LoopedForCausalLM.from_pretrained(trained.folder).eval()
    output = model.generate(**batch, max_new_tokens=5, do_sample=False)
    rows = output[:, batch["input_ids"].shape[1] :].tolist()
    assert [rows[0], rows[1]] == [trained.continuation(PROMPT, 5), trained.continuation("On", 5)]


def test_generate_continues_the_prompt_as_training_would_have_read_it(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", trained.folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_prompt_tokens"] == len(trained.bare(PROMPT))
    assert record["samples"][0]["token_ids"] == trained.continuation(PROMPT, 6)
    assert main(["generate", trained.folder, "--prompt", PROMPT, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == PROMPT + record["samples"][0]["text"] + "\n"


def test_transformers_pipeline_continues_it_likewise(trained: Trained) -> None:
    generator = pipeline("text-generation", model=trained.folder)
    (output,) = generator(PROMPT, max_new_tokens=6, max_length=None, do_sample=False, return_tensors=True)
    assert output["generated_token_ids"] == trained.bare(PROMPT) + trained.continuation(PROMPT, 6)


def test_evaluate_budget_scores_windows_of_the_same_tokens(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(trained.root / "home"))
    options = ["--data", trained.text, "--split", "all", "--windows", "3", "--no-time", "--num-loops", "1,2", "--json"]
    assert main(["evaluate", "budget", trained.folder, *options]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    packed = pack_documents(read_documents(trained.text, "all"), STYLES[trained.style](), SEQ_LEN)
    windows = [packed[row] for row in packed.spread(3)]
    expected = evaluate_budgets(LoopedForCausalLM.from_pretrained(trained.folder), windows, [1, 2])
    assert [row["loss"] for row in model["budgets"]] == [pytest.approx(score.loss, rel=1e-6) for score in expected]


def test_evaluate_perplexity_adds_nothing_to_the_text(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("On day 3 the sea was")
    assert main(["evaluate", "perplexity", trained.folder, "--data", str(tmp_path / "short.txt"), "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    ids = torch.tensor([trained.bare("On day 3 the sea was")])
    with torch.no_grad():
        logits = LoopedForCausalLM.from_pretrained(trained.folder).eval()(ids).logits[0]
    assert model["num_tokens"] == ids.shape[1]
    expected = float(F.cross_entropy(logits[:-1].double(), ids[0, 1:]))
    assert model["budgets"][0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_harness_scores_and_writes_from_the_same_tokens(trained: Trained) -> None:
    lm = LoopformersLM(trained.folder, batch_size=3)
    choices = [" was calm", " was", " gulls"]
    got = lm.loglikelihood([SimpleNamespace(args=(PROMPT, choice), task_name=None) for choice in choices])
    model = LoopedForCausalLM.from_pretrained(trained.folder).eval()
    before = trained.bare(PROMPT)
    for (score, _), choice in zip(got, choices, strict=True):
        ids = torch.tensor([trained.bare(PROMPT + choice)])
        with torch.no_grad():
            nats = model(ids).logits[0].double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        assert score == pytest.approx(float(nats[len(before) - 1 :].sum()), abs=1e-4)
    (text,) = lm.generate_until([SimpleNamespace(args=(PROMPT, {"max_gen_toks": 4, "until": []}), task_name=None)])
    assert text == lm.tokenizer.decode(trained.continuation(PROMPT, 4), skip_special_tokens=True)
    assert lm.prefix_token_id == lm.tokenizer.eos_token_id, "before a document, training saw the end of another"


def test_evaluate_tasks_runs(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"question": "What holds?", "distractor1": "soup", "distractor2": "rope", "distractor3": "glue",
           "correct_answer": "gravity", "support": ""}  # fmt: skip
    (tmp_path / "sciq").mkdir()
    (tmp_path / "sciq" / "test.jsonl").write_text(json.dumps(row))
    command = ["evaluate", "tasks", trained.folder, "--tasks", "sciq", "--data", str(tmp_path), "--json"]
    assert main([*command, "--output-dir", str(tmp_path / "out"), "--max-length", str(SEQ_LEN)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["scores"]["rows"]
    assert row["model"] == "run"


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_streamed_recipe_trains_with_the_tokenizer_too(style: str, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(2):
        rows = [{"id": f"{shard}-{n}", "text": f"On day {n} the sea was calm, {shard}."} for n in range(30)]
        (shards / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = prepare(
        recipe(
            tmp_path, style, str(shards), streaming=True, split_by="document", fractions=(0.6, 0.2, 0.2), cache_dir=None
        )
    )
    assert run.train().steps == 4
    window = next(iter(run.train_windows))
    eos = STYLES[style]().eos_token_id
    assert (window["labels"] == window["input_ids"]).all()
    assert any(eos in window["labels"] for window in run.validation_windows)
