"""Marks what a suite of another package asks of us that does not hold, and why.

A class of tests may have `EXCLUSIONS`, reasons by name of the test; `*` and `?` in a name match as in a shell. Such tests
are expected to fail: one that passes is reported, so that no exclusion outlives its reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

MARKERS = (  # that other packages' tests carry; ours must be declared in pyproject.toml
    "accelerate_tests", "bitsandbytes", "flash_attn_3_test", "flash_attn_4_test", "flash_attn_test", "generate",
    "multi_gpu_tests", "regression", "single_gpu_tests", "torch_compile_test",
)  # fmt: skip


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: another package's")


def pytest_collection_modifyitems(items):
    for item in items:
        for pattern, reason in getattr(getattr(item, "cls", None), "EXCLUSIONS", {}).items():
            if fnmatchcase(item.name, pattern):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                break


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # no source could be had; each suite has said so
        session.exitstatus = pytest.ExitCode.OK
