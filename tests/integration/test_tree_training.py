"""Prefix-tree training over ranks: the same step as whole rows, on ragged nested trees, where a layout takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from launch.benches._ranks import RankPool
from tests.helpers.tree_ranks import Compared, ragged_batch

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENTRY = "tests.helpers.tree_ranks:compare"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "tp2_sp_ep2": (2, {"tensor": 2, "sequence": True, "expert": 2}),
    "ep2": (2, {"expert": 2}),
    "pp2": (2, {"pipeline": 2}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), preload="tests.helpers.tree_ranks") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Compared:
    (one,) = pool.call(ENTRY, {}, 4096, world=1)
    assert isinstance(one, Compared)
    return one


@pytest.mark.parametrize("cap", [60, 4096])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_trees_give_the_step_of_whole_rows(pool: RankPool, alone: Compared, layout: str, cap: int) -> None:
    """How rows are cut into micro-batches and ranks changes nothing either: slime 365 and 2090, miles 1931."""
    world, parallel = LAYOUTS[layout]
    for found in pool.call(ENTRY, parallel, cap, world=world):
        assert found.loss == pytest.approx(alone.loss, rel=1e-5)
        assert found.loss_gap <= 1e-5 and found.gradient_gap <= 1e-5 and found.logp_gap <= 1e-5
        assert found.rerouted == 0
        assert found.tokens[1] < found.tokens[0]
        assert (found.microbatches > 1) == (cap == 60)


def test_the_batch_is_a_ragged_forest(alone: Compared) -> None:
    batch = ragged_batch()
    lengths = np.diff(batch.segment_tokens)
    assert len(lengths) >= 18 and len(set(lengths.tolist())) > 8
    assert alone.tokens[0] == batch.num_tokens > 1.3 * alone.tokens[1]


def test_sequence_parallelism_fills_up_odd_trees(pool: RankPool) -> None:
    for cap in range(60, 70):
        found = pool.call(ENTRY, {"tensor": 2, "sequence": True}, cap, world=2)
        if found[0].odd:
            assert found[0].gradient_gap <= 1e-5 and found[0].logp_gap <= 1e-5
            return
    raise AssertionError("no micro-batch with an odd number of tokens was met")
