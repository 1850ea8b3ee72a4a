from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopformers.data.synthetic.addition import Addition, add
from loopformers.data.synthetic.contract import SPECIAL_WORDS, Task, TaskRows
from loopformers.data.synthetic.modular_arithmetic import ModularArithmetic
from loopformers.data.synthetic.pointer_chasing import PointerChasing
from loopformers.data.synthetic.registry import TASKS, make_task
from loopformers.errors import ConfigError

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("pointer_chasing", {"symbols": 7, "hops": 3, "questions": 5}),
    ("pointer_chasing", {"symbols": 5, "hops": 4, "questions": 3, "answers": "last"}),
    ("pointer_chasing", {"symbols": 5, "hops": 4, "questions": 2, "single_cycle": True}),
    ("pointer_chasing", {"symbols": 6, "hops": 3, "questions": 3, "pairs": "one_token"}),
    ("pointer_chasing", {"symbols": 4, "hops": 2, "questions": 5, "pairs": "one_token", "answers": "last"}),
    ("modular_arithmetic", {"modulus": 5, "operations": 3, "questions": 4}),
    ("modular_arithmetic", {"modulus": 11, "operations": 4, "questions": 3, "answers": "last", "operators": "-*"}),
    ("addition", {"digits": 5, "questions": 3}),
    ("addition", {"digits": 4, "questions": 2, "order": "least_significant_first"}),
]


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}-{'-'.join(map(str, variant[1].values()))}")
def variant(request: pytest.FixtureRequest) -> tuple[str, Task]:
    name, fields = request.param
    return name, make_task(name, **fields)


def words_of(task: Task, ids: np.ndarray) -> list[str]:
    return [task.words[i] if i >= 0 else "" for i in ids]


def answers_by_hand(task: Any, words: list[str]) -> list[tuple[int, str, int]]:
    """(position, answer, difficulty) of a row, read from its words as a person would."""
    match task:
        case PointerChasing():
            listed = [pair.split(":") for pair in words[: task.symbols]]
            if task.pairs == "two_tokens":
                listed = [words[2 * i : 2 * i + 2] for i in range(task.symbols)]
            f = dict(listed)
            assert len(f) == len(set(f.values())) == task.symbols
            found, rest = [], list(enumerate(words))[sum(":" in word for word in words) or 2 * task.symbols : -1]
            while rest:
                if task.answers == "last":
                    (_, hops), (place, at), rest = rest[0], rest[1], rest[2:]
                    for _ in range(int(hops)):
                        at = f[at]
                    found.append((place + 1, at, int(hops)))
                    continue
                (_, at), rest = rest[0], rest[1:]
                hop = 0
                while rest and rest[0][1] == ">":
                    (place, _), rest = rest[0], rest[1:]
                    at, hop = f[at], hop + 1
                    found.append((place + 1, at, hop))
            return found
        case ModularArithmetic():
            found, value, operator, done = [], 0, "", 0
            for place, word in enumerate(words[:-1]):
                if word == "." or (word == "=" and task.answers == "every"):
                    operator = ""
                elif word == "=":
                    found.append((place + 1, str(value), done))
                    operator = ""
                elif word in "+-*":
                    operator = word
                elif operator:
                    value, done, operator = eval(f"({value} {operator} {word}) % {task.modulus}"), done + 1, ""
                    if task.answers == "every":
                        found.append((place + 1, str(value), done))
                else:
                    value, done = int(word), 0
            return found
        case Addition():
            found, width = [], 3 * task.digits + 3
            step = -1 if task.order == "least_significant_first" else 1
            for start in range(0, len(words) - 1, width):
                sum_ = words[start : start + width]
                a = int("".join(sum_[: task.digits][::step]))
                b = int("".join(sum_[task.digits + 1 : 2 * task.digits + 1][::step]))
                total = str(a + b).zfill(task.digits + 1)[::step]
                chain = longest_chain(a, b)
                found += [(start + 2 * task.digits + 2 + i, digit, chain) for i, digit in enumerate(total)]
            return found
        case _:
            raise AssertionError(task)


def longest_chain(a: int, b: int) -> int:
    longest = length = carry = 0
    while a or b:
        pair = a % 10 + b % 10
        length = 1 if pair >= 10 else length + 1 if pair == 9 and carry else 0
        carry = int(pair + carry >= 10)
        longest = max(longest, length)
        a, b = a // 10, b // 10
    return longest


