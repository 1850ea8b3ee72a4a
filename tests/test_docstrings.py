from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import loopformers

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(loopformers.__path__, "loopformers.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_and_its_examples_print_what_they_show(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_every_public_name_is_there():
    for name in loopformers.__all__:
        assert getattr(loopformers, name) is not None
    for name in MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"
