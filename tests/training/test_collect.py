"""Invariants of collection (numbers refer to ``megatron_ext/training/collect.py``).

Real coordinator, journal, store, driver process and environment workers; the engine plays a script, which decides how
each group ends.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.config.schema import BatchConfig, Config, CreditConfig, FilterConfig, RolloutConfig
from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE
from megatron_ext.rollout.coordinator import State
from megatron_ext.rollout.driver import DriverError
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.journal import JournaledCoordinator, open_coordinator
from megatron_ext.rollout.sources import SequentialTasks
from megatron_ext.training.collect import DRIVER, Collector, StepGroups, take
from megatron_ext.training.interrupt import Interrupted
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.measures.step_metrics import rollout_metrics
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers import driving
from tests.helpers.scripted import Script, ScriptedAddress, small_codec

TASKS = [Task(f"walk/train/{i}", "walk", i, "train") for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    small_codec(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[DriverProcess]:
    """One process for the module; each test opens the script it wants."""
    process = DriverProcess(driving.spec(folder, concurrency=32))
    yield process
    process.close()


@dataclass
class Bench:
    collector: Collector
    coordinator: JournaledCoordinator
    store: TrajectoryStore
    progress: list[int]
    config: Config
    own_signal: bool

    def collect(self, number: int) -> StepGroups:
        """Rank 0 offers, and it takes, being alone."""
        offer = self.collector.offer(number)
        reports = self.collector.reports
        return take(offer, self.config, self.store, own_signal=self.own_signal, reports=reports)

    def step(self, number: int) -> StepGroups:
        """Collects and consumes, as the loop does."""
        groups = self.collect(number)
        self.coordinator.consume(number + 1, groups.train, groups.filtered)
        return groups


Open = Callable[..., Bench]


@pytest.fixture
def bench(driver: DriverProcess, folder: Path, tokenizer: Path, tmp_path: Path) -> Iterator[Open]:
    opened: list[JournaledCoordinator] = []
    store = TrajectoryStore(folder / "store")  # that of the driver: it writes, the trainer reads
    for ref in store.list():  # of the tests before this one
        store.delete(ref)

    def make(
        script: Script,
        *,
        check: Callable[[], None] = lambda: None,
        own_signal: bool = False,
        samples: int = 3,
        tasks: int = 2,
        draw_limit: float = 3.0,
        permute: bool = False,
        lease_deadline_s: float = 60.0,
        of: DriverProcess = driver,
        available: Callable[[GroupMeta], bool] = lambda meta: True,
    ) -> Bench:
        of.open(ScriptedAddress(tokenizer, script), tokenizer)
        config = Config(
            batch=BatchConfig(tasks_per_step=tasks, trajectories_per_task=samples),
            credit=CreditConfig(filter=FilterConfig(draw_limit=draw_limit)),
            rollout=RolloutConfig(lease_deadline_s=lease_deadline_s),
        )
        config.control.permute_rewards = permute
        coordinator = open_coordinator(tmp_path / "journal.jsonl")
        opened.append(coordinator)
        coordinator.resume(0, available)
        progress: list[int] = []
        collector = Collector(
            config,
            coordinator,
            SequentialTasks(TASKS),
            of,
            store,
            own_signal=own_signal,
            check=check,
            progress=progress.append,
        )
        return Bench(collector, coordinator, store, progress, config, own_signal)

    yield make
    for coordinator in opened:
        coordinator.close()


def ids(*numbers: int) -> tuple[str, ...]:
    return tuple(f"g{number:07d}" for number in numbers)


# -- steps ----------------------------------------------------------------------------------------------------------
def test_a_step_is_its_groups_in_the_order_they_were_added(bench: Open) -> None:  # invariants 1 and 4
    b = bench(driving.first_sample_stops, tasks=4)
    first = b.collect(0)
    assert first.train == ids(0, 1, 2, 3) and first.filtered == ()
    finished = [meta.group_id for meta in b.coordinator.ready()]
    assert finished != list(first.train), "the short groups finished first"
    assert first.batch is not None and first.batch.group_id == first.train
    assert first.batch.task_id == tuple(task.task_id for task in TASKS[:4])
    assert first.batch.success.tolist() == [False, True, True] * 4
    assert [done.group_id for done in first.drawn] == [meta.group_id for meta in first.metas] == list(first.train)
    for meta in first.metas:
        group = b.coordinator.state.groups[meta.group_id]
        assert group.state is State.FINISHED and group.attempts == 0
    counts = b.coordinator.counts()
    assert (counts.leased, counts.queued, counts.finished, counts.refused) == (0, 0, 4, 0)
    assert b.progress[-1] == 4 and b.progress == sorted(b.progress)


def test_steps_take_every_group_once(bench: Open) -> None:  # invariant 1
    b = bench(driving.odd_groups_are_constant, tasks=2)
    taken: Counter[str] = Counter()
    for number in range(4):
        groups = b.step(number)
        assert len(groups.train) == 2 and groups.batch is not None and groups.batch.num_groups == 2
        taken.update(groups.train)
        taken.update(group for group, _ in groups.filtered)
        assert {m.group_id for m in groups.metas} == {*groups.train, *(g for g, _ in groups.filtered)}
    assert set(taken.values()) == {1}
    counts = b.coordinator.counts()
    assert counts.consumed == 8 and counts.consumed + counts.filtered + counts.finished == counts.draws


def test_constant_groups_are_filtered_and_replaced(bench: Open) -> None:
    b = bench(driving.odd_groups_are_constant, tasks=2)
    groups = b.collect(0)
    assert groups.train == ids(0, 2) and groups.filtered == ((ids(1)[0], CONSTANT),)
    assert [meta.group_id for meta in groups.metas] == list(ids(0, 1, 2))
    assert b.coordinator.counts().draws == 3, "what was missing, and no more"
    metrics = rollout_metrics(groups, seconds=2.0)
    assert (metrics["filter/groups_drawn"], metrics["filter/groups_kept"], metrics["filter/groups_constant"]) == (
        3,
        2,
        1,
    )
    assert metrics["filter/groups_all_success"] == 1 and metrics["filter/groups_all_failure"] == 0


def test_an_edit_with_a_signal_of_its_own_keeps_constant_groups(bench: Open) -> None:
    groups = bench(driving.odd_groups_are_constant, tasks=2, own_signal=True).collect(0)
    assert groups.train == ids(0, 1) and groups.filtered == ()


@pytest.mark.parametrize(("limit", "draws"), [(3.0, 6), (1.0, 2), (2.4, 4)])
def test_the_draw_limit_ends_a_step(bench: Open, limit: float, draws: int) -> None:  # invariant 2
    b = bench(driving.all_groups_are_constant, tasks=2, draw_limit=limit)
    groups = b.step(0)
    assert groups.train == () and groups.batch is None
    assert [group for group, _ in groups.filtered] == list(ids(*range(draws)))
    assert b.coordinator.counts().draws == draws
    assert b.step(1).train == () and b.coordinator.counts().draws == 2 * draws, "each step has its own limit"


def test_a_step_short_of_groups_trains_what_it_has(bench: Open) -> None:  # invariant 2
    groups = bench(driving.odd_groups_are_constant, tasks=4, draw_limit=1.25).collect(0)
    assert groups.train == ids(0, 2, 4) and len(groups.filtered) == 2
    assert groups.batch is not None and groups.batch.num_groups == 3


def test_a_reward_that_is_always_broken_ends_the_run(bench: Open, folder: Path) -> None:  # invariant 7
    broken = {"last": {"_target_": "megatron_ext.rewards.info.LastInfo", "key": "grounded"}}
    process = DriverProcess(driving.spec(folder, rewards=broken))
    try:
        with pytest.raises(DriverError, match=r"of the step's 6 groups has a valid reward: .*'last'.*'grounded'") as e:
            bench(driving.first_sample_stops, tasks=2, of=process).collect(0)
        assert "\n" not in str(e.value)
    finally:
        process.close()


def test_what_failed_outside_is_counted_and_not_trained(bench: Open) -> None:
    b = bench(driving.trouble_now_and_then, tasks=2)
    groups = b.collect(0)
    assert groups.train == ids(0, 2) and groups.filtered == ((ids(1)[0], UNTRAINABLE),)
    assert groups.batch is not None
    status = [Status(s) for s in groups.batch.status.tolist()]
    assert status == [Status.DONE] * 5 + [Status.ENV_ERROR]
    assert not groups.batch.loss_mask[groups.batch.token_trajectory() == 5].any()
    metrics = rollout_metrics(groups, seconds=1.0)
    assert metrics["rollout/env_errors"] == 4 and metrics["filter/groups_untrainable"] == 1
    assert metrics["rollout/trajectories"] == 9
    turns = sum(sum(meta.turns) for meta in groups.metas)
    assert metrics["rollout/malformed_fraction"] == pytest.approx(1 / turns)
    assert metrics["rollout/invalid_fraction"] == pytest.approx(1 / turns)
    assert metrics["reward/success"] == pytest.approx(3 / 5), "what failed outside says nothing about the policy"


# -- leases ---------------------------------------------------------------------------------------------------------
def test_a_result_without_a_live_lease_is_not_taken(bench: Open) -> None:  # invariant 1
    """The lease ends after the driver wrote the group: the result is refused, its data go, and the group runs again."""
    ended: list[str] = []

    def end_the_lease() -> None:
        if not ended:
            wait_for(lambda: bool(b.store.list()))
            ended.extend(b.coordinator.release(DRIVER, "test"))

    b = bench(driving.first_sample_stops, check=end_the_lease, tasks=1)
    groups = b.collect(0)
    assert ended == list(ids(0)) and groups.train == ids(0)
    assert b.coordinator.counts().refused == 1 and b.coordinator.state.groups[ids(0)[0]].attempts == 1
    assert groups.batch is not None, "the second run's data stand"
    assert len(groups.drawn) == 1


def test_a_late_result_that_equals_the_one_taken_keeps_its_data(bench: Open) -> None:
    """Files are named by their contents: deleting what a refused twin points to would delete what was taken."""

    def finish_elsewhere() -> None:
        if b.coordinator.counts().leased and not b.coordinator.state.groups[ids(0)[0]].attempts:
            wait_for(lambda: bool(b.store.list()))
            b.coordinator.release(DRIVER, "test")
            (leased,) = b.coordinator.lease("driver-1", 1, 0.0, 1e12)
            (ref,) = b.store.list()
            assert b.coordinator.finish(leased.lease_id, GroupMeta.from_batch(b.store.read(ref), ref))

    b = bench(driving.first_sample_stops, check=finish_elsewhere, tasks=1)
    groups = b.collect(0)
    assert b.coordinator.counts().refused == 1
    assert groups.train == ids(0) and groups.batch is not None


def test_a_stalled_driver_is_named_with_what_is_missing(tokenizer: Path, bench: Open, tmp_path: Path) -> None:
    """Invariant 3."""
    stalled = DriverProcess(driving.spec(tmp_path / "stalled"))
    try:
        b = bench(driving.walk_on, of=stalled, tasks=2, lease_deadline_s=0.5)
        stalled.open(ScriptedAddress(tokenizer, driving.walk_on, hold=True), tokenizer)
        began = time.monotonic()
        with pytest.raises(DriverError) as caught:
            b.collect(0)
        assert time.monotonic() - began < 60, "the deadline of the lease, not one of those behind it"
        message = str(caught.value)
        assert "2 groups not finished within rollout.lease_deadline_s=0" in message and repr(ids(0)[0]) in message
        assert b.coordinator.counts().queued == 2, "the groups wait for the next driver"
    finally:
        stalled.close()


def test_an_interrupt_comes_through(bench: Open, driver: DriverProcess) -> None:
    def stop() -> None:
        raise Interrupted

    b = bench(driving.first_sample_stops, check=stop, tasks=1)
    with pytest.raises(Interrupted):
        b.collect(0)
    assert b.coordinator.counts().leased == 1, "the journal knows that it was under way"
    wait_for(lambda: bool(driver.poll(0.1)))


def test_groups_finished_before_a_resume_are_used_again(bench: Open) -> None:
    b = bench(driving.first_sample_stops, tasks=2)
    first = b.collect(0)  # and the run ends before the step is consumed
    again = bench(driving.first_sample_stops, tasks=2)
    groups = again.collect(0)
    assert groups.train == first.train and groups.drawn == []
    assert again.coordinator.counts().draws == 2, "nothing is drawn for what is there"
    assert first.batch is not None and groups.batch is not None
    assert groups.batch.ids.tolist() == first.batch.ids.tolist()


def test_a_resumed_step_draws_no_more_than_it_would_have(bench: Open) -> None:  # invariant 5
    """The first group is under way again, so those behind it are not offered yet; they need no substitute."""
    first = bench(driving.first_sample_stops, tasks=3).collect(0)
    again = bench(driving.first_sample_stops, tasks=3, available=lambda meta: meta.group_id != ids(0)[0])
    counts = again.coordinator.counts()
    assert (counts.queued, counts.finished) == (1, 2)
    groups = again.collect(0)
    assert groups.train == first.train and [done.group_id for done in groups.drawn] == list(ids(0))
    assert again.coordinator.counts().draws == 3


def test_groups_of_undone_steps_are_played_again_step_by_step(bench: Open) -> None:
    """Invariant 5: each step plays the groups that it had played before, under the weights it starts from."""
    b = bench(driving.odd_groups_are_constant, tasks=2)
    first, second = b.step(0), b.step(1)
    drawn = b.coordinator.counts().draws
    again = bench(driving.odd_groups_are_constant, tasks=2, available=lambda meta: False)
    again.collector.play_again(drawn)
    assert again.collector.source_draws == 0 and again.coordinator.counts().queued == drawn
    groups = again.step(0)
    counts = again.coordinator.counts()
    assert (groups.train, groups.filtered) == (first.train, first.filtered)
    assert counts.finished + counts.queued == drawn - counts.consumed - counts.filtered and counts.queued > 0
    assert again.collector.source_draws == drawn - counts.queued
    assert [done.group_id for done in groups.drawn] == [meta.group_id for meta in groups.metas], "all played anew"
    groups = again.step(1)
    assert (groups.train, groups.filtered) == (second.train, second.filtered)
    assert again.coordinator.counts().queued == 0 and again.coordinator.counts().draws == drawn
    again.step(2)
    assert again.coordinator.counts().draws > drawn, "behind the journal the source goes on"


def test_a_source_that_draws_other_tasks_the_second_time_is_told(bench: Open) -> None:
    bench(driving.first_sample_stops, tasks=2).step(0)
    again = bench(driving.first_sample_stops, tasks=2, available=lambda meta: False)
    again.collector._source = SequentialTasks(TASKS[5:])
    again.collector.play_again(2)
    with pytest.raises(DriverError, match="was drawn for task 'walk/train/0', and the source now draws 'walk/train/5'"):
        again.step(0)


def test_reports_of_groups_that_were_not_looked_at_survive(bench: Open) -> None:
    b = bench(driving.first_sample_stops, tasks=2)
    offer = b.collector.offer(0)
    state = b.collector.state_dict()
    assert state.keys() == {meta.group_id for meta in offer.metas}
    again = bench(driving.first_sample_stops, tasks=2, available=lambda meta: meta.group_id == ids(1)[0])
    again.collector.load_state_dict(state)
    assert again.collector.state_dict() == {ids(1)[0]: state[ids(1)[0]]}, "a lost group is played and reported anew"


# -- several ranks ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_group_is_at_home_on_one_rank(bench: Open, ranks: int) -> None:  # invariant 6
    b = bench(driving.odd_groups_are_constant, tasks=3)
    offer = pickle.loads(pickle.dumps(b.collector.offer(0)))  # as it is told
    taken = [take(offer, b.config, b.store, own_signal=False, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {groups.train for groups in taken} == {ids(0, 2, 4)}
    assert len({groups.filtered for groups in taken}) == 1
    batches = [groups.batch for groups in taken]
    assert all(batch is not None for batch in batches)
    homes = [batch.group_id for batch in batches if batch is not None]
    assert sorted(name for home in homes for name in home) == list(ids(0, 2, 4))
    assert all(list(home) == sorted(home) for home in homes), "in training order"
    sizes = [batch.num_trajectories for batch in batches if batch is not None]
    assert sum(sizes) == 9 and sizes.count(0) == max(0, ranks - 3), "a rank may be home to none"
    numbers = [groups.numbers().tolist() for groups in taken]
    assert sorted(number for part in numbers for number in part) == list(range(9))
    for groups in taken:
        tokens, trained = groups.trajectories()
        assert len(tokens) == 9 and trained.all()
        assert groups.batch is not None
        np.testing.assert_array_equal(tokens[groups.numbers()], np.diff(groups.batch.trajectory_tokens()))


# -- the control experiment -----------------------------------------------------------------------------------------
def test_permuted_rewards_reach_the_batch(bench: Open) -> None:
    b = bench(driving.first_sample_stops, tasks=6, permute=True)
    groups = b.collect(0)
    assert groups.batch is not None
    real = {meta.group_id: meta.rewards for meta in b.coordinator.ready()}
    looked_at = [meta.group_id for meta in groups.metas]
    dealt = [reward for meta in groups.metas for reward in meta.rewards]
    assert dealt != [reward for group in looked_at for reward in real[group]]
    assert groups.batch.reward.tolist() == [r for m in trained(groups) for r in m.rewards]
    assert groups.batch.success.tolist() == [False, True, True] * len(groups.train), "outcomes stay what they were"
    assert all(min(m.rewards) < max(m.rewards) for m in trained(groups)), "constant ones were filtered after dealing"


def trained(groups: StepGroups) -> list[GroupMeta]:
    by_id = {meta.group_id: meta for meta in groups.metas}
    return [by_id[group] for group in groups.train]


def test_tokens_stay_in_the_store_until_they_are_swept(bench: Open) -> None:
    b = bench(driving.first_sample_stops, tasks=2)
    groups = b.step(0)
    for meta in groups.metas:
        stored = b.store.read(Ref(meta.ref))
        assert stored.group_id == (meta.group_id,)
        np.testing.assert_allclose(stored.reward, meta.rewards)


# -- phases ---------------------------------------------------------------------------------------------------------
def test_phases_measure_and_start_over() -> None:
    told: list[tuple[str, int | None]] = []

    class Told:
        def phase(self, name: str, total: int | None = None) -> None:
            told.append((name, total))

        def start(self, *args: Any) -> None: ...
        def advance(self, *args: Any) -> None: ...
        def log(self, *args: Any) -> None: ...
        def finish(self, *args: Any) -> None: ...

    clock = Phases(Told())
    began = time.monotonic()
    for _ in range(2):
        with clock("rollout", 4):
            time.sleep(0.01)
    whole = time.monotonic() - began
    with pytest.raises(RuntimeError), failing(clock):
        pass
    assert 0.02 <= clock.seconds("rollout") <= whole and clock.seconds("save") == 0.0
    assert told == [("rollout", 4), ("rollout", 4), ("update", None)]
    taken = clock.take()
    assert set(taken) == {"time/rollout", "time/update"} and taken["time/rollout"] >= 0.02
    assert clock.take() == {} and clock.seconds("rollout") == 0.0


@contextmanager
def failing(clock: Phases) -> Iterator[None]:
    with clock("update"):
        yield
        raise RuntimeError


def wait_for(look: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)
