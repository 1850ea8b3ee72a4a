from __future__ import annotations

import pytest
import torch

from loopformers.analysis.lens import depth_needed, read_tokens


@pytest.mark.parametrize(
    ("answers", "depth"),
    [([5, 5, 5, 5], 1), ([1, 5, 5, 5], 2), ([5, 1, 5, 5], 3), ([5, 5, 5, 1], 4), ([1, 2, 3, 4], 4), ([9], 1)],
)
def test_the_depth_needed_is_the_loop_from_which_the_answer_stays(answers, depth):
    assert depth_needed(torch.tensor(answers)).item() == depth


def test_depths_are_those_of_each_token():
    answers = torch.tensor([[[5, 1], [2, 2]], [[5, 2], [3, 2]], [[5, 2], [4, 2]]])
    assert depth_needed(answers).tolist() == [[1, 2], [3, 1]]


def test_a_lens_has_the_likeliest_tokens_and_their_probabilities():
    logits = torch.tensor([[[0.0, 2.0, 1.0]], [[3.0, 0.0, 1.0]]])  # two loops, one position
    (token,) = read_tokens(logits, torch.tensor([7]), torch.tensor([2]), top=2)
    assert (token.input_id, token.target_id, token.depth_needed) == (7, 2, 2)
    assert [cell.token_ids for cell in token.loops] == [(1, 2), (0, 2)]
    expected = logits[:, 0].softmax(dim=-1)
    assert token.loops[0].probabilities == pytest.approx((expected[0, 1].item(), expected[0, 2].item()))
    assert token.loops[1].probabilities == pytest.approx((expected[1, 0].item(), expected[1, 2].item()))
