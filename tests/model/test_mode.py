from __future__ import annotations

import pytest
from torch import nn

from loopformers.model.mode import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_evaluated_in_the_block_and_goes_back_to_its_mode_after_an_error_too(training):
    model = nn.Linear(2, 3).train(training)
    with evaluating(model):
        assert not model.training
    assert model.training == training
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert model.training == training
