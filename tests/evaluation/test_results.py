from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from loopformers.errors import ConfigError, DataError
from loopformers.evaluation.results import SCHEMA_VERSION, ModelInfo, Protocol, Results, Score, merge, read_results

MODEL = ModelInfo(
    hash="abc", name="flt", kind="loopformers", num_parameters=1234, dtype="float32", max_length=61, trained_loops=3
)
PROTOCOL = Protocol(
    task="piqa",
    version="1.0",
    harness="0.4.13",
    source="folder",
    split="validation",
    num_questions=3,
    limit=None,
    num_fewshot=0,
    seed=0,
    chat_template=False,
    prompts_hash="0f",
    example="Question: so? Answer: yes",
    definition={"doc_to_text": "{{goal}}"},
)


def score(**changes: object) -> Score:
    whole = Score(
        model="abc",
        num_loops=3,
        schedule="1/3,1/3,1/3",
        exit_rule=None,
        flops_per_token=7e5,
        task="piqa",
        metric="acc",
        weight=1.0,
        values={"acc": 2 / 3, "perplexity": math.inf},
        standard_errors={"acc": 1 / 3, "perplexity": None},
        questions={"acc": [1.0, 0.0, 1.0]},
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


RESULTS = Results((MODEL,), (PROTOCOL,), (score(),))


def test_a_file_reads_back_as_it_was_written(tmp_path: Path):
    RESULTS.save(tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == read_results(tmp_path)
    back = read_results(tmp_path)
    assert back.scores[0].values == RESULTS.scores[0].values
    assert back.models == RESULTS.models
    assert back.protocols == RESULTS.protocols
    stored = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert stored["schema_version"] == SCHEMA_VERSION
    assert stored["protocols"][0]["harness"] == "0.4.13"
    assert stored["protocols"][0]["seed"] == 0


def test_merging_is_a_union_in_which_the_last_score_of_a_key_counts():
    other = Results((replace(MODEL, hash="def", name="lt"),), (PROTOCOL,), (score(model="def"), score(seconds=2.0)))
    merged = merge([RESULTS, other])
    assert [m.hash for m in merged.models] == ["abc", "def"]
    assert [(s.model, s.seconds) for s in merged.scores] == [("abc", 2.0), ("def", 0.0)]
    assert merge([merged, merged]) == merged


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "2.0"), ("harness", "0.5"), ("num_fewshot", 5), ("seed", 1), ("limit", 10), ("prompts_hash", "1f"),
     ("source", "hub"), ("split", "test"), ("chat_template", True), ("num_questions", 2)],
)  # fmt: skip
def test_a_changed_protocol_refuses_to_merge_and_says_what_changed(field, value):
    changed = replace(PROTOCOL, **{field: value})
    with pytest.raises(ConfigError, match=f"two protocols of piqa differ in {field} "):
        merge([RESULTS, Results((MODEL,), (changed,), (score(),))])
    with pytest.raises(ConfigError, match=field):
        RESULTS.with_score(MODEL, changed, score(num_loops=1, schedule="1/1"))


def test_a_changed_definition_refuses_to_merge():
    changed = replace(PROTOCOL, definition={"doc_to_text": "{{question}}"})
    with pytest.raises(ConfigError, match="its definition"):
        merge([RESULTS, Results((MODEL,), (changed,), ())])


def test_a_protocol_that_was_edited_in_the_file_is_noticed(tmp_path: Path):
    path = RESULTS.save(tmp_path / "results.json")
    path.write_text(path.read_text(encoding="utf-8").replace('"num_fewshot": 0', '"num_fewshot": 5'), encoding="utf-8")
    with pytest.raises(DataError, match="protocol of piqa was changed after its scores were made"):
        read_results(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not readable JSON"),
        ("[]", "contains a value of type list but must contain an object"),
        ('{"schema_version": 99}', "schema version 99"),
        (
            f'{{"schema_version": {SCHEMA_VERSION}, "models": [{{}}], "protocols": [], "scores": []}}',
            r"models\[0\] lacks the field 'hash'",
        ),
    ],
)
def test_files_of_another_kind_are_refused(content, text, tmp_path):
    (tmp_path / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=text):
        read_results(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"results\.json does not exist"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("scores", 0, "values"), None, "its field 'values' is None but must be an object"),
        (("scores", 0, "values"), {"acc": "high"}, "its field 'values.acc' is 'high' but must be a number"),
        (("scores", 0, "values"), {"acc_norm": 1.0}, "has no value of its metric 'acc'"),
        (("scores", 0, "model"), "def", "names a model 'def' that the file does not list"),
        (("scores", 0, "model"), ["abc"], "its field 'model' is ['abc'] but must be a text"),
        (("scores", 0, "task"), "sciq", "names a task 'sciq' without a protocol"),
        (("scores", 0, "weight"), -1, "has the weight -1.0"),
        (("scores", 0, "weight"), None, "has the weight nan"),
        (("scores", 0, "num_loops"), None, "only one of num_loops and schedule"),
        (("scores", 0, "num_loops"), True, "its field 'num_loops' is True but must be a whole number or null"),
        (
            ("scores", 0, "questions"),
            {"acc": [1, "x"]},
            r"its field 'questions.acc[1]' is 'x' but must be a number",
        ),
        (
            ("scores", 0, "seconds"),
            10**400,
            "its field 'seconds' is <whole number of about 401 digits> but must be a number",
        ),
        (("scores", 0, "new"), 1, "a field 'new' that this version of loopformers does not know"),
        (("scores", 0), 7, "scores[0] is 7 but must be an object"),
        (("scores",), {}, "without a list of scores"),
        (("models", 0, "hash"), ["a"], "its field 'hash' is ['a'] but must be a text"),
        (("models", 0, "num_parameters"), 2.5, "its field 'num_parameters' is 2.5 but must be a whole number"),
        (("protocols", 0), 3, "protocols[0] has no fingerprint"),
        (("protocols", 0, "fingerprint"), "0", "was changed after its scores were made"),
        (("protocols", 0, "limit"), "all", "its field 'limit' is 'all' but must be a whole number or null"),
    ],
)
def test_a_part_of_another_type_is_named(path, value, text, tmp_path):
    content = json.loads(RESULTS.save(tmp_path / "results.json").read_text(encoding="utf-8"))
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        read_results(tmp_path)
    assert "results.json" in str(caught.value)


def test_a_value_that_is_not_a_number_reads_back(tmp_path: Path):
    replaced = score(values={"acc": math.nan, "perplexity": -math.inf}, questions={"acc": [math.nan, 1.0]})
    Results((MODEL,), (PROTOCOL,), (replaced,)).save(tmp_path / "results.json")
    (back,) = read_results(tmp_path).scores
    assert math.isnan(back.values["acc"])
    assert back.values["perplexity"] == -math.inf
    assert math.isnan(back.questions["acc"][0])
