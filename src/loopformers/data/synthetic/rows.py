"""Rows of a task for training, without end and the same in every run of a seed, and rows that are held out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loopformers.data.synthetic.contract import Ids, Task, TaskRows

__all__ = ["GeneratedRows", "held_out_rows"]

TRAINING, HELD_OUT = 0, 1
"""First entries of the seeds of random generators, which keep the two kinds apart."""

BLOCK = 256
"""Rows made together."""


class GeneratedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Training rows: row i depends on the task, the seed and i alone. Read in order, no row comes twice.

    Item i is `{"input_ids", "labels"}`, int64 arrays (seq_len,).

    Args:
        task: Makes the rows.
        seed: Names one sequence of rows among many.
        num_rows: How many training will read; more rows begin with the same ones.
    """

    def __init__(self, task: Task, *, seed: int, num_rows: int) -> None:
        self.task, self.seed, self.num_rows = task, seed, num_rows
        self._block: tuple[int, TaskRows] | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Ids]:
        number, place = divmod(index, BLOCK)
        if self._block is None or self._block[0] != number:
            rng = np.random.default_rng([TRAINING, self.seed, number])
            self._block = (number, self.task.generate(rng, BLOCK))
        row = self._block[1].row(place)
        return {"input_ids": row["input_ids"], "labels": row["labels"]}


def held_out_rows(task: Task, count: int) -> TaskRows:
    """Return rows to score: the same for every run of a task, whatever its seed, from generators that no training uses."""
    return task.generate(np.random.default_rng([HELD_OUT]), count)
