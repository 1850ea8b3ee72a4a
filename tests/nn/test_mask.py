from __future__ import annotations

import pytest
import torch

from loopformers.nn.mask import attention_mask, packed_documents


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("num_queries", [1, 4, 7])
def test_a_query_of_packed_documents_sees_its_own_document_alone(num_queries, window):
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 3], [0, 0, 0, 0, 0, 0, 0]])
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, :2] = False
    mask = attention_mask(
        valid, num_queries=num_queries, num_keys=7, window=window, device=torch.device("cpu"), documents=documents
    )
    for row in range(2):
        for i in range(num_queries):
            query = 7 - num_queries + i
            for key in range(7):
                near = 0 <= query - key < (window or 99) and documents[row, key] == documents[row, query]
                assert bool(mask[row, 0, i, key]) == ((near and bool(valid[row, key])) or query == key)


def test_a_document_begins_where_a_position_does_not_follow_the_last():
    positions = torch.tensor([[0, 1, 0, 0, 1, 5, 6], [3, 4, 5, 6, 7, 8, 9]])
    assert packed_documents(positions).tolist() == [[0, 0, 1, 2, 2, 3, 3], [0] * 7]


@pytest.mark.parametrize("positions", [[[4]], [[0, 1, 2], [7, 8, 9]]])
def test_rows_of_one_document_each_need_no_numbers(positions):
    assert packed_documents(torch.tensor(positions)) is None
