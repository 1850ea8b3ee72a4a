from __future__ import annotations

import numpy as np
import pytest

from loopformers.data.synthetic.registry import TASKS, make_task
from loopformers.data.synthetic.rows import BLOCK, GeneratedRows, held_out_rows
from loopformers.data.synthetic.tokenizer import task_tokenizer

TASK = make_task("pointer_chasing", symbols=9, hops=3, questions=4)


def test_a_row_depends_on_seed_and_index_alone_whatever_was_read_before() -> None:
    rows = GeneratedRows(TASK, seed=5, num_rows=3 * BLOCK)
    longer = GeneratedRows(TASK, seed=5, num_rows=7 * BLOCK)
    assert len(rows) == 3 * BLOCK
    for index in (2 * BLOCK + 1, 0, BLOCK, BLOCK - 1, 0):
        assert set(rows[index]) == {"input_ids", "labels"}
        for field in ("input_ids", "labels"):
            assert (rows[index][field] == longer[index][field]).all()


def test_no_row_comes_twice_under_two_seeds_or_among_the_held_out_ones() -> None:
    seen = [
        tuple(GeneratedRows(TASK, seed=seed, num_rows=2 * BLOCK)[i]["input_ids"])
        for seed in (0, 1)
        for i in range(BLOCK - 30, BLOCK + 30)
    ]
    held_out = [tuple(row) for row in held_out_rows(TASK, 60).input_ids]
    assert len({*seen, *held_out}) == 3 * 60


def test_held_out_rows_are_the_same_for_all_and_begin_alike() -> None:
    assert (held_out_rows(TASK, 31).labels == held_out_rows(TASK, 31).labels).all()


@pytest.mark.parametrize("name", list(TASKS))
def test_the_tokenizer_reads_and_writes_rows(name: str) -> None:
    task = make_task(name)
    tokenizer = task_tokenizer(task)
    row = held_out_rows(task, 1).row(0)["input_ids"]
    text = tokenizer.decode(row)
    assert text == " ".join(task.words[i] for i in row)
    assert tokenizer(text)["input_ids"] == row.tolist()
    assert len(tokenizer) == len(task.words)
    assert tokenizer.decode(row, skip_special_tokens=True) == text.removesuffix(" <end>")
    assert tokenizer("what")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0 == int(np.asarray(row)[-1])
