"""Two processes on one stream: each reads its own part, both train the same weights, and resuming moves nothing."""

from __future__ import annotations

import os

import pytest
import torch

from loopformers.testing.distributed import run_distributed
from tests.training.test_streamed import build, weights


def train(rank, folder):
    os.environ["LOCAL_RANK"] = str(rank)

    def run(name, *, stop_at=None, resume=None):
        asked, seen = [], []
        trainer = build(
            f"{folder}/{name}",
            num_steps=4,
            save_steps=4,
            stop_requested=lambda: asked.append(1) or len(asked) == stop_at,
            use_cpu=True,
            ddp_backend="gloo",
        )
        compute_loss = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, **rest: (
            seen.extend(inputs["input_ids"].tolist()) or compute_loss(model, inputs, **rest)
        )
        try:
            trainer.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            assert stop_at == trainer.state.global_step
        return {"windows": seen, "weights": weights(trainer), "stream": trainer.train_dataset.state_dict()["stream"]}

    whole = run("whole")
    first, second = run("parts", stop_at=2), run("parts", resume=True)
    return {"whole": whole, "parts": {**second, "windows": first["windows"] + second["windows"]}}


@pytest.mark.distributed
def test_two_ranks_share_a_stream_and_resume_where_each_stood(tmp_path):
    ranks = run_distributed(train, str(tmp_path), folder=tmp_path)
    for rank, result in enumerate(ranks):
        whole, parts = result["whole"], result["parts"]
        assert (whole["stream"]["rank"], whole["stream"]["world_size"]) == (rank, 2)
        assert len(whole["windows"]) == 4 * 2
        assert parts["windows"] == whole["windows"]
        for name, weight in whole["weights"].items():
            assert torch.equal(weight, parts["weights"][name])
            assert torch.equal(weight, ranks[0]["whole"]["weights"][name])
        assert (tmp_path / f"whole/checkpoint-4/stream_{rank}.json").exists()
    assert ranks[0]["whole"]["windows"] != ranks[1]["whole"]["windows"]
