"""The driver as a process, and what it owes when something dies: ``megatron_ext/process.py``, ``driver_process.py``.

Real processes throughout; the engine at the driver's end is the script player of ``tests/helpers/scripted.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.environments.protocol import Observation
from megatron_ext.harness.template import COMPACT
from megatron_ext.process import log_tail
from megatron_ext.rollout.driver import DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import Sampling
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers.driving import spec, walk_on
from tests.helpers.scripted import ScriptedAddress, small_codec


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    assert small_codec(folder).template == COMPACT
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def driver(folder: Path, tokenizer: Path) -> Iterator[DriverProcess]:
    process = DriverProcess(spec(folder))
    process.open(ScriptedAddress(tokenizer, walk_on), tokenizer)
    yield process
    process.close()


def start(folder: Path, **changes: Any) -> tuple[DriverProcess, int]:
    """A driver of a test's own, and its pid."""
    before = children(os.getpid(), "driver_process:serve")
    driver = DriverProcess(spec(folder, **changes))
    (pid,) = set(children(os.getpid(), "driver_process:serve")) - set(before)
    return driver, pid


def order(name: str, samples: int = 2) -> GroupOrder:
    return GroupOrder(name, f"lease of {name}", Task("walk/train/3", "walk", 3, "train"), samples, Sampling(), True)


def collect(driver: DriverProcess, count: int, seconds: float = 120.0) -> dict[str, GroupDone]:
    done: list[GroupDone] = []
    end = time.monotonic() + seconds
    while len(done) < count and time.monotonic() < end:
        done += driver.poll(0.5)
    assert len(done) == count
    return {group.group_id: group for group in done}


def test_groups_come_back_with_their_tokens_in_the_store(driver: DriverProcess, folder: Path) -> None:
    driver.run([order("a"), order("b", 3)])
    assert driver.tools("walk") == [], "other calls are answered while episodes run"
    done = collect(driver, 2)
    assert done["a"].meta.rewards == (2.0, 2.0) and done["b"].lease_id == "lease of b"
    batch = TrajectoryStore(folder / "store").read(Ref(done["b"].meta.ref))
    assert batch.trajectory_id == ("b/0", "b/1", "b/2")
    assert driver.poll(0.0) == []


def test_environment_calls(driver: DriverProcess) -> None:
    tasks = driver.tasks("walk", "dev", 3, start=5)
    assert [task.task_id for task in tasks] == ["walk/dev/5", "walk/dev/6", "walk/dev/7"]
    assert "go" in driver.corpus("walk", "train", 1)
    (demo,) = driver.demonstrate("walk", tasks[:1], mistake_rate=0.0, seed=1, max_turns=9)
    assert demo.success and len(demo.steps) == 3
    assert demo.steps[-1] == ("go", Observation("at 3", reward=0.125, done=True, success=True, score=1.0))


def test_a_failing_environment_is_a_status_not_an_error(tmp_path: Path, tokenizer: Path) -> None:
    driver = DriverProcess(spec(tmp_path, env_deadline_s=1.0))
    try:
        driver.open(ScriptedAddress(tokenizer, walk_on), tokenizer)
        driver.run([order("c/hang/", 1), order("c/raise/", 1), order("c", 1)])
        done = collect(driver, 3)
    finally:
        driver.close()
    assert [Status(done[name].meta.status[0]) for name in ("c/hang/", "c/raise/", "c")] == [
        Status.ENV_DEADLINE,
        Status.ENV_ERROR,
        Status.DONE,
    ]


# -- errors of the driver itself ------------------------------------------------------------------------------------
def test_an_error_in_the_child_is_one_line_here_and_a_traceback_in_its_log(tmp_path: Path) -> None:
    driver = DriverProcess(spec(tmp_path))
    try:
        with pytest.raises(DriverError) as caught:
            driver.tasks("chess", "train", 1)
        message = str(caught.value)
        assert "rollout driver (pid" in message and "no environment 'chess'; configured are: walk" in message
        assert str(tmp_path / "logs" / "driver.log") in message and "\n" not in message
        assert "Traceback" in (tmp_path / "logs" / "driver.log").read_text()
        with pytest.raises(DriverError, match="ended with code 1"):  # and it stays an error
            driver.tasks("walk", "train", 1)
    finally:
        driver.close()


