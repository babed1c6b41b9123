"""Score plans on real process groups: every layout's replies are those of one rank and of one forward a request.

Log-probs that changed with the packing, the micro-batch or the layout: verl 2996; ranks that hung without a word when
one had nothing to run: verl 3873.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from launch.benches._ranks import RankPool
from tests.helpers.score_ranks import Answer, some_batch, some_requests

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HELPERS = "tests.helpers.score_ranks"
COUNT = len(some_requests(some_batch()))
EVERYTHING = list(range(COUNT))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sp": {"tensor": 2, "sequence": True},
    "ep2": {"expert": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), preload=HELPERS) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def naive(pool: RankPool) -> list[Answer]:
    return list(pool.call(f"{HELPERS}:run_naive", world=1)[0])


@pytest.fixture(scope="module")
def alone(pool: RankPool, naive: list[Answer]) -> list[Answer]:
    return list(pool.call(f"{HELPERS}:run_plan", {}, 4096, [EVERYTHING], world=1)[0])


def assert_same(reply: Answer, want: Answer, what: str) -> None:
    for name, values in want.items():
        np.testing.assert_allclose(reply[name], values, rtol=1e-5, atol=1e-5, err_msg=f"{what} {name}")


def test_one_rank_answers_what_a_forward_a_request_answers(alone: list[Answer], naive: list[Answer]) -> None:
    for number, (reply, want) in enumerate(zip(alone, naive, strict=True)):
        assert not want or set(reply) == set(want)
        assert_same(reply, want, f"request {number}")
        if not want:
            assert reply and all(len(values) == 0 for values in reply.values())


def test_requests_are_told_apart(alone: list[Answer]) -> None:
    plain, privileged, hinted, _, likelihood, _, _ = alone[:7]
    assert np.all(np.abs(privileged["logp"] - plain["logp"][1:]) > 1e-4)
    assert np.all(np.abs(hinted["logp"] - plain["logp"][1:]) > 1e-4)
    assert likelihood["logp"].shape == (3,)
    for reply in (plain, privileged, hinted):
        assert np.all(np.diff(reply["topk_logp"]) <= 0)


@pytest.mark.parametrize("cap", [40, 4096])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layout_gives_the_replies_of_one_rank(pool: RankPool, alone: list[Answer], layout: str, cap: int) -> None:
    found = pool.call(f"{HELPERS}:run_plan", LAYOUTS[layout], cap, [EVERYTHING], world=2)
    for rank, replies in enumerate(found):
        for number, (reply, want) in enumerate(zip(replies, alone, strict=True)):
            assert_same(reply, want, f"rank {rank} request {number}")
            for name, values in reply.items():
                assert np.array_equal(values, found[0][number][name]), "the replica's ranks hold the same bits"


@pytest.mark.parametrize(
    ("kind", "parallel"), [("dense", {"tensor": 2}), ("deep", {"pipeline": 2, "virtual_pipeline": 2})]
)
def test_layouts_that_need_another_model(pool: RankPool, kind: str, parallel: dict[str, Any]) -> None:
    """Tensor parallelism without sequence parallelism, and an interleaved pipeline."""
    (one,) = pool.call(f"{HELPERS}:run_plan", {}, 4096, [EVERYTHING], kind, world=1)
    for rank, replies in enumerate(pool.call(f"{HELPERS}:run_plan", parallel, 40, [EVERYTHING], kind, world=2)):
        for number, (reply, want) in enumerate(zip(replies, one, strict=True)):
            assert_same(reply, want, f"rank {rank} request {number}")


@pytest.mark.parametrize("chosen", [[EVERYTHING[::2], EVERYTHING[1::2]], [EVERYTHING, []], [[], [2]], [[], []]])
@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_data_parallel_ranks_ask_for_themselves(
    pool: RankPool, alone: list[Answer], layout: str, chosen: list[list[int]]
) -> None:
    found = pool.call(f"{HELPERS}:run_plan", LAYOUTS[layout], 40, chosen, world=2)
    for mine, replies in zip(chosen, found, strict=True):
        assert len(replies) == len(mine)
        for number, reply in zip(mine, replies, strict=True):
            assert_same(reply, alone[number], f"request {number}")


@pytest.mark.parametrize("layout", ["dp2", "tp2_sp", "pp2"])
def test_what_cannot_run_is_refused_on_every_rank(pool: RankPool, layout: str) -> None:
    for rank, said in enumerate(pool.call(f"{HELPERS}:refusals", LAYOUTS[layout], world=2)):
        assert said["snapshot"] == "weights 'unused': no snapshot; there are snapshot"
        assert "no value head" in said["value"]
        assert "batch.tokens_per_microbatch=1" in said["cap"]
        assert ("no value head" if rank else "another rank" if layout == "dp2" else "ranks of one replica") in said[
            "one rank"
        ]
        assert "not of this model in this layout" in said["shape"]
        assert "different tables of weights" in said["table"] and "or snapshots" in said["one snapshot"]
        assert said["different"] == ("" if layout == "dp2" else said["different"])
        assert layout == "dp2" or "different score requests" in said["different"]