def test_answers_are_those_that_a_person_reads_from_the_words(variant: tuple[str, Task]) -> None:
    task = variant[1]
    rows = task.generate(np.random.default_rng(7), 23)
    for index in range(len(rows)):
        row = rows.row(index)
        labels = words_of(task, row["labels"])
        found = [(p, labels[p], int(row["difficulties"][p])) for p in np.flatnonzero(row["labels"] >= 0)]
        assert found == answers_by_hand(task, words_of(task, row["input_ids"]))


def test_rows_have_their_shape_and_mark_what_is_asked_alike_in_every_field(variant: tuple[str, Task]) -> None:
    task = variant[1]
    rows = task.generate(np.random.default_rng(1), 11)
    asked = rows.labels != -100
    for field in (rows.input_ids, rows.labels, rows.questions, rows.difficulties):
        assert field.shape == (11, task.seq_len)
        assert field.dtype == np.int64
    assert (rows.input_ids >= 0).all()
    assert rows.input_ids.max() < len(task.words)
    assert not asked[:, 0].any(), "nothing stands before the first token that could say it"
    assert ((rows.questions >= 0) == asked).all()
    assert ((rows.difficulties >= 0) == asked).all()
    assert (rows.labels[~asked] == -100).all()
    assert (rows.labels[asked] >= len(SPECIAL_WORDS)).all()
    assert (rows.input_ids[:, -1] == 0).all(), "a row ends with the end token"
    assert len(set(task.words)) == len(task.words)
    assert not any(" " in word for word in task.words)


def test_questions_are_numbered_from_0_and_have_one_difficulty_each(variant: tuple[str, Task]) -> None:
    rows = variant[1].generate(np.random.default_rng(2), 5)
    for index in range(len(rows)):
        row = rows.row(index)
        asked = row["questions"][row["questions"] >= 0]
        assert sorted(set(asked.tolist())) == list(range(asked.max() + 1))
        for question in set(asked.tolist()):
            assert len(set(row["difficulties"][row["questions"] == question].tolist())) == 1


def test_equal_generators_give_equal_rows_and_others_do_not(variant: tuple[str, Task]) -> None:
    def rows(seed: int) -> TaskRows:
        return variant[1].generate(np.random.default_rng(seed), 9)

    assert (rows(3).input_ids == rows(3).input_ids).all()
    assert (rows(3).labels == rows(3).labels).all()
    assert (rows(3).input_ids != rows(4).input_ids).any()


def test_a_single_cycle_never_comes_back_before_its_end() -> None:
    task = PointerChasing(symbols=5, hops=5, questions=4, single_cycle=True)
    rows = task.generate(np.random.default_rng(0), 31)
    starts = rows.input_ids[:, 10 : 10 + 4 * 6 : 6]
    answers = rows.labels[:, :-1][rows.labels[:, :-1] >= 0]
    assert answers.size
    for question in range(4):
        for hop in range(1, 6):
            at = rows.labels[:, 10 + 6 * question + hop + 1]
            assert ((at == starts[:, question]) == (hop == 5)).all()


def test_carry_chains_are_counted_as_the_places_that_one_carry_runs_through() -> None:
    for a, b, chain in ((199, 1, 2), (999, 1, 3), (555, 555, 1), (123, 456, 0), (95, 5, 2), (0, 0, 0)):
        digits = np.array([[int(d) for d in reversed(f"{n:05d}")] for n in (a, b)])
        total, longest = add(digits[:1], digits[1:])
        assert int("".join(map(str, total[0][::-1]))) == a + b
        assert longest.tolist() == [chain]


def test_sums_have_carry_chains_of_every_length() -> None:
    rows = Addition(digits=5, questions=3).generate(np.random.default_rng(0), 400)
    share = np.bincount(rows.difficulties[rows.difficulties >= 0], minlength=6) / (rows.difficulties >= 0).sum()
    assert (share > 0.01).all(), share


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("pointer_chasing", {"symbols": 1}, "task.symbols=1 must be a whole number of at least 2"),
        ("pointer_chasing", {"hops": 0}, "task.hops=0 must be a whole number of at least 1"),
        ("pointer_chasing", {"answers": "lsat"}, "task.answers='lsat' is not known; did you mean 'last'"),
        ("modular_arithmetic", {"operators": "+/"}, "must be some of"),
        ("modular_arithmetic", {"operators": "++"}, "each once"),
        ("modular_arithmetic", {"modulus": 1}, "task.modulus=1"),
        ("addition", {"digits": 0}, "task.digits=0"),
        ("addition", {"order": "big"}, "task.order='big'"),
        ("adition", {}, "did you mean 'addition'"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused_with_the_rule(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(name, **fields)


def test_every_task_of_the_registry_has_a_variant_here() -> None:
    assert {name for name, _ in VARIANTS} == set(TASKS)
