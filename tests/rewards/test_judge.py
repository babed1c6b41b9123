"""What a judge may see (``megatron_ext/rewards/judge.py``): windows, whitelists, and no outcome ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.environments.protocol import Observation, ToolCall
from megatron_ext.rewards.judge import Whitelist, outcome_word
from megatron_ext.rewards.model_judge import ModelJudge
from megatron_ext.rewards.protocol import Episode, EpisodeStep
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task


def episode(steps: int = 4, **info: Any) -> Episode:
    played = [
        EpisodeStep(f"<think>{t}</think>go {t}", f"go  {t}", Observation(f"room {t}", info=info), t, f"state{t}")
        for t in range(steps)
    ]
    return Episode(Task("t/1", "e", 1, "train"), Observation("the task", info=info), played, Status.DONE, "state-")


def test_windows_by_hand() -> None:  # invariant 1
    views = Whitelist(before=1, after=2).views(episode(4))
    assert [view.step for view in views] == [0, 1, 2, 3]
    assert [[e.action for e in view.before] for view in views] == [[], ["go 0"], ["go 1"], ["go 2"]]
    assert [[e.action for e in view.after] for view in views] == [["go 1", "go 2"], ["go 2", "go 3"], ["go 3"], []]
    assert all(view.prompt == "the task" for view in views)
    assert [view.current.observation for view in views] == ["room 0", "room 1", "room 2", ""]
    whole = Whitelist(before=None, after=None, show_last=True, state=True).views(episode(4))
    assert [len(view.before) + len(view.after) for view in whole] == [3] * 4
    assert whole[3].current.observation == "room 3"
    assert [e.state for e in whole[3].before] == ["state0", "state1", "state2"] and whole[0].opening.state == "state-"
    alone = Whitelist(before=0, after=0).views(episode(2))
    assert [(view.before, view.after) for view in alone] == [((), ())] * 2
    assert Whitelist().views(episode(0)) == []


def test_actions_as_text() -> None:
    call = ToolCall("search", {"top": 3, "query": "x"})
    steps = [EpisodeStep("raw 1", call, Observation("a")), EpisodeStep("raw 2", None, Observation("b", valid=False))]
    views = Whitelist().views(replace(episode(), steps=steps))
    assert [view.current.action for view in views] == ["search(query='x', top=3)", "raw 2"]


def test_only_named_info_is_seen() -> None:  # invariant 1
    told = episode(2, goals=["open door"], map={"rooms": 3, "score": 9, "sub": [{"is_done": 1, "x": 2}]}, other=1)
    view = Whitelist(info=("goals", "map", "absent")).views(told)[0]
    assert view.current.info == {"goals": ["open door"], "map": {"rooms": 3, "sub": [{"x": 2}]}}
    assert view.opening.info == view.current.info
    assert Whitelist().views(told)[0].current.info == {}
    assert view.opening.state == view.current.state == ""


@pytest.mark.parametrize(
    "key",
    ["reward", "success", "score", "done", "answer", "gold_answer", "isDone", "finalScore", "step-reward", "RewardSum"]
    + ["win", "grounded", "test_passed", "task-failed", "accuracy"],
)
def test_whitelists_that_name_an_outcome_are_refused(key: str) -> None:  # invariant 3
    with pytest.raises(ValueError, match=f"info names '{key}', which tells the outcome"):
        Whitelist(info=("goals", key))


@pytest.mark.parametrize("key", ["goals", "subgoals_reached", "scored_papers", "abandoned", "underscore", "location"])
def test_other_names_are_not(key: str) -> None:
    assert outcome_word(key) == "" and Whitelist(info=(key,)).info == (key,)


def test_bad_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="before=-1"):
        Whitelist(before=-1)


values = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=5))
infos = st.fixed_dictionaries(
    {"goals": values, "inside": st.fixed_dictionaries({"at": values})},
)
steps_drawn = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), infos), min_size=1, max_size=6)
outcomes = st.fixed_dictionaries(
    {
        "rewards": st.lists(st.floats(-9, 9), min_size=7, max_size=7),
        "dones": st.lists(st.booleans(), min_size=7, max_size=7),
        "successes": st.lists(st.booleans(), min_size=7, max_size=7),
        "scores": st.lists(st.floats(0, 1), min_size=7, max_size=7),
        "secret": values,
        "inside": st.dictionaries(st.sampled_from(["score", "gold", "isDone", "step_reward"]), values),
        "last_text": st.text(max_size=5),
        "status": st.sampled_from([Status.DONE, Status.MAX_TURNS, Status.MAX_CONTEXT]),
        "data": st.dictionaries(st.sampled_from(["answer", "gold"]), values),
    }
)


def ended(steps: list[tuple[str, str, Mapping[str, Any]]], outcome: Mapping[str, Any]) -> Episode:
    """The same play, with this outcome."""

    def observation(t: int, text: str, info: Mapping[str, Any]) -> Observation:
        told = {**info, "secret": outcome["secret"], "inside": {**info["inside"], **outcome["inside"]}}
        return Observation(
            text,
            reward=outcome["rewards"][t],
            done=outcome["dones"][t],
            success=outcome["successes"][t],
            score=outcome["scores"][t],
            info=told,
        )

    last = len(steps) - 1
    played = [
        EpisodeStep(action, action, observation(t, outcome["last_text"] if t == last else text, info), t)
        for t, (action, text, info) in enumerate(steps)
    ]
    first = observation(6, "do it", steps[0][2])
    return Episode(Task("t", "e", 1, "train", outcome["data"]), first, played, outcome["status"])


@given(steps_drawn, outcomes, outcomes)
def test_no_outcome_reaches_a_judge(
    steps: list[tuple[str, str, Mapping[str, Any]]], one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:  # invariants 2 and 4
    """Whatever the outcome fields hold, the bytes that are sent to a model are the same."""
    whitelist = Whitelist(before=2, after=2, info=("goals", "inside"), state=True)
    judge = ModelJudge("http://judge:1/v1", "m")
    labels = {"D": "progress", "N": ""}
    sent, again = ([judge.request(view, labels) for view in whitelist.views(ended(steps, o))] for o in (one, other))
    assert sent == again


def test_the_leak_test_can_fail() -> None:
    """What is whitelisted does reach the judge."""
    judge = ModelJudge("http://judge:1/v1", "m")
    view = Whitelist(info=("goals",), show_last=True).views(episode(1, goals="find the key"))[0]
    sent = judge.request(view, {"D": "progress"}).decode()
    assert all(part in sent for part in ("find the key", "room 0", "go 0", "the task", "D: progress"))
