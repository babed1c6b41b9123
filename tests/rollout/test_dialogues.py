"""Episodes of several sessions: the invariants of ``megatron_ext/rollout/dialogues.py`` and, with more than one,
4, 6 and 7 of ``episode.py``.

A real environment with sub-agents, harness, codec and rewards, in this process; the model's words come from a script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.environments.protocol import Action, ToolCall
from megatron_ext.harness.protocol import Harness, HarnessError, Message
from megatron_ext.harness.template import CHATML, ChatCodec, load_codec
from megatron_ext.harness.tokenizer import save_tokenizer
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import Success
from megatron_ext.rollout.engine import FinishReason, GenerateRequest, GenerateResult
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling
from megatron_ext.training.kept_step import read_step, write_step
from megatron_ext.trajectory.builder import build_group
from megatron_ext.trajectory.record import Field, Role, SessionKind, Status, TrajectoryBatch, equal
from megatron_ext.trajectory.rows import make_rows
from megatron_ext.trajectory.store import TrajectoryStore
from tests.helpers.errands import Errands
from tests.helpers.run_folders import kept_step, make_run
from tests.helpers.scripted import answer, small_codec

NORMAL, COMPRESS, SUBAGENT = SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.SUBAGENT
(TASK,) = Errands().tasks("train", 1, start=4)
SAID = ToolHarness(show_schema=False)


def tool(name: str, **arguments: object) -> str:
    return SAID.render(ToolCall(name, arguments))


def harness(budget: int | None = None, **more: object) -> ToolHarness:
    fields: dict[str, object] = {"system": "Go.", "subagent_system": "Errand.", "show_schema": False}
    return ToolHarness(context_budget=budget, **(fields | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


@dataclass
class Played:
    """A finished episode with what was asked and answered, and the engine sessions that ended before each request."""

    run: EpisodeRun
    batch: TrajectoryBatch
    requests: list[GenerateRequest] = field(default_factory=list)
    results: list[GenerateResult] = field(default_factory=list)
    summaries: list[bool] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        return Status(int(self.batch.status[0]))

    @property
    def kinds(self) -> list[SessionKind]:
        return [SessionKind(int(kind)) for kind in self.batch.session_kind]

    def tokens(self, session: int) -> slice:
        bounds = self.batch.segment_tokens[self.batch.session_segments]
        return slice(int(bounds[session]), int(bounds[session + 1]))

    def text(self, session: int) -> str:
        return self.run.codec.decode_turn(self.batch.ids[self.tokens(session)].tolist())


Say = Callable[[EpisodeRun, bool], str]
Change = Callable[[GenerateResult], GenerateResult]


def play(
    codec: ChatCodec,
    say: Say,
    *,
    harness: Harness | None = None,
    environment: Errands | None = None,
    max_turns: int = 30,
    max_context: int = 2000,
    max_new_tokens: int = 200,
    routing: bool = False,
    change: Change = lambda result: result,
) -> Played:
    world = environment or Errands()
    run = EpisodeRun(
        episode_id="g0/1",
        task=TASK,
        sample=1,
        seed=77,
        sampling=Sampling(record_routing=routing),
        limits=EpisodeLimits(max_turns, max_context, max_new_tokens),
        harness=harness or SAID,
        codec=codec,
        rewards=RewardSet([RewardPart("success", Success())]),
        tools=tuple(world.tools()),
    )
    played = Played(run, None)  # type: ignore[arg-type]
    step: Action | GenerateRequest | None = run.on_reset(world.reset(TASK.seed), world.state_hash())
    while step is not None:
        if isinstance(step, GenerateRequest):
            played.ended += run.dialogues.take_ended()
            assert run.prompt is not None and step.session_id not in played.ended, "an ended session is not used again"
            played.requests.append(step)
            played.summaries.append(run.prompt.summary)
            played.results.append(change(answer(codec, step, say(run, run.prompt.summary), 3)))
            step = run.on_tokens(played.results[-1])
        else:
            observation = world.step(step)
            step = run.on_step(observation, world.state_hash())
    played.ended += run.dialogues.take_ended()
    assert run.finished is not None
    played.batch = build_group("g0", TASK.task_id, [run.finished])  # validates
    return played


def expert(world: Errands | None = None) -> Say:
    """What the script of the environment says, summaries included."""
    mirror = world or Errands()
    mirror.reset(TASK.seed)

    def say(run: EpisodeRun, summary: bool) -> str:
        if summary:
            return mirror.expert_summary()
        action = mirror.expert_action(Random(0), 0.0)
        mirror.step(action)
        return SAID.render(action)

    return say


def words(*said: str) -> Say:
    """One after another, summaries too."""
    left = list(said)
    return lambda run, summary: left.pop(0)


def check(played: Played, max_context: int, max_turns: int = 30) -> None:
    """The invariants, for any episode that was played."""
    batch, requests, results = played.batch, played.requests, played.results
    model = np.flatnonzero(batch.turn_role == Role.MODEL)
    model = model[np.argsort(batch.turn_number[model])]
    session_of = batch.segment_session()[batch.turn_segment()]
    starts = [played.tokens(q).start for q in range(batch.num_sessions)]
    # Every call continued one session, and its answer stands behind its prompt (tokens in, tokens out).
    assert len(model) == len(results) == len(requests)
    for turn, request, result in zip(model.tolist(), requests, results, strict=True):
        begin, end = int(batch.turn_start[turn]), int(batch.turn_end[turn])
        assert request.input_ids.tolist() == batch.ids[starts[session_of[turn]] : begin].tolist()
        assert result.ids.tolist() == batch.ids[begin:end].tolist()
        assert request.sampling.max_new_tokens >= 1
    # 1: what is not in a turn is context, and a token is sampled in one place only.
    assert not batch.loss_mask[batch.turn < 0].any() and (batch.version[batch.turn < 0] == -1).all()
    assert (batch.version >= 0).sum() == sum(len(result.ids) for result in results)
    # 2: kinds and parents; a COMPRESS session repeats its parent whole.
    for q, kind in enumerate(played.kinds):
        parent = int(batch.session_parent[q])
        if kind is COMPRESS:
            assert played.kinds[parent] is not COMPRESS
            whole = batch.ids[played.tokens(parent)]
            assert batch.ids[played.tokens(q)][: len(whole)].tolist() == whole.tolist()
            if q + 1 < batch.num_sessions:
                assert played.kinds[q + 1] is played.kinds[parent]
                assert batch.session_parent[q + 1] == batch.session_parent[parent]
        elif kind is NORMAL:
            assert parent == -1
        else:
            assert played.kinds[parent] is NORMAL
    # 4: sizes.
    sizes = [played.tokens(q).stop - played.tokens(q).start for q in range(batch.num_sessions)]
    assert max(sizes) <= max_context
    # 5: no more compressions than turns that act.
    acting = played.summaries.count(False)
    assert played.summaries.count(True) <= acting <= max_turns
    # 6: an engine session is one growing dialogue, ended once.
    assert sorted(played.ended) == sorted({request.session_id for request in requests} | set(played.ended))
    last: dict[str, list[int]] = {}
    for request, result in zip(requests, results, strict=True):
        before = last.get(request.session_id, [])
        assert request.input_ids.tolist()[: len(before)] == before, "what the engine has kept is used again"
        last[request.session_id] = [*request.input_ids.tolist(), *result.ids.tolist()]
    # 7: returned spans hold what the parent was told, in a message of the parent.
    for q in np.flatnonzero(batch.session_return[:, 0] >= 0).tolist():
        begin, end = batch.session_return[q].tolist()
        (turn,) = np.flatnonzero((batch.turn_start == begin) & (batch.turn_end == end)).tolist()
        assert session_of[turn] == batch.session_parent[q] and batch.turn_role[turn] == Role.TOOL
        assert "the errand boy said" in played.run.codec.decode_turn(batch.ids[begin:end].tolist())
    counts = played.run.counts.sessions
    assert counts.sessions == batch.num_sessions and counts.compressions == played.kinds.count(COMPRESS)
    again = sum(played.kinds[int(q)] is SUBAGENT for q in batch.session_parent[batch.session_kind == COMPRESS])
    assert played.kinds.count(SUBAGENT) - again <= counts.subagents <= played.kinds.count(SUBAGENT)
    rows = make_rows(batch)
    assert rows.mask.sum() == batch.loss_mask.sum()
    assert len({request.request_id for request in requests}) == len(requests)


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
            for r, summary, turn in zip(played.requests, played.summaries, _sessions(played), strict=True)
            if turn == parent and not summary
        ]
        assert max(prompts) <= 100, "a call over the budget is not made"
        summary = next(r for r, turn in zip(played.results, _sessions(played), strict=True) if turn == q)
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


def _sessions(played: Played) -> list[int]:
    """The session of each answer, in order."""
    batch = played.batch
    model = np.flatnonzero(batch.turn_role == Role.MODEL)
    order = np.argsort(batch.turn_number[model])
    found: list[int] = batch.segment_session()[batch.turn_segment()][model][order].tolist()
    return found


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


# -- summaries -----------------------------------------------------------------------------------------------------
def compressed(codec: ChatCodec, summary: str, change: Change = lambda result: result, **more: object) -> Played:
    """One look, then a summary, then the end."""
    say = words(tool("look", number=3), summary, tool("finish", word="x"))
    played = play(codec, say, harness=harness(50), change=change, **more)  # type: ignore[arg-type]
    check(played, 2000)
    return played


def _repeated(played: Played) -> list[int]:
    """Ids of the summary in the last session: what stands between the opening and the message that follows."""
    batch, codec = played.batch, played.run.codec
    ids = batch.ids[played.tokens(2)].tolist()
    opening = harness().opening(TASK, Errands().reset(TASK.seed), played.run.tools)
    before = codec.opening() + [i for message in opening for i in codec.message(message)]
    turns = np.flatnonzero(batch.turn_start >= played.tokens(2).start)
    resume = int(batch.turn_start[turns[len(opening)]]) - played.tokens(2).start
    inside: list[int] = ids[len(before) : resume]
    return inside


@pytest.mark.parametrize("text", ["at 3 what", "  at 3 what \n", "<think>go walk at 3 what</think>at 3 what", "é at 3"])
def test_the_sampled_ids_of_a_summary_go_on(codec: ChatCodec, text: str) -> None:  # invariant 3
    played = compressed(codec, text)
    assert played.kinds == [NORMAL, COMPRESS, NORMAL] and played.run.counts.sessions.retokenised == 0
    sampled = played.results[1].ids.tolist()
    repeated = _repeated(played)
    opener = codec.generation_prompt()
    assert repeated[: len(opener)] == opener
    kept = repeated[len(opener) :]
    assert sampled[-len(kept) :] == kept and codec.decode_turn(kept).strip() == text.rpartition("</think>")[2].strip()


def test_a_token_across_the_end_of_the_thinking_is_told_anew(codec: ChatCodec, tmp_path: Path) -> None:  # invariant 3
    """A tokenizer that has such a token: ``>at``."""
    import json

    save_tokenizer(tmp_path, codec.tokenizer, codec.template)
    path = tmp_path / "tokenizer.json"
    made = json.loads(path.read_text())
    vocab = made["model"]["vocab"]
    unused = next(word for word, i in sorted(vocab.items(), key=lambda item: -item[1]))
    vocab[">at"] = vocab.pop(unused)
    made["model"]["merges"] = []
    vocab = {word: i for word, i in vocab.items() if len(word) == 1 or word == ">at" or word.startswith("<|")}
    made["model"]["vocab"] = vocab
    path.write_text(json.dumps(made))
    odd = load_codec(tmp_path)
    glued = vocab[">at"]

    def glue(result: GenerateResult) -> GenerateResult:
        ids = result.ids.tolist()
        text = odd.decode_turn(ids)
        if not text.startswith("<think>"):
            return result
        ids = [*odd.encode_turn("<think>x</think")[:-1], glued, *odd.encode_turn(" 3")]
        n = len(ids)
        return GenerateResult(
            result.request_id,
            np.array(ids, np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.int64) + 3,
            result.finish,
        )

    say = words(tool("look", number=3), "<think>x</think>at 3", tool("finish", word="x"))
    played = play(odd, say, harness=harness(60), change=glue)
    check(played, 2000)
    assert played.run.counts.sessions.retokenised == 1
    assert _repeated(played) == [*odd.generation_prompt(), *odd.encode_turn("at 3")]


@pytest.mark.parametrize("text", ["", "  ", "<think>go go"])
def test_a_turn_without_a_summary_leaves_nothing(codec: ChatCodec, text: str) -> None:
    played = compressed(codec, text)
    assert played.status is Status.DONE and _repeated(played) == [] and played.run.counts.malformed == 0
    assert played.run.counts.sessions.empty == 1


def test_a_summary_that_was_cut_off_is_closed(codec: ChatCodec) -> None:
    say = words(tool("look", number=3), "walk " * 30, tool("finish", word="x"))
    played = play(codec, say, harness=harness(50, summary_tokens=4))
    check(played, 2000)
    cut = played.results[1]
    assert len(cut.ids) == 4 and cut.finish is FinishReason.LENGTH
    assert _repeated(played) == [*codec.generation_prompt(), *cut.ids.tolist(), codec.end_id]


def test_an_abort_in_a_summary_keeps_it(codec: ChatCodec) -> None:
    def abort(result: GenerateResult) -> GenerateResult:
        if result.request_id != "g0/1#1":
            return result
        return GenerateResult(
            result.request_id, result.ids[:1], result.logp[:1], result.versions[:1], FinishReason.ABORT
        )

    played = play(codec, words(tool("look", number=3), "at 3"), harness=harness(50), change=abort)
    check(played, 2000)
    assert played.status is Status.ABORTED and played.kinds == [NORMAL, COMPRESS]
    assert not played.batch.loss_mask.any() and played.ended == ["g0/1"]


def test_routing_of_repeated_tokens_is_that_of_their_forward(codec: ChatCodec) -> None:
    """An engine that kept the compressed session sends rows for the new tokens only."""

    def reuse(result: GenerateResult) -> GenerateResult:
        assert result.routed is not None
        start = 30 if result.request_id == "g0/1#1" else 0
        mark = result.routed if start else np.full_like(result.routed, 7)
        return GenerateResult(
            result.request_id, result.ids, result.logp, result.versions, result.finish, mark[start:], start
        )

    say = words(tool("look", number=3), "at 3", tool("finish", word="x"))
    played = play(codec, say, harness=harness(50), change=reuse, routing=True)
    check(played, 2000)
    batch = played.batch
    assert batch.routed is not None and batch.routed_valid is not None
    rows, valid = batch.routed[played.tokens(1)], batch.routed_valid[played.tokens(1)]
    assert (rows[:30] == 7).all() and valid[:30].all()
    assert rows[30:-2, 0, 0].tolist() == [n % 8 for n in range(30, len(rows) - 2)], "the engine's own rows win"


# -- limits and troubles -------------------------------------------------------------------------------------------
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
    assert _sessions(played) == [0, 1, 1, 1, 0] and "No tool call was found" in played.text(1)
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
