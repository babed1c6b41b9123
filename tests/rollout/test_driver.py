"""Invariants of the rollout driver (numbers refer to ``megatron_ext/rollout/driver.py``).

Environments run in real worker processes, tokens go to a real store. The engine is a script player
(``tests/helpers/scripted.py``): what is tested is the driver's own state machine, and the script decides its timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.environments.pool import EnvironmentPool
from megatron_ext.environments.protocol import ToolCall
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.harness.text import TextHarness
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import Success
from megatron_ext.rewards.protocol import Reward
from megatron_ext.rollout.driver import Driver, DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.episode import EpisodeLimits, Sampling, sampling_seed
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers.errands import ERRANDS
from tests.helpers.scripted import Script, ScriptedClient, small_codec
from tests.helpers.worlds import WALK, NotANumber

# How long a call may take: one that hangs is not waited for long, any other as long as a loaded machine needs.
HASTY_S, PATIENT_S = 1.0, 60.0


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    environments: Mapping[str, Mapping[str, Any]] = {"walk": WALK, "long": {**WALK, "length": 6}, "errands": ERRANDS}
    logs = tmp_path_factory.mktemp("logs")
    with EnvironmentPool(environments, workers=2, deadline_s=PATIENT_S, log_dir=logs) as made:
        yield made


@pytest.fixture(scope="module")
def hasty_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    logs = tmp_path_factory.mktemp("logs")
    with EnvironmentPool({"walk": WALK}, workers=2, deadline_s=HASTY_S, log_dir=logs) as made:
        yield made


Make = Callable[..., tuple[Driver, ScriptedClient]]


@pytest.fixture
def make(request: pytest.FixtureRequest, codec: ChatCodec, tmp_path: Path) -> Iterator[Make]:
    hangs = hasattr(request.node, "callspec") and request.node.callspec.params.get("trouble") == "hang"
    pool: EnvironmentPool = request.getfixturevalue("hasty_pool" if hangs else "pool")
    clients: list[ScriptedClient] = []

    def build(
        script: Script = lambda session, turn: "go",
        *,
        concurrency: int = 16,
        reward: Reward | None = None,
        limits: EpisodeLimits | None = None,
        harness: Harness | None = None,
        engine_deadline_s: float = 30.0,
        **client: Any,
    ) -> tuple[Driver, ScriptedClient]:
        clients.append(ScriptedClient(codec, script, **client))
        driver = Driver(
            pool=pool,
            client=clients[-1],
            codec=codec,
            harness=harness or TextHarness(),
            rewards=RewardSet([RewardPart("reward", reward or Success())]),
            store=TrajectoryStore(tmp_path / "store"),
            limits=limits or EpisodeLimits(max_turns=8, max_context=120, max_new_tokens=16),
            concurrency=concurrency,
            run_seed=11,
            engine_deadline_s=engine_deadline_s,
        )
        return driver, clients[-1]

    yield build
    for client in clients:
        for asked in client.requests:  # a test may stop in the middle; the pool is shared
            pool.release(asked.session_id)
        client.close()


def order(number: int, samples: int = 2, *, environment: str = "walk", store: bool = True, **data: Any) -> GroupOrder:
    task = Task(f"walk/train/{number}", environment, number, "train", data)
    return GroupOrder(f"g{number}", f"lease-{number}", task, samples, Sampling(), store)


def run(driver: Driver, seconds: float = 120.0) -> dict[str, GroupDone]:
    """Steps until nothing is left; every group once."""
    done: dict[str, GroupDone] = {}
    end = time.monotonic() + seconds
    while driver.busy:
        assert time.monotonic() < end, f"the driver is still busy; finished: {sorted(done)}"
        for group in driver.step(0.05):
            assert group.group_id not in done, "answered twice"
            done[group.group_id] = group
    assert driver.step(0.0) == []
    return done


def test_every_order_is_answered_once(make: Make, tmp_path: Path) -> None:  # invariant 1
    driver, client = make(lambda session, turn: "stop" if session == "g1/0" and turn == 1 else "go", version=9)
    orders = [order(number, samples=1 + number % 3, store=number != 2) for number in range(6)]
    driver.submit(orders)
    assert driver.busy
    done = run(driver)
    assert sorted(done) == [o.group_id for o in orders]
    store = TrajectoryStore(tmp_path / "store")
    for o in orders:
        found = done[o.group_id]
        meta = found.meta
        assert found.lease_id == o.lease_id and found.seconds > 0 and found.problems == ()
        assert len(meta.tokens) == o.samples and meta.min_version == meta.max_version == 9
        assert meta.success == tuple((o.group_id, s) != ("g1", 0) for s in range(o.samples))
        assert meta.rewards == tuple(float(success) for success in meta.success)
        if not o.store:
            assert meta.ref == ""
            continue
        batch = store.read(Ref(meta.ref))
        assert batch.group_id == (o.group_id,) and batch.task_id == (o.task.task_id,)
        assert batch.trajectory_id == tuple(f"{o.group_id}/{s}" for s in range(o.samples))
        assert batch.sample.tolist() == list(range(o.samples)), "samples stand in order, whichever ended first"
        assert np.diff(batch.trajectory_tokens()).tolist() == list(meta.tokens)
    assert len(store.list()) == 5, "an order that keeps no tokens leaves none behind"
    episodes = sorted(f"{o.group_id}/{s}" for o in orders for s in range(o.samples))
    assert sorted(client.ended) == episodes, "the engine may free every session, once"


def test_sessions_of_an_episode(make: Make, tmp_path: Path) -> None:
    """A sub-agent's dialogue and those behind a compression are sessions of the engine, each ended once, in time."""
    harness = ToolHarness(show_schema=False, context_budget=130)
    calls = {
        0: ToolCall("send", {"number": 1}),
        1: ToolCall("look", {"number": 1}),
        2: ToolCall("report", {"word": "word " * 60}),
        4: ToolCall("finish", {"word": "x"}),
    }

    def say(session: str, turn: int) -> str:
        return harness.render(calls[turn]) if turn in calls else "at 3"

    driver, client = make(say, harness=harness, limits=EpisodeLimits(8, 600, 300))
    driver.submit([order(number, 2, environment="errands") for number in range(2)])
    done = run(driver)
    for group, result in done.items():
        batch = TrajectoryStore(tmp_path / "store").read(Ref(result.meta.ref))
        assert batch.session_kind.tolist() == [0, 2, 1, 0] * 2, group
        assert (result.sessions.sessions, result.sessions.compressions, result.sessions.subagents) == (8, 2, 2)
        assert result.malformed == 0 and set(result.meta.status) == {int(Status.DONE)}
    names = {f"{group}/{s}{more}" for group in done for s in range(2) for more in ("", "~1", "~2")}
    assert {request.session_id for request in client.requests} == names
    assert sorted(client.ended) == sorted(names)
    for name in names:  # the parent's own session ends with its compression
        sent = [int(r.request_id.rpartition("#")[2]) for r in client.requests if r.session_id == name]
        assert sent == {"": [0, 3], "~1": [1, 2], "~2": [4]}[name[name.find("~") :] if "~" in name else ""]


