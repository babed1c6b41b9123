"""The driver as a process: what the trainer holds, and what runs at the other end of the pipe.

Invariants:
1. The child never outlives its parent (a parent-death signal covers ``kill -9``).
2. Every call of the handle has a deadline; a dead child is an error that shows the end of its log.
3. An exception in the child reaches the caller as one ``DriverError`` with its text; the traceback is in the log.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.config.instantiate import instantiate
from megatron_ext.environments.pool import Demonstration, EnvironmentPool
from megatron_ext.environments.protocol import ToolSpec
from megatron_ext.harness.template import load_codec
from megatron_ext.process import log_tail, start_child
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rollout.driver import Driver, DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.episode import EpisodeLimits
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class DriverSpec:
    """Everything a driver needs, picklable: configuration nodes of the plug points, limits and folders."""

    environments: Mapping[str, Mapping[str, Any]]
    harness: Mapping[str, Any]
    rewards: Mapping[str, Mapping[str, Any]]
    limits: EpisodeLimits
    concurrency: int
    env_workers: int
    env_deadline_s: float
    engine_deadline_s: float
    run_seed: int
    store: Path
    logs: Path


class DriverProcess:
    """The trainer's handle on its driver."""

    def __init__(self, spec: DriverSpec, start_timeout: float = 120.0) -> None:
        self._log = spec.logs / "driver.log"
        spec.logs.mkdir(parents=True, exist_ok=True)
        self._process, self._conn = start_child("megatron_ext.rollout.driver_process:serve", log=self._log)
        self._conn.send(spec)
        self._done: list[GroupDone] = []
        self._call("hello", None, start_timeout)

    # -- environment calls ----------------------------------------------------------------------------------------
    def tasks(self, environment: str, split: str, count: int, start: int = 0, timeout: float = 600.0) -> list[Task]:
        return self._call("tasks", (environment, split, count, start), timeout)

    def tools(self, environment: str, timeout: float = 120.0) -> list[ToolSpec]:
        return self._call("tools", environment, timeout)

    def labels(self, environment: str, timeout: float = 120.0) -> dict[str, list[str]]:
        """The turn labels that the environment gives, and what the values of each mean."""
        return self._call("labels", environment, timeout)

    def corpus(self, environment: str, split: str, count: int, timeout: float = 600.0) -> list[str]:
        return self._call("corpus", (environment, split, count), timeout)

    def demonstrate(
        self,
        environment: str,
        tasks: Sequence[Task],
        *,
        mistake_rate: float,
        seed: int,
        max_turns: int,
        timeout: float = 1200.0,
    ) -> list[Demonstration]:
        return self._call("demonstrate", (environment, list(tasks), mistake_rate, seed, max_turns), timeout)

    # -- episodes -------------------------------------------------------------------------------------------------
    def open(self, engine: Any, tokenizer: Path, timeout: float = 120.0) -> None:
        """Connects to an engine (its ``connect()`` address) and loads the tokenizer folder; needed before ``run``."""
        self._call("open", (engine, tokenizer), timeout)

    def run(self, orders: Sequence[GroupOrder]) -> None:
        """Starts groups; collect them with ``poll``."""
        self._call("run", list(orders), 60.0)

    def poll(self, timeout: float) -> list[GroupDone]:
        """Groups finished since the last call; waits up to ``timeout`` seconds for the first."""
        if not self._done:
            self._pump(timeout)
        done, self._done = self._done, []
        return done

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        if self._process.poll() is None:
            with suppress(BrokenPipeError, OSError):  # it may be gone by now, which is what close wants
                self._conn.send(("stop", None))
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._conn.close()

    # -- inside ---------------------------------------------------------------------------------------------------
    def _call(self, name: str, payload: Any, timeout: float) -> Any:
        try:
            self._conn.send((name, payload))
        except (BrokenPipeError, OSError):
            self._gone()
        deadline = time.monotonic() + timeout
        while True:
            reply = self._receive(deadline - time.monotonic())
            if reply is None:
                raise DriverError(f"rollout driver (pid {self.pid}): no answer to {name!r} within {timeout:.0f} s")
            kind, value = reply
            if kind == "done":
                self._done.extend(value)
                continue
            return value

    def _pump(self, timeout: float) -> None:
        reply = self._receive(timeout)
        while reply is not None:
            self._done.extend(reply[1])
            reply = self._receive(0.0)

    def _receive(self, timeout: float) -> tuple[str, Any] | None:
        # A child that dies closes its end, which makes the connection readable.
        try:
            if not self._conn.poll(max(timeout, 0.0)):
                return None
            kind, value = self._conn.recv()
        except (EOFError, OSError):
            self._gone()
        if kind == "error":
            raise DriverError(f"rollout driver (pid {self.pid}): {value}; log: {self._log}")
        return kind, value

    def _gone(self) -> NoReturn:
        try:
            code: int | str = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = "unknown"
        raise DriverError(
            f"rollout driver (pid {self.pid}) ended with code {code}; log {self._log}:\n{log_tail(self._log)}"
        )


def serve(conn: Connection) -> None:
    """Entry point of the child; its output goes to the log."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _loop(conn, conn.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logging.info("the trainer closed the pipe")
    except Exception as error:
        logging.error("%s", traceback.format_exc())
        conn.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _loop(conn: Connection, spec: DriverSpec) -> None:
    pool = EnvironmentPool(
        spec.environments, workers=spec.env_workers, deadline_s=spec.env_deadline_s, log_dir=spec.logs
    )
    driver: Driver | None = None
    try:
        while True:
            busy = driver is not None and driver.busy
            if conn.poll(0.0 if busy else 3600.0):
                name, payload = conn.recv()
                if name == "stop":
                    return
                value: Any = None
                if name == "tasks":
                    value = list(pool.tasks(*payload))
                elif name == "tools":
                    value = list(pool.tools(payload))
                elif name == "labels":
                    value = pool.labels(payload)
                elif name == "corpus":
                    value = list(pool.corpus(*payload))
                elif name == "demonstrate":
                    environment, tasks, mistake_rate, seed, max_turns = payload
                    value = list(
                        pool.demonstrate(environment, tasks, mistake_rate=mistake_rate, seed=seed, max_turns=max_turns)
                    )
                elif name == "open":
                    driver = _open(spec, pool, *payload)
                    gc.freeze()  # modules and the tokenizer stay: no collection between two turns walks them
                elif name == "run":
                    if driver is None:
                        raise DriverError("run before open: no engine is connected")
                    driver.submit(payload)
                conn.send(("ok", value))
            if driver is not None and driver.busy:
                done = driver.step(0.05)
                for group in done:
                    for problem in group.problems:
                        logging.warning("group %s: %s", group.group_id, problem)
                if done:
                    conn.send(("done", done))
    finally:
        if driver is not None:
            driver.close()
        pool.close()


def _open(spec: DriverSpec, pool: EnvironmentPool, engine: Any, tokenizer: Path) -> Driver:
    return Driver(
        pool=pool,
        client=engine.open(),
        codec=load_codec(tokenizer),
        harness=instantiate(spec.harness),
        rewards=RewardSet.from_config(spec.rewards),
        store=TrajectoryStore(spec.store),
        limits=spec.limits,
        concurrency=spec.concurrency,
        run_seed=spec.run_seed,
        engine_deadline_s=spec.engine_deadline_s,
    )
