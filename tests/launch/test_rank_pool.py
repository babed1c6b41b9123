"""Invariants of the pool of ranks (numbers refer to ``launch/benches/_ranks.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.benches._ranks import RankError, RankPool

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_calls_answer_in_order_of_ranks(tmp_path: Path) -> None:
    with RankPool(2, tmp_path, preload="math") as pool:
        for world in (1, 2, 1):
            assert pool.call("torch.distributed:get_rank", world=world) == list(range(world))
        assert pool.call("math:hypot", 3, 4, world=1) == [5.0]
        with pytest.raises(ValueError, match="3 ranks, the pool has 2"):
            pool.call("math:hypot", 3, 4, world=3)
        with pytest.raises(RankError, match="rank 0 failed(.|\n)*ZeroDivisionError"):  # invariant 1
            pool.call("operator:truediv", 1, 0, world=1)


def test_a_rank_that_hangs_or_dies_is_an_error(tmp_path: Path) -> None:  # invariant 1
    with RankPool(1, tmp_path, preload="math") as pool:
        assert pool.call("math:sqrt", 4, world=1) == [2.0]
        pool._deadline_s = 0.2
        with pytest.raises(RankError, match=r"ranks \[0\] did not answer in 0.2 s"):
            pool.call("time:sleep", 60, world=1)
    with RankPool(1, tmp_path, preload="math") as pool, pytest.raises(RankError, match="died"):
        pool.call("os:_exit", 3, world=1)
