"""Rewards that take time, and rewards that never come: invariants 5 and 6 of ``megatron_ext/rollout/driver.py``."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.environments.pool import EnvironmentPool
from megatron_ext.environments.protocol import Action, Observation
from megatron_ext.harness.template import ChatCodec
from megatron_ext.harness.text import TextHarness
from megatron_ext.rewards import compose
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import Success
from megatron_ext.rewards.protocol import Episode, RewardValue
from megatron_ext.rollout.driver import Driver, GroupDone, GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling
from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers.driving import spec
from tests.helpers.judge_server import Say, judge_server
from tests.helpers.scripted import Script, ScriptedAddress, ScriptedClient, answer, small_codec
from tests.helpers.worlds import WALK, Walk

ROLES = {"D": 0, "E": 1, "N": 2, "R": 3}
NOVELTY: dict[str, Any] = {
    "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
    "judge": {
        "_target_": "megatron_ext.rewards.rule_judge.NoveltyJudge",
        "new": "E",
        "repeated": "R",
        "unchanged": "N",
    },
    "labels": ROLES,
    "default": "N",
    "before": None,
    "state": True,
    "weight": 0.0,
}


class Later:
    """A slow part whose answers the test gives, by sample of the episode (the order of starting)."""

    written_labels = frozenset({"role"})

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self.out: list[tuple[Episode, Future[RewardValue]]] = []

    def __call__(self, episode: Episode) -> RewardValue:
        return self.start(episode).result(self.deadline_s)

    def start(self, episode: Episode) -> Future[RewardValue]:
        self.out.append((episode, Future()))
        return self.out[-1][1]

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    with EnvironmentPool({"walk": WALK}, workers=1, deadline_s=60.0, log_dir=tmp_path_factory.mktemp("logs")) as made:
        yield made


Make = Callable[..., tuple[Driver, ScriptedClient]]


@pytest.fixture
def make(codec: ChatCodec, pool: EnvironmentPool, tmp_path: Path) -> Iterator[Make]:
    made: list[tuple[Driver, ScriptedClient]] = []

    def build(rewards: RewardSet, script: Script = lambda session, turn: "go", concurrency: int = 8) -> Any:
        client = ScriptedClient(codec, script)
        driver = Driver(
            pool=pool,
            client=client,
            codec=codec,
            harness=TextHarness(),
            rewards=rewards,
            store=TrajectoryStore(tmp_path / "store"),
            limits=EpisodeLimits(max_turns=8, max_context=120, max_new_tokens=16),
            concurrency=concurrency,
            run_seed=11,
            engine_deadline_s=30.0,
        )
        made.append((driver, client))
        return made[-1]

    yield build
    for driver, client in made:
        driver.close()
        client.close()


def order(number: int, samples: int) -> GroupOrder:
    task = Task(f"walk/train/{number}", "walk", number, "train")
    return GroupOrder(f"g{number}", f"lease-{number}", task, samples, Sampling(), True)


def step_until(driver: Driver, reached: Callable[[], bool], seconds: float = 60.0) -> list[GroupDone]:
    end, done = time.monotonic() + seconds, list[GroupDone]()
    while not reached():
        assert time.monotonic() < end, "it did not get there"
        done += driver.step(0.02)
    return done


def finish(driver: Driver) -> dict[str, GroupDone]:
    return {group.group_id: group for group in step_until(driver, lambda: not driver.busy)}


def stored(tmp_path: Path, done: GroupDone) -> TrajectoryBatch:
    return TrajectoryStore(tmp_path / "store").read(Ref(done.meta.ref))


def test_waiting_for_a_reward_holds_nothing(make: Make) -> None:  # invariant 5
    """With one slot, every episode is played while no reward has come; groups end as their rewards do."""
    later = Later()
    driver, client = make(RewardSet([RewardPart("late", later)]), concurrency=1)
    driver.submit([order(0, 2), order(1, 1)])
    assert step_until(driver, lambda: len(later.out) == 3 and len(client.ended) == 3) == []
    assert sorted(client.ended) == ["g0/0", "g0/1", "g1/0"] and driver.busy
    for episode, future in later.out:
        if episode.task.seed == 1:
            future.set_result(RewardValue(0.5))
    assert [group.group_id for group in driver.step(60.0)] == ["g1"]
    for _, future in later.out[:2]:
        future.set_result(RewardValue(1.0))
    done = finish(driver)
    assert done["g0"].meta.rewards == (1.0, 1.0) and done["g0"].problems == ()


def test_evaluation_asks_no_part_that_waits(make: Make) -> None:
    later = Later()
    driver, _ = make(RewardSet([RewardPart("late", later), RewardPart("success", Success())]))
    driver.submit([replace(order(0, 2), store=False), order(1, 1)])
    done = step_until(driver, lambda: len(later.out) == 1)
    while not done:
        done += driver.step(0.05)
    assert done[0].group_id == "g0" and done[0].meta.rewards == (1.0, 1.0) and done[0].problems == ()
    later.out[0][1].set_result(RewardValue(0.5))
    assert finish(driver)["g1"].meta.rewards == (1.5,)
    assert len(later.out) == 1
    only = RewardSet([RewardPart("late", Later())]).quick()
    assert only.parts == () and only(later.out[0][0]).total == 0.0


def test_a_reward_wakes_the_driver(make: Make) -> None:  # invariant 5
    later = Later()
    driver, _ = make(RewardSet([RewardPart("late", later)]))
    driver.submit([order(0, 1)])
    step_until(driver, lambda: len(later.out) == 1)
    driver.step(0.0)
    timer = threading.Timer(0.1, lambda: later.out[0][1].set_result(RewardValue(1.0)))
    began = time.monotonic()
    timer.start()
    while not driver.step(60.0):
        pass
    assert time.monotonic() - began < 30.0


def test_a_reward_that_is_late_is_missing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # invariants 4 and 5
    monkeypatch.setattr(compose, "GRACE_S", 0.0)
    later = Later(deadline_s=0.3)
    driver, _ = make(RewardSet([RewardPart("late", later), RewardPart("success", Success())]))
    driver.submit([order(0, 2)])
    found = finish(driver)["g0"]
    assert found.meta.rewards == (1.0, 1.0) and found.meta.status == (int(Status.DONE),) * 2
    assert found.problems == ("reward 'late' of task 'walk/train/0' is missing: no answer within 0.3 s",) * 2
    assert np.isnan(stored(tmp_path, found).reward_parts["late"]).all()
    later.out[0][1].set_result(RewardValue(1.0))  # too late for anything
    assert driver.step(0.0) == []


def test_missing_parts_are_neutral_in_their_group(make: Make, tmp_path: Path) -> None:  # invariant 6
    """Sample 3 fails in its environment: it has no part either, and informs no mean."""
    later = Later()
    rewards = RewardSet([RewardPart("late", later, weight=2.0), RewardPart("success", Success())])
    script = {"g0/1": "stop", "g0/3": "raise"}
    driver, _ = make(rewards, lambda session, turn: script.get(session, "go"))
    driver.submit([order(0, 4)])
    step_until(driver, lambda: len(later.out) == 3)
    answers = {True: [RewardValue(0.5, {"role": [2, -1, 0]}), RewardValue(missing=True, why="silent")], False: []}
    answers[False] = [RewardValue(0.25, {"role": [7]})]
    for episode, future in later.out:
        future.set_result(answers[episode.last.success].pop(0))
    found = finish(driver)["g0"]
    batch = stored(tmp_path, found)
    late = batch.reward_parts["late"].tolist()
    (gone,) = [j for j in range(3) if math.isnan(late[j])]
    kept = ({0, 2} - {gone}).pop()
    assert late[1] == 0.5 and late[kept] == 1.0 and late[3] == 0.0 and not batch.trainable()[3]
    assert found.meta.rewards[1] == 0.5 and found.meta.rewards[kept] == 2.0
    assert found.meta.rewards[gone] == 1.0 + 0.75 and found.meta.rewards[3] == 0.0
    assert batch.reward.tolist() == list(found.meta.rewards)
    assert sum("'late' of task 'walk/train/0' is missing: silent" in p for p in found.problems) == 1
    model, owner = batch.turn_role == Role.MODEL, batch.turn_trajectory()
    labels = {j: batch.turn_labels["role"][model & (owner == j)].tolist() for j in range(4)}
    assert labels[kept] == [2, -1, 0] and labels[1] == [7] and labels[gone] == [-1, -1, -1]
    assert (batch.turn_labels["role"][~model] == -1).all()


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda future: future.set_exception(KeyError("gold")), "raised KeyError: 'gold'"),
        (lambda future: future.set_result(RewardValue(math.inf)), "is inf, not finite"),
        (lambda future: future.set_result(RewardValue(1.0, {"role": [1]})), "gives 1 labels 'role' for 3 steps"),
        (lambda future: future.set_result(RewardValue(1.0, {"role": [1, 2, -2]})), "the value -2"),
        (lambda future: future.set_result(1.0), "answered with float, not a RewardValue"),
    ],
)
def test_a_broken_slow_reward_masks_its_trajectory(
    make: Make, give: Callable[[Future[RewardValue]], None], says: str
) -> None:
    later = Later()
    driver, _ = make(RewardSet([RewardPart("late", later)]))
    driver.submit([order(0, 2)])
    step_until(driver, lambda: len(later.out) == 2)
    give(later.out[0][1])
    later.out[1][1].set_result(RewardValue(1.0))
    found = finish(driver)["g0"]
    assert sorted(found.meta.status) == [int(Status.DONE), int(Status.REWARD_INVALID)]
    assert len(found.problems) == 1 and says in found.problems[0]


def test_a_served_judge_that_dies_in_the_middle(make: Make, tmp_path: Path) -> None:
    """Real requests beside real episodes: who was judged before keeps it, the others have no value, nobody a zero."""
    with judge_server(lambda number, body: Say("D") if number < 3 else Say(status=500)) as server:
        node: Mapping[str, Any] = {
            "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
            "judge": {
                "_target_": "megatron_ext.rewards.model_judge.ModelJudge",
                "base_url": server.base_url,
                "model": "m",
                "attempts": 2,
                "backoff_s": 0.01,
                "deadline_s": 60.0,
                "concurrency": 1,
                "cache": 0,
            },
            "labels": ROLES,
            "default": "N",
            "values": {"D": 1.0},
        }
        rewards = RewardSet.from_config({"roles": node})
        driver, _ = make(rewards)
        driver.submit([order(0, 2)])
        found = finish(driver)["g0"]
    batch = stored(tmp_path, found)
    assert sorted(np.nan_to_num(batch.reward_parts["roles"], nan=-1.0).tolist()) == [-1.0, 3.0]
    assert found.meta.rewards == (3.0, 3.0) and found.meta.status == (int(Status.DONE),) * 2
    assert found.rewards["judge/asked"] == 6 and found.rewards["judge/failed"] == 3
    assert found.rewards["judge/calls"] == len(server.requests) == 3 + 3 * 2
    assert len(found.problems) == 1 and "3 of 3 steps have no answer" in found.problems[0]


def test_labels_of_a_rule_through_a_driver_process(tmp_path: Path) -> None:
    """What the configuration names reaches the record in the store, and the counts the trainer."""
    tokenizer = tmp_path / "tokenizer"
    small_codec(tokenizer)
    rewards = {"success": {"_target_": "megatron_ext.rewards.outcome.Success"}, "roles": NOVELTY}
    driver = DriverProcess(spec(tmp_path, rewards=rewards))
    try:
        driver.open(ScriptedAddress(tokenizer, go_then_fly), tokenizer)
        driver.run([order(0, 2)])
        end, done = time.monotonic() + 60.0, list[GroupDone]()
        while not done and time.monotonic() < end:
            done = driver.poll(1.0)
    finally:
        driver.close()
    (found,) = done
    batch = stored(tmp_path, found)
    said = batch.turn_labels["role"][batch.turn_role == Role.MODEL].reshape(2, 4)
    assert said.tolist() == [[ROLES["E"], ROLES["N"], ROLES["E"], ROLES["E"]]] * 2
    assert batch.reward_parts["roles"].tolist() == [0.0, 0.0] and found.meta.rewards == (1.0, 1.0)
    assert found.rewards["judge/label/role/E"] == 6 and found.rewards["judge/label/role/N"] == 2


def go_then_fly(session: str, turn: int) -> str:
    return "fly" if turn == 1 else "go"


class Naming(Walk):
    """A walk that labels its own actions."""

    def step(self, action: Action) -> Observation:
        return replace(super().step(action), labels={"role": 5})


def test_environment_and_judge_cannot_label_alike(codec: ChatCodec) -> None:
    """Neither overwrites the other: the trajectory is masked, and both are named."""
    walk = Naming(length=1)
    run = EpisodeRun(
        episode_id="g0/0",
        task=Task("walk/train/0", "walk", 0, "train"),
        sample=0,
        seed=1,
        sampling=Sampling(),
        limits=EpisodeLimits(max_turns=8, max_context=120, max_new_tokens=16),
        harness=TextHarness(),
        codec=codec,
        rewards=RewardSet.from_config({"roles": NOVELTY}),
    )
    request = run.on_reset(walk.reset(0), walk.state_hash())
    assert request is not None and run.on_tokens(answer(codec, request, "go")) == "go"
    run.on_step(walk.step("go"), walk.state_hash())
    assert run.finished is not None and run.finished.status is Status.REWARD_INVALID
    assert run.counts.reward_problem == "a reward part labels turns as 'role', which environment 'walk' does"
    assert not run.finished.batch.loss_mask.any()
