"""Demonstrations are recorded as the episode loop would have (``megatron_ext/rollout/demonstrations.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.environments.pool import Demonstration, EnvironmentPool
from megatron_ext.environments.protocol import ToolCall
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.harness.text import TextHarness
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import Success
from megatron_ext.rollout.demonstrations import DemonstrationError, demonstration_batch
from megatron_ext.rollout.driver import Driver, GroupOrder
from megatron_ext.rollout.episode import EpisodeLimits, Sampling
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from tests.helpers.errands import ERRANDS
from tests.helpers.scripted import ScriptedClient, small_codec
from tests.helpers.worlds import WALK

TURNS = 6
HARNESS: dict[str, Harness] = {
    "walk": TextHarness(system="Walk."),
    "calculator": ToolHarness(system="Work it out.", show_schema=False),
    "errands": ToolHarness(
        system="Go.", show_schema=False, subagent_system="Errand.", context_budget=100, answer_tool="finish"
    ),
}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    environments: dict[str, dict[str, Any]] = {
        "walk": dict(WALK),
        "calculator": {
            "_target_": "megatron_ext.environments.calculator.Calculator",
            "operations": 3,
            "style": "expression",
        },
        "errands": {**ERRANDS, "words": 2},
    }
    with EnvironmentPool(environments, workers=1, deadline_s=20.0, log_dir=tmp_path_factory.mktemp("logs")) as made:
        yield made


def demonstrate(
    pool: EnvironmentPool, environment: str, count: int = 8, mistake_rate: float = 0.3
) -> list[Demonstration]:
    tasks = pool.tasks(environment, "train", count)
    return pool.demonstrate(environment, tasks, mistake_rate=mistake_rate, seed=1, max_turns=TURNS)


def replay(
    pool: EnvironmentPool, codec: ChatCodec, harness: Harness, demos: list[Demonstration], context: int, folder: Path
) -> TrajectoryBatch:
    """The driver's record of episodes in which a scripted engine says what each demonstration did."""
    left = {f"demo/{n}/0": list(demo.steps) for n, demo in enumerate(demos)}
    summaries = {f"demo/{n}/0": demo.summaries for n, demo in enumerate(demos)}
    asked = [i for message in harness.compress() for i in codec.message(message)] + codec.generation_prompt()

    def say(session: str, turn: int) -> str:
        episode = session.partition("~")[0]
        request = next(r for r in client.requests if r.request_id == f"{episode}#{turn}")
        if request.input_ids.tolist()[-len(asked) :] == asked:
            return summaries[episode][len(summaries[episode]) - len(left[episode])]
        return harness.render(left[episode].pop(0)[0])

    client = ScriptedClient(codec, say)
    driver = Driver(
        pool=pool,
        client=client,
        codec=codec,
        harness=harness,
        rewards=RewardSet([RewardPart("success", Success())]),
        store=TrajectoryStore(folder),
        limits=EpisodeLimits(max_turns=TURNS, max_context=context, max_new_tokens=context),
        concurrency=8,
        run_seed=1,
        engine_deadline_s=20.0,
    )
    driver.submit([GroupOrder(f"demo/{n}", "", demo.task, 1, Sampling(), store=True) for n, demo in enumerate(demos)])
    refs: dict[str, str] = {}
    while driver.busy:
        refs |= {group.group_id: group.meta.ref for group in driver.step(0.05)}
    client.close()
    store = TrajectoryStore(folder)
    return concat([store.read(Ref(refs[f"demo/{n}"])) for n in range(len(demos))])


SAME = (
    *("ids", "loss_mask", "turn", "field", "weight", "turn_role", "turn_start", "turn_end", "turn_number"),
    *("segment_tokens", "segment_turns", "session_segments", "trajectory_sessions", "group_trajectories"),
    *("reward", "success", "status", "group_id", "task_id", "harness"),
    *("session_kind", "session_parent", "session_return", "turn_action_key", "turn_reward"),
)


@pytest.mark.parametrize("environment", sorted(HARNESS))
def test_the_record_is_that_of_an_episode_with_the_same_words(
    pool: EnvironmentPool, codec: ChatCodec, environment: str, tmp_path: Path
) -> None:
    demos, harness = demonstrate(pool, environment), HARNESS[environment]
    batch = demonstration_batch(codec, harness, demos, pool.tools(environment), 4000)
    played = replay(pool, codec, harness, demos, 4000, tmp_path)
    for name in SAME:
        np.testing.assert_array_equal(vars(batch)[name], vars(played)[name], err_msg=name)
    assert batch.turn_labels.keys() == played.turn_labels.keys() and batch.prepared.keys() == played.prepared.keys()
    for label, values in batch.turn_labels.items():
        np.testing.assert_array_equal(values, played.turn_labels[label])
    assert all(ids.same(played.prepared[name]) for name, ids in batch.prepared.items())
    if environment == "errands":
        assert {int(kind) for kind in batch.session_kind} == {0, 1, 2} and batch.prepared["answer"].lengths.all()
    assert 0 < int(batch.success.sum()) < len(demos), "some of these demonstrations fail, and are kept"
    assert batch.loss_mask.sum() == played.loss_mask.sum() > 0


