"""A stop that one rank asks for ends all ranks after the same update, and the run goes on from there."""

from __future__ import annotations

import os

import pytest
import torch

from loopformers.laws import UniformRange
from loopformers.testing import tiny_model
from loopformers.testing.distributed import run_distributed
from loopformers.training.step_log import StepLog
from loopformers.training.trainer import LoopTrainer, training_arguments


def train(rank, folder, stop_at):
    os.environ["LOCAL_RANK"] = str(rank)
    ids = torch.randint(61, (12, 7), generator=torch.Generator().manual_seed(3))
    model = tiny_model("flt")
    arguments = training_arguments(folder, num_steps=4, batch_size=2, use_cpu=True, ddp_backend="gloo", report_to=[])

    def make(stop_requested=None):
        data = [{"input_ids": row, "labels": row} for row in ids]
        return LoopTrainer(model, arguments, data, law=UniformRange(1, 4), stop_requested=stop_requested)

    asked = []
    first = make(lambda: asked.append(1) or (rank == 1 and len(asked) == stop_at))
    stopped_after = -1
    try:
        first.train()
    except KeyboardInterrupt:
        stopped_after = first.state.global_step
        make().train(resume_from_checkpoint=True)
    return {"stopped_after": stopped_after, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def train_both(rank, folder):
    return {"cut": train(rank, f"{folder}/cut", 2), "whole": train(rank, f"{folder}/whole", 0)}


@pytest.mark.distributed
def test_all_ranks_stop_after_the_update_in_which_one_was_asked_and_resume_alike(tmp_path):
    ranks = run_distributed(train_both, str(tmp_path), folder=tmp_path)
    for rank in ranks:
        assert (rank["cut"]["stopped_after"], rank["whole"]["stopped_after"]) == (2, -1)
        for name, weight in rank["cut"]["weights"].items():
            assert torch.equal(weight, ranks[0]["whole"]["weights"][name])
    assert StepLog(tmp_path / "cut" / "metrics.jsonl").read() == StepLog(tmp_path / "whole" / "metrics.jsonl").read()
