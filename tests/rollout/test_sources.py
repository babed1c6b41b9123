"""Task-source contract: runs against every source (invariants of ``megatron_ext/rollout/sources.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.rollout.sources import SequentialTasks, ShuffledTasks, TaskSetError, WeightedTasks, check_task_set
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.trajectory.task import Task

Make = Callable[[int, int], TaskSource]


def tasks(count: int) -> list[Task]:
    return [Task(f"game/train/{i}", "game", i, "train") for i in range(count)]


SOURCES: dict[str, Make] = {
    "sequential": lambda count, seed: SequentialTasks(tasks(count), seed),
    "shuffled": lambda count, seed: ShuffledTasks(tasks(count), seed),
    "weighted": lambda count, seed: WeightedTasks(tasks(count), seed, low=0.2, high=0.8, outside=0.25),
}


@pytest.fixture(params=sorted(SOURCES))
def make(request: pytest.FixtureRequest) -> Make:
    return SOURCES[request.param]


def outcome(task_id: str, step: int) -> float:
    """A success rate that drifts, so that tasks enter and leave the band."""
    return (int(task_id.rsplit("/", 1)[1]) * 37 + step * 11) % 101 / 100


def play(source: TaskSource, steps: range, per_step: int) -> list[str]:
    seen = []
    for step in steps:
        drawn = [task.task_id for task in source.draw(per_step)]
        for task_id in drawn:
            source.report(task_id, outcome(task_id, step), step)
        seen += drawn
    return seen


def test_restore_at_every_position(make: Make) -> None:
    """Three epochs and more, with outcomes fed back: what follows a restored state is what followed it."""
    whole = play(make(7, 5), range(24), 1)
    for position in range(24):
        first = make(7, 5)
        head = play(first, range(position), 1)
        state = first.state_dict()
        written = json.dumps(state)
        play(first, range(60, 64), 2)
        assert json.dumps(state) == written, "a state is a snapshot"
        other = make(7, 5)
        play(other, range(50, 58), 3)  # what the restored object did before must not show
        other.load_state_dict(json.loads(written))
        assert head + play(other, range(position, 24), 1) == whole, position


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cutting_draws_changes_nothing(data: st.DataObject) -> None:
    make = SOURCES[data.draw(st.sampled_from(sorted(SOURCES)))]
    size = data.draw(st.integers(1, 9))
    cuts = data.draw(st.lists(st.integers(0, size), max_size=8))
    one, other = make(size, 3), make(size, 3)
    for source in (one, other):
        for i in range(0, size, 2):
            source.report(f"game/train/{i}", 0.0, 1)
    whole = [one.draw(1)[0].task_id for _ in range(sum(cuts))]
    assert [task.task_id for cut in cuts for task in other.draw(cut)] == whole


def test_epochs(make: Make) -> None:
    """Nothing reported yet: every epoch holds every task once, whatever the source."""
    source = make(11, 2)
    epochs = [[task.task_id for task in source.draw(11)] for _ in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 11 for epoch in epochs)
    assert len(source) == 11


def test_shuffled_order_depends_on_seed_and_epoch_only() -> None:
    orders = {}
    for seed in (1, 2):
        source = ShuffledTasks(tasks(20), seed)
        orders[seed] = [tuple(task.seed for task in source.draw(20)) for _ in range(3)]
    assert len({*orders[1], *orders[2]}) == 6
    jump = ShuffledTasks(tasks(20), 1)
    jump.load_state_dict({**jump.state_dict(), "position": 40})
    assert tuple(task.seed for task in jump.draw(20)) == orders[1][2]
    # Pinned: another Python version or process must not reorder a resumed run.
    assert [task.seed for task in ShuffledTasks(tasks(8), 1).draw(8)] == [4, 1, 2, 3, 5, 7, 0, 6]


def test_sequential_keeps_the_order() -> None:
    source = SequentialTasks(tasks(3), 9)
    assert [task.seed for _ in range(3) for task in source.draw(2)] == [0, 1, 2, 0, 1, 2]


def test_weighted_prefers_the_band() -> None:
    """Half of the tasks are solved always, half sometimes: the former come at the rate ``outside`` of the latter."""
    source = WeightedTasks(tasks(100), 4, low=0.1, high=0.9, outside=0.2)
    for i in range(100):
        source.report(f"game/train/{i}", 1.0 if i % 2 else 0.5, 0)
    drawn = [source.draw(1)[0].seed for _ in range(6000)]
    share = sum(seed % 2 for seed in drawn) / len(drawn)
    assert abs(share - 0.2 / 1.2) < 0.02
    assert {seed for seed in drawn} == set(range(100))  # none is forgotten


def test_weighted_rate_is_a_moving_average() -> None:
    source = WeightedTasks(tasks(2), 0, low=0.3, high=0.7, outside=0.1, smoothing=0.5)
    assert source.probability("game/train/0") == 1.0  # not tried yet
    for rate, probability in [(0.0, 0.1), (1.0, 1.0), (1.0, 0.1), (0.0, 1.0)]:  # averages 0, .5, .75, .375
        source.report("game/train/0", rate, 1)
        assert source.probability("game/train/0") == probability
    assert source.state_dict()["rates"] == {"game/train/0": 0.375}
    with pytest.raises(KeyError, match="unknown task 'nope'"):
        source.report("nope", 0.5, 1)
    for rate in (float("nan"), -0.1, 1.1):
        with pytest.raises(ValueError, match="0..1"):
            source.report("game/train/0", rate, 1)


def test_weighted_settings_are_checked() -> None:
    for settings_ in ({"low": 0.9, "high": 0.1}, {"outside": 0.0}, {"smoothing": 1.5}):
        with pytest.raises(ValueError, match="WeightedTasks"):
            WeightedTasks(tasks(2), 0, **settings_)


def test_bad_task_sets_are_named(make: Make) -> None:
    with pytest.raises(TaskSetError, match="task set is empty"):
        make(0, 1)
    source = make(3, 1)
    before = source.state_dict()
    with pytest.raises(TaskSetError, match=r"4 tasks are wanted .* has 3: .*tasks_per_step"):
        source.draw(4)
    assert source.state_dict() == before
    with pytest.raises(ValueError, match="-1"):
        source.draw(-1)
    with pytest.raises(TaskSetError, match="'game/train/1'"):
        ShuffledTasks([*tasks(3), tasks(2)[1]], 1)
    with pytest.raises(TaskSetError, match="8 tasks"):
        check_task_set(tasks(7), 8)
    check_task_set(tasks(8), 8)


def test_foreign_state_is_refused(make: Make) -> None:
    state = make(5, 1).state_dict()
    with pytest.raises(TaskSetError, match="another task set or seed"):
        make(6, 1).load_state_dict(state)
    if not isinstance(make(5, 1), SequentialTasks):
        with pytest.raises(TaskSetError, match="another task set or seed"):
            make(5, 2).load_state_dict(state)
    make(5, 1).load_state_dict(state)
