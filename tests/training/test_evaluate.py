"""Held-out evaluation (``megatron_ext/training/evaluate.py``) by a real driver process; the engine plays a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.rollout.driver import DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import sampling_seed
from megatron_ext.training.evaluate import evaluate, load_result, save_result
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.interrupt import Interrupted
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers import driving
from tests.helpers.scripted import ScriptedAddress, small_codec

TASKS = [Task(f"walk/dev/{i}", "walk", i, "dev") for i in range(6)]


class Recording(DriverProcess):
    """The driver, with what it was ordered to do written down."""

    orders: tuple[GroupOrder, ...] = ()

    def run(self, orders: Sequence[GroupOrder]) -> None:
        self.orders += tuple(orders)
        super().run(orders)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Path:
    small_codec(folder / "tokenizer")
    return folder / "tokenizer"


@pytest.fixture(scope="module")
def process(folder: Path, tokenizer: Path) -> Iterator[Recording]:
    made = Recording(driving.spec(folder, concurrency=32))
    made.open(ScriptedAddress(tokenizer, driving.by_task), tokenizer)
    yield made
    made.close()


@pytest.fixture
def driver(process: Recording) -> Recording:
    process.orders = ()
    return process


def look(
    driver: DriverProcess, samples: int = 3, progress: list[int] | None = None, timeout: float = 120.0
) -> EvalResult:
    told = [] if progress is None else progress
    return evaluate(
        driver,
        TASKS,
        "dev",
        samples=samples,
        temperature=0.8,
        progress=told.append,
        check=lambda: None,
        timeout=timeout,
    )


def test_every_task_greedily_and_sampled(driver: Recording, folder: Path) -> None:
    progress: list[int] = []
    result = look(driver, progress=progress)
    assert result.name == "dev" and result.tasks == tuple(task.task_id for task in TASKS)
    assert result.greedy.tolist() == [True, False, True, False, True, False]
    assert result.sampled.tolist() == [[False, True, False]] * 6, "outcomes stand at their sample"
    assert result.turns.tolist() == [3, 1, 3, 1, 3, 1] and result.reward.tolist() == [2, 0, 2, 0, 2, 0]
    assert result.lost == 2, "task 5 broke down, greedy and once when sampled: failures here, and said so"
    assert "group eval/walk/dev/5/greedy: " in (folder / "logs" / "driver.log").read_text()
    assert progress[-1] == 12 and progress == sorted(progress)
    assert TrajectoryStore(folder / "store").list() == [], "evaluation keeps no tokens"


def test_orders_sample_as_asked(driver: Recording) -> None:
    look(driver)
    greedy = [order for order in driver.orders if order.group_id.endswith("/greedy")]
    sampled = [order for order in driver.orders if order.group_id.endswith("/sampled")]
    assert len(greedy) == len(sampled) == 6 and len(driver.orders) == 12
    assert {(o.samples, o.sampling.temperature) for o in greedy} == {(1, 0.0)}
    assert {(o.samples, o.sampling.temperature) for o in sampled} == {(3, 0.8)}
    assert {(o.sampling.top_p, o.sampling.top_k) for o in driver.orders} == {(1.0, 0)}


def test_two_evaluations_are_paired(driver: Recording) -> None:
    """Seeds come from (run seed, group, sample), and group names from the task alone."""
    look(driver)
    first, driver.orders = driver.orders, ()
    evaluate(driver, TASKS[::-1], "test", samples=3, temperature=0.8, progress=lambda done: None, check=lambda: None)

    def seeds(orders: Sequence[GroupOrder]) -> dict[tuple[str, str, int], int]:
        return {
            (o.task.task_id, o.group_id.rpartition("/")[2], s): sampling_seed(1, o.group_id, s)
            for o in orders
            for s in range(o.samples)
        }

    assert seeds(first) == seeds(driver.orders)
    assert len(set(seeds(first).values())) == 6 * 4, "and no two of one evaluation are alike"


def test_without_samples(driver: Recording, tmp_path: Path) -> None:
    result = look(driver, samples=0)
    assert len(driver.orders) == 6 and result.sampled.shape == (6, 0)
    save_result(tmp_path / "gate.json", result)
    assert load_result(tmp_path / "gate.json").sampled.shape == (6, 0)


def test_a_saved_result_is_the_result(driver: Recording, tmp_path: Path) -> None:
    result = look(driver)
    path = tmp_path / "evaluations" / "before.json"
    save_result(path, result)
    again = load_result(path)
    for name, value in vars(result).items():
        if isinstance(value, np.ndarray):
            assert vars(again)[name].dtype == value.dtype
            np.testing.assert_array_equal(vars(again)[name], value)
        else:
            assert vars(again)[name] == value
    assert again.summary() == result.summary()
    save_result(path, replace(result, name="after"))
    assert load_result(path).name == "after" and [p.name for p in path.parent.iterdir()] == ["before.json"]


def test_a_stall_names_what_is_missing_and_an_interrupt_comes_through(tokenizer: Path, tmp_path: Path) -> None:
    driver = DriverProcess(driving.spec(tmp_path))
    try:
        driver.open(ScriptedAddress(tokenizer, driving.by_task, hold=True), tokenizer)
        with pytest.raises(DriverError, match=r"no group finished for 0 s; waiting for 'eval/walk/dev/0/greedy'"):
            look(driver, timeout=0.3)
        with pytest.raises(DriverError, match="'eval/walk/dev/0/greedy' is already running"):
            look(driver)
    finally:
        driver.close()

    class Stop(DriverProcess):
        """Never asked for anything: the interrupt came first."""

        def __init__(self) -> None: ...

        def run(self, orders: Sequence[GroupOrder]) -> None: ...

        def poll(self, timeout: float) -> list[GroupDone]:
            raise AssertionError

    def stop() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        evaluate(Stop(), TASKS, "dev", samples=0, temperature=1.0, progress=lambda done: None, check=stop)