def test_seeds_are_those_of_the_sample(make: Make) -> None:
    driver, client = make()
    driver.submit([order(0, 2), order(1, 1)])
    run(driver)
    for request in client.requests:
        group, _, sample = request.session_id.partition("/")
        assert request.sampling.seed == sampling_seed(11, group, int(sample))


def test_at_most_concurrency_episodes_in_order(
    make: Make, pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:  # invariant 2
    begun: list[str] = []
    running: set[str] = set()
    most = 0
    reset, release = pool.reset, pool.release

    def start(episode: str, task: Task) -> None:
        nonlocal most
        begun.append(episode)
        running.add(episode)
        most = max(most, len(running))
        reset(episode, task)

    def end(episode: str) -> None:
        running.remove(episode)
        release(episode)

    driver, _ = make(lambda session, turn: "stop" if session.endswith("/1") else "go", concurrency=3)
    monkeypatch.setattr(pool, "reset", start)
    monkeypatch.setattr(pool, "release", end)
    driver.submit([order(number, 3) for number in range(4)])
    run(driver)
    monkeypatch.undo()
    assert begun == [f"g{g}/{s}" for g in range(4) for s in range(3)]
    assert most == 3 and not running


@pytest.mark.parametrize(
    ("trouble", "status", "problem"),
    [
        ("raise", Status.ENV_ERROR, "the walk broke down"),
        ("die", Status.ENV_ERROR, "its worker died (killed by signal 9)"),
        ("hang", Status.ENV_DEADLINE, "took longer than 1 s"),
    ],
)
@pytest.mark.parametrize("when", ["reset", "step"])
def test_a_failing_environment_fails_its_trajectory_alone(
    make: Make, tmp_path: Path, trouble: str, status: Status, problem: str, when: str
) -> None:  # invariant 3
    driver, _ = make(lambda session, turn: trouble if (session, turn) == ("g0/1", 1) and when == "step" else "go")
    if when == "step":
        orders = [order(0, 3), order(1, 2), order(2, 2)]
    else:
        orders = [order(0, 1, on_reset=trouble), order(1, 2), order(2, 2)]
    driver.submit(orders)
    done = run(driver)
    bad = 1 if when == "step" else 0
    found = done["g0"]
    assert [Status(s) for s in found.meta.status].count(status) == 1 and found.meta.status[bad] == int(status)
    assert len(found.problems) == 1 and problem in found.problems[0] and "environment 'walk'" in found.problems[0]
    assert found.meta.trained_tokens[bad] == 0 and found.meta.rewards[bad] == 0.0 and not found.meta.success[bad]
    others = [s for i, s in enumerate(found.meta.success) if i != bad]
    assert all(others) and all(done["g1"].meta.success) and all(done["g2"].meta.success)
    assert done["g1"].problems == ()
    batch = TrajectoryStore(tmp_path / "store").read(Ref(found.meta.ref))
    assert batch.trainable().tolist() == [i != bad for i in range(len(batch.status))]


def test_rewards_that_are_no_number_are_counted(make: Make) -> None:  # invariant 3
    driver, _ = make(reward=NotANumber())
    driver.submit([order(0, 1), order(1, 2)])
    done = run(driver)
    assert [Status(s) for s in done["g0"].meta.status] == [Status.DONE]
    assert [Status(s) for s in done["g1"].meta.status] == [Status.REWARD_INVALID] * 2
    assert len(done["g1"].problems) == 2 and "reward 'reward' of task 'walk/train/1'" in done["g1"].problems[0]


def test_malformed_turns_and_refused_actions_are_counted(make: Make) -> None:
    said = {"g0/0": ["", "fly", "go", "go", "go"], "g0/1": ["go", "", "", "stop"], "g1/0": ["go"] * 3}
    driver, _ = make(lambda session, turn: said[session][turn])
    driver.submit([order(0, 2), order(1, 1)])
    done = run(driver)
    assert (done["g0"].malformed, done["g0"].invalid_actions) == (3, 1)
    assert (done["g1"].malformed, done["g1"].invalid_actions) == (0, 0)
    assert done["g0"].meta.turns == (5, 4) and done["g0"].meta.success == (True, False)


def test_a_trajectory_that_fills_the_context(make: Make, tmp_path: Path) -> None:
    driver, _ = make(lambda session, turn: "talk 400" if turn == 1 else "go")
    driver.submit([order(0, 1)])
    done = run(driver)
    assert [Status(s) for s in done["g0"].meta.status] == [Status.MAX_CONTEXT]
    assert done["g0"].meta.total_tokens <= 120 and done["g0"].meta.trained_tokens[0] > 0


def test_two_environments_side_by_side(make: Make) -> None:
    driver, _ = make()
    driver.submit([order(0, 1, environment="long"), order(1, 1)])
    done = run(driver)
    assert done["g0"].meta.turns == (6,) and done["g1"].meta.turns == (3,)


def test_orders_while_others_run(make: Make) -> None:
    driver, client = make(hold=True)
    driver.submit([order(0, 2)])
    while len(client.waiting) < 2:
        driver.step(0.05)
    with pytest.raises(DriverError, match="group 'g0' is already running"):
        driver.submit([order(0, 2)])
    driver.submit([order(1, 1)])
    while len(client.waiting) < 3:
        assert driver.step(0.05) == []
    client.release()
    assert sorted(run(driver)) == ["g0", "g1"]
    driver.submit([order(0, 1)])  # a finished group's name is free again
    assert sorted(run(driver)) == ["g0"]


def test_a_silent_engine_is_named(make: Make) -> None:  # invariant 4
    driver, client = make(hold=True, engine_deadline_s=1.0)
    driver.submit([order(0, 2)])
    while len(client.waiting) < 2:
        driver.step(0.05)
    start = time.monotonic()
    with pytest.raises(DriverError, match=r"engine answered none of 2 requests for 1 s \(first: g0/\d#0\)"):
        while time.monotonic() - start < 60:
            driver.step(0.05)


def test_step_does_not_block_past_its_timeout(make: Make) -> None:
    driver, _ = make(hold=True)
    driver.submit([order(0, 1)])
    start = time.monotonic()
    for _ in range(5):
        driver.step(0.05)
    assert time.monotonic() - start < 10.0, "five times 0.05 s; whatever it could wait for would come after 30 s"


def test_an_unknown_environment_is_named(make: Make) -> None:
    driver, _ = make()
    driver.submit([order(0, 1, environment="chess")])
    with pytest.raises(ValueError, match="no environment 'chess'; configured are: errands, long, walk"):
        driver.step(0.05)
