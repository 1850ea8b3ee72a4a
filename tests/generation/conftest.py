from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def untrained_models_are_left_without_a_warning():
    """Most tests leave tiny random models early; the warning for it has tests of its own."""
    import warnings

    from loopformers.errors import ExitWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExitWarning)
        yield
