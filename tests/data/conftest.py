from __future__ import annotations

import pytest
from datasets import Dataset

from loopformers.data.corpora import load_splits
from loopformers.data.tokenizer import bundled_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return bundled_tokenizer()


@pytest.fixture(scope="session")
def bundled_splits(tmp_path_factory):
    return load_splits("bundled", cache_dir=tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def make_documents():
    """Documents with the ids d0, d1, ... from texts."""

    def make(texts):
        return Dataset.from_dict({"id": [f"d{i}" for i in range(len(texts))], "text": list(texts)})

    return make
