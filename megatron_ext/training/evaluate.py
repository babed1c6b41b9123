"""Held-out evaluation: greedy and sampled episodes of fixed tasks, through the same driver as training.

Invariant: sampling seeds depend on the task and the sample only, so that two evaluations of one run are paired.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_ext.rollout.driver import DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import Sampling
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task


def evaluate(
    driver: DriverProcess,
    tasks: Sequence[Task],
    name: str,
    *,
    samples: int,
    temperature: float,
    progress: Callable[[int], None],
    check: Callable[[], None],
    timeout: float = 3600.0,
) -> EvalResult:
    """Plays every task once greedily and ``samples`` times at ``temperature``.

    ``progress`` is told finished groups; ``check`` may raise to interrupt. Trajectories that ended through no fault of
    the policy (environment error or deadline) count as failures and are told in the driver's log. ``DriverError`` when
    no group finishes for ``timeout`` seconds.
    """
    orders = [GroupOrder(f"eval/{t.task_id}/greedy", "", t, 1, Sampling(temperature=0.0), store=False) for t in tasks]
    if samples:
        sampling = Sampling(temperature=temperature)
        orders += [GroupOrder(f"eval/{t.task_id}/sampled", "", t, samples, sampling, store=False) for t in tasks]
    done = run_orders(driver, orders, progress=progress, check=check, timeout=timeout)
    greedy = [done[f"eval/{t.task_id}/greedy"].meta for t in tasks]
    drawn = [done[f"eval/{t.task_id}/sampled"].meta for t in tasks if samples]
    return EvalResult(
        name=name,
        tasks=tuple(t.task_id for t in tasks),
        greedy=np.array([m.success[0] for m in greedy], dtype=bool),
        sampled=np.array([m.success for m in drawn], dtype=bool).reshape(len(tasks), samples),
        turns=np.array([m.turns[0] for m in greedy], dtype=np.float64),
        reward=np.array([m.rewards[0] for m in greedy], dtype=np.float64),
        lost=sum(not Status(status).trainable for m in (*greedy, *drawn) for status in m.status),
    )


def run_orders(
    driver: DriverProcess,
    orders: Sequence[GroupOrder],
    *,
    progress: Callable[[int], None],
    check: Callable[[], None],
    timeout: float,
) -> dict[str, GroupDone]:
    """Runs orders to the end; a stall of ``timeout`` seconds is an error that names what is missing."""
    done: dict[str, GroupDone] = {}
    driver.run(orders)
    last = time.monotonic()
    while len(done) < len(orders):
        check()
        for group in driver.poll(0.5):
            done[group.group_id] = group
            last = time.monotonic()
        progress(len(done))
        if time.monotonic() - last > timeout:
            missing = next(o.group_id for o in orders if o.group_id not in done)
            raise DriverError(
                f"rollout driver: no group finished for {timeout:.0f} s; waiting for {missing!r} among others"
            )
    return done


def save_result(path: Path, result: EvalResult) -> None:
    """Keeps every task's outcome, so that a resumed run and a table can pair them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {
        "name": result.name,
        "tasks": list(result.tasks),
        "greedy": result.greedy.astype(int).tolist(),
        "sampled": result.sampled.astype(int).tolist(),
        "turns": result.turns.tolist(),
        "reward": result.reward.tolist(),
        "lost": result.lost,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def load_result(path: Path) -> EvalResult:
    """The evaluation that ``save_result`` wrote."""
    value = json.loads(path.read_text())
    return EvalResult(
        name=value["name"],
        tasks=tuple(value["tasks"]),
        greedy=np.array(value["greedy"], dtype=bool),
        sampled=np.array(value["sampled"], dtype=bool).reshape(len(value["tasks"]), -1),
        turns=np.array(value["turns"], dtype=np.float64),
        reward=np.array(value["reward"], dtype=np.float64),
        lost=int(value["lost"]),
    )
