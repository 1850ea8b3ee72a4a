"""A function that runs again sees the hooks that it ran with first."""

from __future__ import annotations

import pytest
import torch

from loopformers.nn.hooks import with_present_hooks


def test_hooks_that_came_later_are_back_after_the_second_run():
    linear = torch.nn.Linear(3, 2)
    linear.register_forward_hook(lambda *_: torch.zeros(2))
    run = with_present_hooks(linear, linear)
    later = linear.register_forward_hook(lambda *_: torch.ones(2))
    assert run(torch.randn(3)).tolist() == [0, 0]
    assert linear(torch.randn(3)).tolist() == [1, 1]
    later.remove()
    assert linear(torch.randn(3)).tolist() == [0, 0]


def test_the_hooks_of_later_are_back_when_the_second_run_fails():
    linear = torch.nn.Linear(3, 2)
    linear.register_forward_hook(lambda *_: None)
    run = with_present_hooks(linear, linear)
    linear.register_forward_hook(lambda *_: torch.ones(2))
    with pytest.raises(RuntimeError):
        run(torch.randn(4))
    assert linear(torch.randn(3)).tolist() == [1, 1]


def test_without_hooks_the_function_itself_is_given_back():
    linear = torch.nn.Linear(3, 2)
    assert with_present_hooks(linear, linear) is linear