def test_actions_are_certain_and_everything_else_is_context(pool: EnvironmentPool, codec: ChatCodec) -> None:
    demos = demonstrate(pool, "walk", 3)
    batch = demonstration_batch(codec, HARNESS["walk"], demos, (), 4000)
    mask = np.asarray(batch.loss_mask)
    assert not batch.rollout_logp.any()
    assert set(batch.version[mask].tolist()) == {0} and set(batch.version[~mask].tolist()) == {-1}
    said = [codec.encode_turn(str(action)) for demo in demos for action, _ in demo.steps]
    assert batch.ids[mask].tolist() == [i for ids in said for i in ids], "the end token is learned too"
    assert batch.num_groups == batch.num_trajectories == 3


def test_a_long_demonstration_is_cut_after_a_whole_turn(pool: EnvironmentPool, codec: ChatCodec) -> None:
    demos, harness = demonstrate(pool, "walk", 3, mistake_rate=0.0), HARNESS["walk"]
    whole = demonstration_batch(codec, harness, demos, (), 4000)
    longest = int(np.diff(whole.trajectory_tokens()).max())
    turns = {}
    for context in range(longest + 1, 0, -1):  # one more: an engine may need it to end a turn that was cut off
        try:
            batch = demonstration_batch(codec, harness, demos, (), context)
        except ValueError as error:
            assert f"its first turn does not fit model.max_context={context}" in str(error)
            assert "demonstration of task 'walk/train/" in str(error)
            break
        sizes = np.diff(batch.trajectory_tokens())
        assert sizes.max() <= context
        cut = sizes < np.diff(whole.trajectory_tokens())
        assert (batch.status == int(Status.MAX_CONTEXT)).tolist() == cut.tolist()
        assert batch.success.tolist() == (~cut).tolist() == (batch.reward == 1.0).tolist()
        for j, size in enumerate(sizes.tolist()):
            start, other = int(batch.trajectory_tokens()[j]), int(whole.trajectory_tokens()[j])
            np.testing.assert_array_equal(batch.ids[start : start + size], whole.ids[other : other + size])
            assert batch.turn_role[batch.turn[start + size - 1]] == Role.MODEL and batch.loss_mask[start + size - 1]
        turns[context] = int((batch.turn_role == Role.MODEL).sum())
    assert len(set(turns.values())) >= 3 and min(turns.values()) == 3


def test_a_compression_needs_something_to_say(pool: EnvironmentPool, codec: ChatCodec) -> None:
    demos = [replace(demo, summaries=()) for demo in demonstrate(pool, "errands", 1)]
    message = r"outgrows harness.context_budget=100, but environment 'errands' has no expert_summary"
    with pytest.raises(DemonstrationError, match=message):
        demonstration_batch(codec, HARNESS["errands"], demos, pool.tools("errands"), 4000)


def test_a_session_that_is_too_long_cuts_the_demonstration(pool: EnvironmentPool, codec: ChatCodec) -> None:
    """At every context from one that holds all: no session is longer, and what stands there is a beginning."""
    demos, harness, tools = demonstrate(pool, "errands", 1, 0.0), HARNESS["errands"], pool.tools("errands")
    whole = demonstration_batch(codec, harness, demos, tools, 4000)
    sizes = np.diff(whole.segment_tokens)
    ended = set()
    for context in range(int(sizes.max()) + 1, 70, -1):
        batch = demonstration_batch(codec, harness, demos, tools, context)
        assert np.diff(batch.segment_tokens).max() <= context
        ended.add(batch.num_sessions)
        for q in range(batch.num_sessions):
            mine, all_of_it = (b.ids[slice(*b.segment_tokens[q : q + 2])] for b in (batch, whole))
            np.testing.assert_array_equal(mine, all_of_it[: len(mine)])
        cut = batch.num_tokens < whole.num_tokens
        assert bool(batch.success[0]) is not cut and (batch.status[0] == Status.MAX_CONTEXT) == cut
    assert len(ended) >= 3


def test_an_action_that_the_harness_cannot_read_back_is_refused(pool: EnvironmentPool, codec: ChatCodec) -> None:
    (demo,) = demonstrate(pool, "errands", 1, 0.0)
    odd = replace(demo, steps=((ToolCall("look", {"number": "three"}), demo.steps[0][1]), *demo.steps[1:]))
    with pytest.raises(DemonstrationError, match="does not read the script's action ToolCall.*as one"):
        demonstration_batch(codec, HARNESS["errands"], [odd], pool.tools("errands"), 4000)
