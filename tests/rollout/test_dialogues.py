"""Episodes of several sessions: the invariants of ``megatron_ext/rollout/dialogues.py`` and, with more than one,
4, 6 and 7 of ``episode.py``; ``check`` asserts those of ``dialogues.py`` on every episode that is played."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.harness.protocol import HarnessError, Message
from megatron_ext.harness.template import CHATML, ChatCodec, load_codec
from megatron_ext.harness.tokenizer import save_tokenizer
from megatron_ext.training.step_replay.kept_step import read_step, write_step
from megatron_ext.trajectory.record import Field, Role, Status, equal
from megatron_ext.trajectory.store import TrajectoryStore
from tests.helpers.dialogue_play import (
    COMPRESS,
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
from tests.helpers.run_folders import kept_step, make_run
from tests.helpers.scripted import small_codec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


# -- the whole way -------------------------------------------------------------------------------------------------
def test_sub_agents_have_sessions_of_their_own(codec: ChatCodec) -> None:
    played = play(codec, expert(), harness=harness())
    check(played, 2000)
    batch = played.batch
    assert played.status is Status.DONE and batch.success[0] and batch.reward[0] == 1.0
    assert played.kinds == [NORMAL, SUBAGENT, SUBAGENT] and batch.session_parent.tolist() == [-1, 0, 0]
    assert [name for name in dict.fromkeys(r.session_id for r in played.requests)] == ["g0/1", "g0/1~1", "g0/1~2"]
    assert played.ended == ["g0/1~1", "g0/1~2", "g0/1"]
    told = [
        Message(Role.SYSTEM, "Errand."),
        Message(Role.USER, "You are an errand boy. Find word number 1 and report it."),
    ]
    opening = codec.opening() + [i for message in told for i in codec.message(message)]
    assert batch.ids[played.tokens(1)][: len(opening)].tolist() == opening, "a sub-agent has its own prompt"
    assert (batch.session_return[1:] >= 0).all()
    # Labels and rewards stand at the turns that they are of.
    model = batch.turn_role == Role.MODEL
    order = np.argsort(batch.turn_number[model])
    operation = batch.turn_labels["operation"][model][order]
    assert operation.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, -1] and (batch.turn_labels["operation"][~model] == -1).all()
    assert batch.turn_reward[model][order].tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0.5, 1.0]
    assert [step.turn for step in played.run.steps] == batch.turn_number[model][order].tolist()


def test_a_dialogue_over_its_budget_is_compressed(codec: ChatCodec) -> None:
    kept = harness(100, compress_prompt="Sum up.", resume_prompt="Go on.")
    played = play(codec, expert(), harness=kept)
    check(played, 2000)
    batch = played.batch
    assert played.status is Status.DONE and batch.success[0], "summaries are neither turns that act nor steps"
    assert played.kinds.count(COMPRESS) == sum(played.summaries) >= 2
    assert len(played.run.steps) == played.run.turns == 9
    for q in np.flatnonzero(batch.session_kind == COMPRESS).tolist():
        parent = int(batch.session_parent[q])
        prompts = [
            len(r.input_ids)
            for r, summary, turn in zip(played.requests, played.summaries, sessions_of(played), strict=True)
            if turn == parent and not summary
        ]
        assert max(prompts) <= 100, "a call over the budget is not made"
        summary = next(r for r, turn in zip(played.results, sessions_of(played), strict=True) if turn == q)
        opening = kept.opening(TASK, Errands().reset(TASK.seed), played.run.tools)
        if played.kinds[parent] is SUBAGENT:
            continue
        told = codec.opening() + [i for message in opening for i in codec.message(message)]
        told += [*codec.generation_prompt(), *summary.ids.tolist(), *codec.close_turn(summary.ids.tolist())]
        told += [*codec.message(Message(Role.USER, "Go on.")), *codec.generation_prompt()]
        assert batch.ids[played.tokens(q + 1)][: len(told)].tolist() == told
        spots = slice(played.tokens(q + 1).start, played.tokens(q + 1).start + len(told))
        assert not batch.loss_mask[spots].any()
        assert "Sum up." in played.text(q)
    assert played.run.counts.sessions.retokenised == 0


def test_a_sub_agent_is_compressed_and_its_parent_when_it_comes_back(codec: ChatCodec) -> None:
    """Both at their own time; the result is in the parent's session, which ends with it."""
    long = "word " * 30
    say = words(
        tool("send", number=3),
        tool("look", number=3),
        "at 3 what",  # the sub-agent's summary
        tool("report", word=long),
        "at 3 told",  # the parent's summary
        tool("finish", word="x"),
    )
    played = play(codec, say, harness=harness(100))
    check(played, 2000)
    assert played.kinds == [NORMAL, SUBAGENT, COMPRESS, SUBAGENT, COMPRESS, NORMAL]
    assert played.batch.session_parent.tolist() == [-1, 0, 1, 0, 0, -1]
    returned = played.batch.session_return
    assert returned[3, 1] == played.tokens(0).stop and (returned[[0, 1, 2, 4, 5]] == -1).all()
    assert played.ended == ["g0/1~1", "g0/1~2", "g0/1", "g0/1~3"]
    assert "at 3 told" in played.text(5) and long.strip() not in played.text(5)


