"""What all tests share: gpu tests are skipped without a GPU, generated examples are the same in every run."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine must not fail a property: how long one example takes is not what such a test is about.
# The same examples in every run, so that what fails is what was changed; `--hypothesis-profile search` draws new ones.
settings.register_profile("project", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # The modules and tests of the whole suite live as long as the process: each full collection would walk all of them.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parents[1]
