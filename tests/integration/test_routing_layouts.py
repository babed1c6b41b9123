"""Both routing losses under every parallel layout, on real process groups: values, statistics and gradients.

Covers the invariants of ``training/routing/routing.py`` and ``moe/structured.py`` over ranks. A step's second round
has other weights, under which the linearised loss of the first is no longer what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from launch.benches._ranks import RankPool
from launch.benches.layouts import RANK_MODULE
from megatron_ext.moe.protocol import RoutingLossPolicy
from megatron_ext.moe.structured import StructuredRouter
from tests.helpers.routing_policies import PairsTogether, StayNear
from tests.helpers.routing_ranks import Found

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENTRY = "tests.helpers.routing_ranks:routing_step"
BAR = 1e-5
OPEN: dict[str, Any] = {"entropy_high": 100.0, "operations": 3, "detach_input": False}
POLICIES = {
    "turn": StructuredRouter(mutual_information=0.5, consistency=0.0, **OPEN),
    "token": StructuredRouter(mutual_information=0.0, consistency=0.5, threshold=0.7, **OPEN),
}
OWN: dict[str, StayNear | PairsTogether] = {"stay": StayNear(coefficient=20.0), "pairs": PairsTogether(coefficient=1.0)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2.sp": (2, {"tensor": 2, "sequence": True}),
    "ep2": (2, {"expert": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "tp2.ep2": (4, {"tensor": 2, "sequence": True, "expert": 2}),
    "tp2.cp2": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "pp2.vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks"), preload=RANK_MODULE) as ranks:
        yield ranks


def run(pool: RankPool, world: int, parallel: dict[str, Any], policy: RoutingLossPolicy | None, **values: Any) -> Found:
    given = {"cap": 80, "rewarded": False, "share_prefixes": False, "recompute": False, "updates": 1} | values
    first, *others = pool.call(ENTRY, parallel, policy, *given.values(), world=world)
    assert others == [None] * (world - 1)
    assert isinstance(first, Found)
    return first


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[str, Found]:
    return {name: run(pool, 1, {}, policy) for name, policy in POLICIES.items()}


def same(found: Found, want: Found) -> None:
    assert np.allclose(found.sums, want.sums, rtol=BAR, atol=BAR)
    for step, (metrics, wanted) in enumerate(zip(found.metrics, want.metrics, strict=True)):
        assert metrics == pytest.approx(wanted, rel=BAR, abs=BAR), step
    for ours, theirs in zip(found.grads, want.grads, strict=True):
        size = max(np.abs(value).max() for value in theirs.values())
        for name, value in theirs.items():
            assert np.abs(ours[name] - value).max() <= BAR * size, name


@pytest.mark.parametrize("which", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_losses_of_one_rank(
    pool: RankPool, alone: dict[str, Found], layout: str, which: str
) -> None:
    world, parallel = LAYOUTS[layout]
    same(run(pool, world, parallel, POLICIES[which]), alone[which])


@pytest.mark.parametrize("which", POLICIES)
def test_one_rank_has_something_to_lose(alone: dict[str, Found], which: str) -> None:
    found = alone[which]
    assert all(np.isfinite(value) for step in found.metrics for value in step.values())
    assert found.metrics[0]["moe/turn_mi"] > 0 and found.metrics[0]["moe/token_loss"] > 0
    assert found.metrics[0] != found.metrics[1] and found.metrics[0]["moe/gate"] == 1
    assert 0.05 < found.metrics[0]["moe/pulled_fraction"] < 0.99, "some pairs are pulled and some are not"
    routers = {name: value for name, value in found.grads[0].items() if ".mlp.gate." in name}
    assert routers and all(np.abs(value).max() > 0 for value in routers.values())


@pytest.mark.parametrize(("layout", "values"), [("cp2", {"recompute": True}), ("tp2.sp", {"share_prefixes": True})])
def test_recomputed_and_shared_tokens_too(
    pool: RankPool, alone: dict[str, Found], layout: str, values: dict[str, Any]
) -> None:
    world, parallel = LAYOUTS[layout]
    same(run(pool, world, parallel, POLICIES["token"], **values), alone["token"])


def test_with_a_policy_loss_and_empty_microbatches(pool: RankPool) -> None:
    policy = StructuredRouter(mutual_information=0.1, consistency=0.1, **{**OPEN, "detach_input": True})
    one = run(pool, 1, {}, policy, rewarded=True)
    for layout in ("dp2", "pp2", "cp2"):
        world, parallel = LAYOUTS[layout]
        same(run(pool, world, parallel, policy, rewarded=True, cap=1000), one)


def test_a_closed_gate_is_plain_training_in_every_rank(pool: RankPool) -> None:
    closed = StructuredRouter(operations=3)
    for layout in ("dp2", "tp2.sp"):
        world, parallel = LAYOUTS[layout]
        gated = run(pool, world, parallel, closed, rewarded=True)
        plain = run(pool, world, parallel, None, rewarded=True)
        assert gated.metrics[0]["moe/gate"] == 0
        for ours, theirs in zip(gated.grads, plain.grads, strict=True):
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("which", OWN)
def test_a_loss_of_ones_own_is_that_of_one_rank(pool: RankPool, which: str) -> None:
    """What is measured, what is kept of each token for later steps of the batch, and what stands on another rank."""
    one = run(pool, 1, {}, OWN[which], rewarded=True, updates=2)
    assert any(value > 0 for name, value in one.metrics[0].items() if name.startswith("moe/own/"))
    plain = run(pool, 1, {}, replace(OWN[which], coefficient=0.0), rewarded=True, updates=2)
    routers = [name for name in one.grads[0] if ".mlp.gate." in name]
    assert routers
    for name in routers:
        assert np.abs(one.grads[0][name] - plain.grads[0][name]).max() > 1e-3 * np.abs(plain.grads[0][name]).max()
    for layout in ("dp2", "tp2.sp", "pp2", "cp2", "tp2.cp2"):
        world, parallel = LAYOUTS[layout]
        same(run(pool, world, parallel, OWN[which], rewarded=True, updates=2), one)