SAYINGS = st.sampled_from(
    [
        *(tool("look", number=n) for n in (0, 3, 9)),
        tool("send", number=1),
        tool("send", number=3),
        tool("report", word="walk"),
        tool("report", word="word " * 20),
        "<think>walk</think>go",
        "",
        "talk " * 25,
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(SAYINGS, min_size=25, max_size=25),
    st.none() | st.integers(20, 200),
    st.integers(60, 400),
    st.sampled_from([4, 30, 300]),
    st.none() | st.integers(1, 30),
)
def test_any_episode_keeps_the_invariants(
    codec: ChatCodec, said: list[str], budget: int | None, context: int, longest: int, summary: int | None
) -> None:
    played = play(
        codec,
        lambda run, _: said[run.calls % len(said)],
        harness=harness(budget, summary_tokens=summary),
        max_turns=9,
        max_context=context,
        max_new_tokens=longest,
    )
    check(played, context, 9)


def test_the_other_template_too(codec: ChatCodec, tmp_path: Path) -> None:
    """CHATML: nothing opens a session, and something stands behind the end of a turn."""
    save_tokenizer(tmp_path, codec.tokenizer, codec.template)
    text = (tmp_path / "tokenizer.json").read_text()
    for special, other in (("<|bos|>", "<|endoftext|>"), ("<|user|>", "<|im_start|>"), ("<|end|>", "<|im_end|>")):
        text = text.replace(special, other)
    (tmp_path / "tokenizer.json").write_text(text)
    chat = load_codec(tmp_path, CHATML)
    played = play(chat, expert(), harness=harness(100))
    check(played, 2000)
    assert played.status is Status.DONE and any(played.summaries)


# -- fields, prepared ids, the store -------------------------------------------------------------------------------
def test_fields_of_tool_turns(codec: ChatCodec) -> None:
    call = tool("look", number=3)
    say = words(f"<think>go at</think> word {call}", "<think>x</think>at", tool("finish", word="x"))
    played = play(codec, say, harness=harness(50))
    batch, results = played.batch, played.results

    def said(turn: int, kind: Field) -> str:
        tokens = np.flatnonzero(batch.turn == np.flatnonzero(batch.turn_role == Role.MODEL)[turn])
        return codec.decode_turn(batch.ids[tokens[batch.field[tokens] == kind]].tolist())

    assert said(0, Field.THINKING) == "<think>go at</think>" and said(0, Field.TOOL_USE).strip() == call
    assert said(0, Field.TEXT).strip() == "word"
    assert said(1, Field.THINKING) == "<think>x</think>" and said(1, Field.TEXT) == "at" and not said(1, Field.TOOL_USE)
    ends = [i for i in np.flatnonzero(batch.loss_mask) if batch.ids[i] == codec.end_id]
    assert len(ends) == len(results) and (batch.field[ends] == Field.OTHER).all()
    assert (batch.field[batch.turn < 0] == Field.OTHER).all()


def test_the_gold_answer_is_prepared(codec: ChatCodec) -> None:
    played = play(codec, expert(), harness=harness(100, answer_tool="finish"))
    prefix, gold = (played.batch.prepared[name].row(0).tolist() for name in ("answer_prefix", "answer"))
    turn = [*prefix, *gold]
    opener = codec.generation_prompt()
    assert turn[: len(opener)] == opener
    said = tool("finish", word=TASK.data["answer"])
    whole = codec.encode_turn(said)
    assert turn[len(opener) :] == whole[: len(turn) - len(opener)], "the tokens of the whole call"
    assert (
        TASK.data["answer"] in codec.decode_turn(gold) and len(codec.decode_turn(gold)) < len(TASK.data["answer"]) + 4
    )
    assert play(codec, expert()).batch.prepared == {}


def test_answers_that_cannot_be_prepared(codec: ChatCodec) -> None:
    for name, message in (("finnish", "no such tool .did you mean 'finish'"), ("look", "must be integer")):
        with pytest.raises(HarnessError, match=message):
            play(codec, expert(), harness=harness(answer_tool=name))
    with pytest.raises(HarnessError, match=r"name the argument of the answer in harness.answer_argument"):
        play(codec, expert(), harness=harness(answer_tool="finish", answer_argument="words"))
    with pytest.raises(HarnessError, match=r"harness.context_budget must be >= 1"):
        harness(0)


def test_sessions_survive_the_store(codec: ChatCodec, tmp_path: Path) -> None:
    played = play(codec, expert(), harness=harness(100, answer_tool="finish"), routing=True)
    store = TrajectoryStore(tmp_path)
    assert equal(store.read(store.write(played.batch)), played.batch)
    run = make_run(tmp_path / "run")
    write_step(run, kept_step(10, played.batch))
    assert equal(read_step(run, 10).batch, played.batch), "a kept step holds all of it"