def test_running_before_an_engine_is_there_is_named(tmp_path: Path) -> None:
    driver = DriverProcess(spec(tmp_path))
    with pytest.raises(DriverError, match="run before open: no engine is connected"):
        driver.run([order("a")])
    driver.close()


def test_a_dead_driver_is_an_error_and_closing_it_is_not(tmp_path: Path, tokenizer: Path) -> None:
    driver, pid = start(tmp_path)
    driver.open(ScriptedAddress(tokenizer, walk_on), tokenizer)
    driver.run([order("a/hang/", 1)])
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(DriverError, match=rf"rollout driver \(pid {pid}\) ended with code -9; log .*driver.log"):
        driver.poll(120.0)
    assert time.monotonic() - began < 60.0, "noticed at once, not at the deadline"
    driver.close()


def test_a_call_has_a_deadline(tmp_path: Path) -> None:
    driver, pid = start(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DriverError, match=r"rollout driver \(pid \d+\): no answer to 'tools' within 0 s"):
            driver.tools("walk", timeout=0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
        driver.close()


def test_closing_ends_the_workers_too(tmp_path: Path) -> None:
    driver, pid = start(tmp_path, env_workers=2)
    workers = children(pid, "")
    assert len(workers) == 2
    driver.close()
    gone([pid, *workers])


# -- the parent's end -----------------------------------------------------------------------------------------------
PARENT = """
import sys, time
from pathlib import Path
from megatron_ext.rollout.driver_process import DriverProcess
from tests.helpers.scripted import ScriptedAddress
from tests.helpers.driving import spec, walk_on
from tests.rollout.test_process import order

if __name__ == "__main__":
    folder, tokenizer = Path(sys.argv[1]), Path(sys.argv[2])
    driver = DriverProcess(spec(folder, env_workers=2, env_deadline_s=600.0))
    driver.open(ScriptedAddress(tokenizer, walk_on), tokenizer)
    driver.run([order("a/hang/", 2)])
    print("running", flush=True)
    time.sleep(600)
"""


def test_kill_9_of_the_parent_ends_driver_and_workers(tmp_path: Path, tokenizer: Path, root: Path) -> None:
    """Also while environments hang and the driver reads no pipe (here: stopped): only the kernel's signal arrives."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(root)}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), str(tokenizer)],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "running\n"
        (driver,) = children(parent.pid, "driver_process:serve")
        workers = wait_for(lambda: children(driver, ""), 2)
        os.kill(driver, signal.SIGSTOP)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    gone([driver, *workers])


def test_what_asks_to_stop_is_left_to_the_parent(driver: DriverProcess) -> None:
    """A terminal or a scheduler sends it to all processes: driver and workers go on, and the parent decides."""
    driver.run([order("before", 1)])
    collect(driver, 1)  # driver and workers are up: what is still starting has no handlers yet
    (pid,) = children(os.getpid(), "driver_process:serve")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for process in (pid, *children(pid, "")):
            os.kill(process, number)
    driver.run([order("after", 1)])
    assert collect(driver, 1)["after"].meta.success == (True,)


# -- logs -----------------------------------------------------------------------------------------------------------
def test_log_tails(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path) == "(no log)"
    path.write_text("")
    assert log_tail(path) == "(empty log)"
    path.write_bytes("\n".join(f"line {i}" for i in range(40)).encode() + b"\xff")
    assert log_tail(path, 2).splitlines()[0] == "line 38"


# -- helpers --------------------------------------------------------------------------------------------------------
def children(pid: int, command: str) -> list[int]:
    """Running child processes whose command line holds ``command``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            line = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and command in line:
            found.append(int(stat.parent.name))
    return found


def wait_for(look: Callable[[], list[int]], count: int, seconds: float = 60.0) -> list[int]:
    end = time.monotonic() + seconds
    while len(found := look()) < count and time.monotonic() < end:
        time.sleep(0.02)
    assert len(found) == count
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int]) -> None:
    end = time.monotonic() + 60.0
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
