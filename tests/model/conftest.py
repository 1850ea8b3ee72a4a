from __future__ import annotations

import pytest


@pytest.fixture
def checkpoint_activations():
    """Turns activation checkpointing on under whichever name this transformers has for it."""

    def enable(model, **checkpoint_arguments):
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=checkpoint_arguments or None)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_arguments or None)
        return model

    return enable
