from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from loopformers.errors import CheckpointError, DataError
from loopformers.records import make_record


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str
    loss: float
    steps: int = 3
    kind: Literal["good", "bad"] = "good"
    rate: float | None = None
    parts: tuple[dict[str, Any], ...] = ()
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    done: bool = False


WHOLE: dict[str, Any] = {
    "name": "a", "loss": 2, "steps": 5, "kind": "bad", "rate": 0.5, "parts": [{"x": None}], "scores": {"b": [1, 2.5]},
    "done": True,
}  # fmt: skip


def test_fields_become_a_dataclass() -> None:
    sample = make_record(Sample, WHOLE, "file.json")
    assert sample.parts == ({"x": None},)
    assert make_record(Sample, asdict(sample) | {"parts": list(sample.parts)}, "file.json") == sample
    assert make_record(Sample, {"name": "a", "loss": 1.5}, "file.json") == Sample(name="a", loss=1.5)


def test_strict_json_writes_numbers_that_are_not_finite_as_null_and_texts() -> None:
    strict = {"name": "a", "loss": None, "scores": {"b": ["inf", "-inf", 2]}, "rate": None}
    sample = make_record(Sample, strict, "file.json", null_is_nan=True)
    assert math.isnan(sample.loss)
    assert sample.scores == {"b": [math.inf, -math.inf, 2.0]}
    assert sample.rate is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"colour": 1}, "file.json has a field 'colour' that this version of loopformers does not know"),
        ({"name": 3}, "file.json: its field 'name' is 3 but must be a text"),
        ({"loss": "2"}, "its field 'loss' is '2' but must be a number"),
        ({"loss": True}, "its field 'loss' is True but must be a number"),
        ({"loss": None}, "its field 'loss' is None but must be a number"),
        ({"steps": 2.0}, "its field 'steps' is 2.0 but must be a whole number"),
        ({"rate": []}, "its field 'rate' is [] but must be a number or null"),
        ({"kind": "ugly"}, "its field 'kind' is 'ugly', which is none of 'good', 'bad'"),
        ({"kind": []}, "its field 'kind' is [], which is none of"),
        ({"parts": {"x": 1}}, "its field 'parts' is a value of type dict but must be a list"),
        ({"parts": [1]}, "its field 'parts[0]' is 1 but must be an object"),
        ({"scores": {"b": ["high"]}}, "its field 'scores.b[0]' is 'high' but must be a number"),
        ({"done": 1}, "its field 'done' is 1 but must be true or false"),
        ({"loss": 10**400}, "its field 'loss' is <whole number of about 401 digits> but must be a number"),
        ({"name": ["x" * 99]}, "is a value of type list but must be a text"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        make_record(Sample, WHOLE | change, "file.json")
    assert text in str(raised.value)


def test_a_missing_field_is_named_with_the_callers_error_and_remedy() -> None:
    with pytest.raises(DataError, match=r"file\.json lacks the field 'loss'; burn it"):
        make_record(Sample, {"name": "a"}, "file.json", error=DataError, remedy="burn it")
