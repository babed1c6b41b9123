"""What moves routers besides the policy loss, in every layout: nothing where they are frozen (``moe/policies.py``, 2),
and the load of the record's tokens where they are kept even (``training/routing/filler.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from launch.benches._ranks import RankPool

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENTRY = "tests.helpers.frozen_ranks:train"
SHARDED = {"distributed_optimizer": True}
TENSOR = {"tensor": 2, "sequence": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2 distributed optimizer": SHARDED,
    "tp2 sp": TENSOR,
    "tp2 sp ep2": {**TENSOR, "expert": 2},
    "ep2": {"expert": 2},
    "ep2 distributed optimizer": {"expert": 2, **SHARDED},
    "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), preload="tests.helpers.frozen_ranks") as ranks:
        yield ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_routers_are_the_same_bits(pool: RankPool, layout: str, dtype: str) -> None:
    """Weight decay, Adam's moments, fp32 masters copied back, shards gathered: none moves a router."""
    for moved in pool.call(ENTRY, LAYOUTS[layout], "frozen", dtype, 3, world=2):
        assert moved.routers >= 4 and moved.changed == () and moved.change == 0.0
        assert moved.still == (), "everything else learns"


@pytest.mark.parametrize("layout", ["dp2 distributed optimizer", "tp2 sp"])
def test_trained_routers_move(pool: RankPool, layout: str) -> None:
    """So that the test above can fail: weights, and expert biases that are balanced."""
    for moved in pool.call(ENTRY, LAYOUTS[layout], "trained", "float32", 1, world=2):
        assert len(moved.changed) == moved.routers


def test_how_far_routers_moved_is_the_same_in_every_layout(pool: RankPool) -> None:
    """``training/measures/router_change.py``, 2: over ranks that hold all routers, and over stages that hold some."""
    found = {
        name: {moved.change for moved in pool.call(ENTRY, LAYOUTS[name], "trained", "float32", 1, world=2)}
        for name in ("dp2", "tp2 sp ep2", "pp2", "vpp2")
    }
    (change,) = found["dp2"]
    assert change > 0
    for name, changes in found.items():
        assert len(changes) == 1 and changes.pop() == pytest.approx(change, rel=1e-4), name


EVENED = "tests.helpers.frozen_ranks:evened"


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[int, dict[str, Any]]:
    """By the number of rows, on one rank with the micro-batches of two."""
    return {rows: pool.call(EVENED, {}, rows, 100, world=1)[0] for rows in (1, 7)}


@pytest.mark.parametrize(
    ("layout", "rows"), [("dp2", 1), ("ep2", 1), ("vpp2", 1), ("dp2", 7), ("tp2 sp", 7), ("cp2", 7)]
)
def test_expert_biases_move_as_on_one_rank(
    pool: RankPool, alone: dict[int, dict[str, Any]], layout: str, rows: int
) -> None:
    """``training/routing/filler.py``, 1. One row leaves a data-parallel rank, or half an interleaved pipeline, with
    filler alone; the others are padded. Where no row is padded the load-balancing loss is the same too (2)."""
    found = pool.call(EVENED, LAYOUTS[layout], rows, 100, world=2)
    assert {name for rank in found for name in rank} == alone[rows].keys()
    for name, value in alone[rows].items():
        for rank in found:
            if name in rank and "bias" in name:
                assert np.array_equal(rank[name], value), name
            elif name in rank and layout in ("dp2", "ep2"):
                size = np.abs(value).max()
                assert size > 1e-5 and np.abs(rank[name] - value).max() <= 1e-5 * size, name
