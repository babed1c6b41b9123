"""Episodes of several sessions, played for tests, and what any such episode must be.

A real environment with sub-agents, harness, codec and rewards, in this process; the model's words come from a script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from megatron_ext.environments.protocol import Action, ToolCall
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import Success
from megatron_ext.rollout.engine import GenerateRequest, GenerateResult
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling
from megatron_ext.trajectory.builder import build_group
from megatron_ext.trajectory.record import Role, SessionKind, Status, TrajectoryBatch
from megatron_ext.trajectory.rows import make_rows
from tests.helpers.errands import Errands
from tests.helpers.scripted import answer

NORMAL, COMPRESS, SUBAGENT = SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.SUBAGENT
(TASK,) = Errands().tasks("train", 1, start=4)
SAID = ToolHarness(show_schema=False)


def tool(name: str, **arguments: object) -> str:
    return SAID.render(ToolCall(name, arguments))


def harness(budget: int | None = None, **more: object) -> ToolHarness:
    fields: dict[str, object] = {"system": "Go.", "subagent_system": "Errand.", "show_schema": False}
    return ToolHarness(context_budget=budget, **(fields | more))  # type: ignore[arg-type]


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


def sessions_of(played: Played) -> list[int]:
    """The session of each answer, in order."""
    batch = played.batch
    model = np.flatnonzero(batch.turn_role == Role.MODEL)
    order = np.argsort(batch.turn_number[model])
    found: list[int] = batch.segment_session()[batch.turn_segment()][model][order].tolist()
    return found
