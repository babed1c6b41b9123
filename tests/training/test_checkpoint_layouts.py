"""A checkpoint of one layout continues under another: worlds of gloo ranks on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.process import log_tail, start_child

pytestmark = [pytest.mark.slow, pytest.mark.integration]

BEFORE, AFTER = 3, 3
DEADLINE = 180.0


class World:
    """Ranks that carry out one order after another, each in its layout."""

    def __init__(self, size: int, folder: Path) -> None:
        self._logs = [folder / f"rank_{rank}.log" for rank in range(size)]
        self._children: list[tuple[subprocess.Popen[bytes], Connection]] = [
            start_child(
                "tests.helpers.sharded_world:serve", str(rank), str(size), str(folder / "store"), log=self._logs[rank]
            )
            for rank in range(size)
        ]

    def __call__(self, layout: ParallelConfig, **order: Any) -> Any:
        """What the ranks answer: equal gradient norms, or why they refused."""
        values = (order.get("dtype", "float32"), order.get("load"), order["first"], order["count"], order.get("save"))
        for _, conn in self._children:
            conn.send((layout, *values))
        answers = []
        for (_, conn), log in zip(self._children, self._logs, strict=True):
            assert conn.poll(DEADLINE), f"no answer: {log_tail(log)}"
            try:
                answers.append(conn.recv())
            except EOFError:
                pytest.fail(log_tail(log, 30))
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def close(self) -> None:
        for _, conn in self._children:
            conn.send(None)
        for process, conn in self._children:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            conn.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(2, tmp_path_factory.mktemp("two"))
    yield world
    world.close()


LAYOUTS = {
    "dp": ParallelConfig(),
    "dp_distributed": ParallelConfig(distributed_optimizer=True),
    "tp": ParallelConfig(tensor=2, sequence=True, expert_tensor=2),
    "tp_ep_distributed": ParallelConfig(tensor=2, sequence=True, expert=2, distributed_optimizer=True),
    "ep": ParallelConfig(expert=2),
    "ep_distributed": ParallelConfig(expert=2, distributed_optimizer=True),
    "pp": ParallelConfig(pipeline=2),
    "vpp": ParallelConfig(pipeline=2, virtual_pipeline=2, distributed_optimizer=True),
}
# Each layout is written once and read twice: the reader that follows it, and the one after that.
ORDER = list(LAYOUTS)


@pytest.fixture(scope="module")
def saved(two: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Checkpoints of every layout after the same steps, and how each goes on when it is not interrupted."""
    root = tmp_path_factory.mktemp("saved")
    curves = {}
    for name, layout in LAYOUTS.items():
        status, norms = two(layout, first=0, count=BEFORE, save=root / name)
        assert status == "ok", norms
        curves[name] = norms
    status, whole = two(LAYOUTS["dp"], first=0, count=BEFORE + AFTER)
    assert status == "ok"
    for name, norms in curves.items():
        np.testing.assert_allclose(norms, whole[:BEFORE], rtol=1e-5, err_msg=name)
    return root, {"whole": whole}


@pytest.mark.parametrize("written", ORDER)
def test_every_layout_goes_on_from_any_other(
    two: World, saved: tuple[Path, dict[str, list[float]]], written: str
) -> None:
    """Invariant 1 of ``checkpoint_sharded``; EP=1 and EP=2 too, which Megatron's own formats cannot cross."""
    root, curves = saved
    at = ORDER.index(written)
    for read in (written, ORDER[(at + 1) % len(ORDER)], ORDER[(at + 3) % len(ORDER)]):
        status, norms = two(LAYOUTS[read], load=(root / written, BEFORE), first=BEFORE, count=AFTER)
        assert status == "ok", f"{written} read as {read}: {norms}"
        np.testing.assert_allclose(norms, curves["whole"][BEFORE:], rtol=1e-5, err_msg=f"{written} read as {read}")
