"""Limits and troubles of episodes of several sessions: invariants 4 and 5 of ``megatron_ext/rollout/dialogues.py``, and
6 of ``episode.py``."""

from __future__ import annotations

import pytest

from megatron_ext.harness.template import ChatCodec
from megatron_ext.trajectory.record import Status
from tests.helpers.dialogue_play import (
    NORMAL,
    SUBAGENT,
    TASK,
    check,
    expert,
    harness,
    play,
    sessions_of,
    tool,
    words,
)
from tests.helpers.errands import Errands
from tests.helpers.scripted import small_codec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


def test_a_sub_agent_that_never_reports_meets_the_turn_limit(codec: ChatCodec) -> None:
    say = [tool("send", number=1), *[tool("look", number=1)] * 9]
    played = play(codec, words(*say), max_turns=5)
    check(played, 2000, 5)
    assert played.status is Status.MAX_TURNS and played.kinds == [NORMAL, SUBAGENT]
    assert (played.batch.session_return == -1).all() and played.batch.loss_mask.any()
    assert sorted(played.ended) == ["g0/1", "g0/1~1"]


def test_turns_are_counted_over_all_sessions(codec: ChatCodec) -> None:
    played = play(codec, expert(), harness=harness(100), max_turns=6)
    check(played, 2000, 6)
    assert played.status is Status.MAX_TURNS and played.run.turns == 6 and any(played.summaries)


def test_the_environment_may_end_inside_a_sub_agent(codec: ChatCodec) -> None:
    gold = TASK.data["answer"]
    played = play(codec, words(tool("send", number=1), tool("finish", word=gold)))
    check(played, 2000)
    assert played.status is Status.DONE and played.batch.success[0] and played.kinds == [NORMAL, SUBAGENT]


def test_malformed_turns_of_a_sub_agent_are_answered_in_its_session(codec: ChatCodec) -> None:
    say = words(tool("send", number=1), "walk", "talk", tool("report", word="x"), tool("finish", word="x"))
    played = play(codec, say)
    check(played, 2000)
    assert played.run.counts.malformed == 2 and played.status is Status.DONE
    assert sessions_of(played) == [0, 1, 1, 1, 0] and "No tool call was found" in played.text(1)
    assert "No tool call was found" not in played.text(0)


def test_a_sub_agent_cannot_send_another(codec: ChatCodec) -> None:
    """The environment answers; nothing is opened."""
    say = words(tool("send", number=1), tool("send", number=2), tool("report", word="x"), tool("finish", word="x"))
    played = play(codec, say)
    check(played, 2000)
    assert played.kinds == [NORMAL, SUBAGENT] and played.run.counts.invalid_actions == 1


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([tool("session", number=2)], "a sub-agent ended in the main dialogue"),
        ([tool("send", number=1), tool("session", number=1)], "a sub-agent began inside a sub-agent"),
    ],
)
def test_a_session_change_where_there_can_be_none_is_the_environments_failure(
    codec: ChatCodec, said: list[str], problem: str
) -> None:  # invariant 6 of the episode
    played = play(codec, words(*said))
    check(played, 2000)
    assert played.status is Status.ENV_ERROR and not played.batch.loss_mask.any()
    assert played.run.counts.env_problem == f"environment 'errands', task 'errands/train/4': {problem}"


def test_no_session_on_reset(codec: ChatCodec) -> None:
    from dataclasses import replace

    from megatron_ext.environments.protocol import SessionChange

    class Odd(Errands):
        def reset(self, seed: int, **more: object) -> object:  # type: ignore[override]
            return replace(super().reset(seed), session=SessionChange.OPEN)

    played = play(codec, words(), environment=Odd())
    assert played.status is Status.ENV_ERROR and "a sub-agent began on reset" in played.run.counts.env_problem
    assert played.batch.num_sessions == 1 and played.batch.num_tokens == 0


@pytest.mark.parametrize("max_context", range(30, 260, 7))
def test_no_session_outgrows_the_context(codec: ChatCodec, max_context: int) -> None:  # invariant 4
    """At many limits, so that each way to run out is met: opening, turn, observation, summary, sub-agent, return."""
    budget = max(1, max_context - 60)
    played = play(codec, expert(), harness=harness(budget), max_context=max_context, max_new_tokens=60)
    check(played, max_context)
    assert played.status in (Status.DONE, Status.MAX_CONTEXT, Status.MAX_TURNS)
    assert all(len(r.input_ids) + r.sampling.max_new_tokens < max_context for r in played.requests)


def test_without_compression_the_context_ends_what_it_lets_go_on(codec: ChatCodec) -> None:
    """The point of compressing: a dialogue may be longer than the context."""
    limits = {"max_context": 250, "max_new_tokens": 90}
    plain = play(codec, expert(), harness=harness(), **limits)  # type: ignore[arg-type]
    saved = play(codec, expert(), harness=harness(120), **limits)  # type: ignore[arg-type]
    assert plain.status is Status.MAX_CONTEXT and saved.status is Status.DONE and bool(saved.batch.success[0])
    check(saved, 250)
