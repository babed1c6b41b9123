"""A checkpoint of one layout continues under another: worlds of gloo ranks on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.benches._ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.integration]

BEFORE, AFTER = 3, 3
HELPERS = "tests.helpers.sharded_world"
_TP, _SHARDED = {"tensor": 2, "sequence": True}, {"distributed_optimizer": True}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "dp_distributed": (2, _SHARDED),
    "tp": (2, {**_TP, "expert_tensor": 2}),
    "cp": (2, {"context": 2}),
    "tp_ep_distributed": (2, {**_TP, **_SHARDED, "expert": 2}),
    "tp_ep_dp": (4, {**_TP, "expert": 2}),
    "ep": (2, {"expert": 2}),
    "ep_distributed": (2, {"expert": 2, **_SHARDED}),
    "pp": (2, {"pipeline": 2}),
    "pp_ep_distributed": (4, {"pipeline": 2, "expert": 2, **_SHARDED}),
    "vpp": (2, {"pipeline": 2, "virtual_pipeline": 2, **_SHARDED}),
    "one": (1, {}),
}


class World:
    """Ranks that carry out one order after another, each in its layout."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def __call__(self, name: str, **order: Any) -> Any:
        """What the ranks answer: equal gradient norms, or why they refused."""
        world, layout = LAYOUTS[name]
        family = order.get("family", "qwen3_moe")
        values = (order.get("dtype", "float32"), order.get("load"), order["first"], order["count"], order.get("save"))
        answers = self._pool.call(f"{HELPERS}:carry_out", family, layout, *values, world=world)
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with RankPool(4, tmp_path_factory.mktemp("ranks"), preload=HELPERS) as pool:
        yield World(pool)


# Each layout is written once and read by two others.
ORDER = list(LAYOUTS)


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Checkpoints of every layout after the same steps, and how each goes on when it is not interrupted."""
    root = tmp_path_factory.mktemp("saved")
    curves = {}
    for name in LAYOUTS:
        status, norms = world(name, first=0, count=BEFORE, save=root / name)
        assert status == "ok", norms
        curves[name] = norms
    status, whole = world("one", first=0, count=BEFORE + AFTER)
    assert status == "ok"
    for name, norms in curves.items():
        np.testing.assert_allclose(norms, whole[:BEFORE], rtol=1e-5, err_msg=name)
    return root, {"whole": whole}


@pytest.mark.parametrize("written", ORDER)
def test_every_layout_goes_on_from_any_other(
    world: World, saved: tuple[Path, dict[str, list[float]]], written: str
) -> None:
    """Invariant 1 of ``checkpoint_sharded``; EP=1 and EP=2 too, which Megatron's own formats cannot cross."""
    root, curves = saved
    at = ORDER.index(written)
    for read in (ORDER[(at + 1) % len(ORDER)], ORDER[(at + 5) % len(ORDER)]):
        status, norms = world(read, load=(root / written, BEFORE), first=BEFORE, count=AFTER)
        assert status == "ok", f"{written} read as {read}: {norms}"
        np.testing.assert_allclose(norms, curves["whole"][BEFORE:], rtol=1e-5, err_msg=f"{written} read as {read}")


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_other_families_go_on_too(world: World, tmp_path: Path, family: str) -> None:
    """Biases of routers and of q, k and v, shared experts, and norms that tensor-parallel ranks share out."""
    status, whole = world("one", family=family, first=0, count=BEFORE + AFTER)
    assert status == "ok", whole
    for written, read in (("tp", "pp_ep_distributed"), ("pp", "tp_ep_distributed")):
        status, norms = world(written, family=family, first=0, count=BEFORE, save=tmp_path / written)
        assert status == "ok", norms
        np.testing.assert_allclose(norms, whole[:BEFORE], rtol=1e-4)
        status, norms = world(read, family=family, load=(tmp_path / written, BEFORE), first=BEFORE, count=AFTER)
        assert status == "ok", norms
        np.testing.assert_allclose(norms, whole[BEFORE:], rtol=1e-4)
