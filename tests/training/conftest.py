"""Process groups of one rank, for each module that trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ext.models.parallel import ParallelContext
from tests.helpers.training import one_rank


@pytest.fixture(scope="module")
def rank() -> Iterator[ParallelContext]:
    with one_rank() as context:
        yield context
