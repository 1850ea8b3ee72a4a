from __future__ import annotations

import os

# Before anything imports them: tests are offline and run on one thread, so that two cores mean two test processes.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("loopformers", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loopformers")


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
