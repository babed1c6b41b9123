"""Token-exact merge (P13): the recorded calls of one rollout become its record.

A gateway sees single calls: the whole prompt as token ids, and the ids sampled after it. A call whose prompt starts
with an earlier call's (prompt + sampled ids) continues that call's segment; what stands in between is new observation.
Ids are compared, never text: a history that was tokenised again, cut or rewritten is another sequence of tokens.

Invariants (``tests/trajectory/test_merge.py`` asserts each, ``test_merge_report.py`` 6):

1. Conservation: every sampled token of a kept call stands in exactly one model turn, with its log-prob, version and
   mask 1 (unless the call or the trajectory is not trained). All else has mask 0.
2. Every segment is what the engine read: each model turn stands after exactly the prompt that it was sampled from.
3. The record depends on the calls and their ``order``, not on how they are handed over.
4. A call that extends nothing, or something continued already (a fork), starts a segment with its whole prompt at
   mask 0. Only the first to extend a sequence continues it.
5. A call that sends an unfinished answer back, with nothing added, resumes it: the same turn, its mask included.
6. A prompt that contradicts what was sampled is counted and reported with its position and both ids. The sampled tokens
   stay, trained once, where they were sampled; what the prompt shows instead has mask 0.
7. ``Merging.NONE`` gives the same turns, numbers and routing rows, each answer in a segment of its own.
8. Routing rows stand at their tokens. A segment that repeats a prefix has the rows of the forward that ran it last
   where the engine reused its cache and returned none. A call whose history ran again on other experts goes on as
   ``MergeOptions.rerun`` says (``builder.py``, 6): under ``Rerun.SEGMENT`` in a new segment, as the same turn.
9. Time is linear in the tokens of the calls and of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_ext.trajectory.builder import TrajectoryBuilder
from megatron_ext.trajectory.calls import UNFINISHED, Call, Dedup, unique_calls
from megatron_ext.trajectory.merge_report import Departure, Merged, Placement, Start, counted
from megatron_ext.trajectory.prefix_index import NONE, Found, PrefixIndex
from megatron_ext.trajectory.record import RecordError, Role, SessionKind, Status
from megatron_ext.trajectory.routed_rows import Rerun
from megatron_ext.trajectory.version import UNSAMPLED

Decode = Callable[[Sequence[int]], str]


class Merging(StrEnum):
    PREFIX = "prefix"  # best effort: whatever extends an earlier sequence continues it
    NONE = "none"  # every answer is a segment of its own


@dataclass(frozen=True)
class MergeOptions:
    """``new_session_below``: a call without a session tag that shares fewer leading tokens than this with every other
    one opens a session of its own (an agent with a prompt of its own); 1 asks for nothing in common, 0 keeps all in one
    session. ``rerun``: where a call goes on whose history the engine ran again on other experts."""

    merging: Merging = Merging.PREFIX
    dedup: Dedup = Dedup.REQUEST
    new_session_below: int = 1
    rerun: Rerun = Rerun.FIRST


@dataclass(frozen=True)
class SessionInfo:
    """What the harness says of a session tag: its kind and the tag of the session that spawned it ("" is the session of
    calls without a tag, None is none)."""

    kind: SessionKind = SessionKind.NORMAL
    parent: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How the rollout ended; as ``TrajectoryBuilder.finish`` takes it."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    success: bool = False
    status: Status = Status.DONE


def merge_calls(
    calls: Sequence[Call],
    *,
    trajectory_id: str,
    sample: int,
    harness_id: str,
    outcome: Outcome,
    options: MergeOptions | None = None,
    sessions: Mapping[str, SessionInfo] | None = None,
    decode: Decode | None = None,
) -> Merged:
    """Calls of one rollout as a trajectory of sessions, segments and turns.

    ``sessions`` says what is known of the tags that calls carry; a tag without an entry is a normal session without a
    parent. ``decode`` turns ids into text: it tells re-tokenised answers (drift) from shortened (cut) and replaced ones
    (rewrite), and decides nothing else; without it every contradiction of a sampled token counts as drift. Raises
    ``RecordError`` naming trajectory and request.

    Source: Agent Lightning v1.0 (arXiv 2608.17528), merge rule and de-duplication; forks, sessions, resumed answers and
    request ids are ours.
    """
    options = options or MergeOptions()
    where = f"trajectory {trajectory_id!r}"
    kept, dropped = unique_calls(calls, options.dedup, where)
    builder = TrajectoryBuilder(trajectory_id, sample, harness_id, options.rerun)
    merger = _Merger(where, builder, kept, options, sessions or {}, decode)
    for number in range(len(kept)):
        merger.place(number)
    if not kept:
        builder.open_session()
    finished = builder.finish(outcome.reward, outcome.parts, outcome.success, outcome.status)
    return Merged(
        finished,
        tuple(merger.placements),
        tuple(merger.departures),
        counted(kept, dropped, merger.placements, finished.batch, options.merging is Merging.PREFIX),
    )


@dataclass
class _Segment:
    """``number`` within its session: of the last segment that its calls went on in."""

    session: int
    number: int


@dataclass
class _Turn:
    number: int
    reward: float
    version: int


class _Merger:
    """Places calls one after another, by ``order``."""

    def __init__(
        self,
        where: str,
        builder: TrajectoryBuilder,
        calls: Sequence[Call],
        options: MergeOptions,
        infos: Mapping[str, SessionInfo],
        decode: Decode | None,
    ) -> None:
        self.where, self.builder, self.calls = where, builder, calls
        self.options, self.infos, self.decode = options, infos, decode
        self.placements: list[Placement] = []
        self.departures: list[Departure] = []
        self._indices: dict[str, PrefixIndex] = {}
        self._tagged: dict[str, int] = {}
        self._used: set[int] = set()  # sessions that hold a call
        self._segments: list[_Segment] = []  # one entry a call, as are the turns
        self._turns: list[_Turn] = []

    def place(self, number: int) -> None:
        call = self.calls[number]
        index = self._indices.setdefault(call.session, PrefixIndex())
        found = index.add(number, call.prompt_ids, call.ids)
        session = self._session_of(call, found)
        start = self._start(call, found, session)
        if start is Start.RESUMES or (start is Start.CONTINUES and self.options.merging is Merging.PREFIX):
            segment, told = self._segments[found.parent], found.parent_end
            self.builder.reopen(session, segment.number)
        else:
            fresh = session not in self._used
            segment, told = _Segment(session, 0 if fresh else self.builder.rewrite(session)), 0
        self._used.add(session)
        self._add_prompt(call, session, start, told, found)
        if told == 0 and found.holder != NONE:
            self._inherit_routing(call, segment, found)
        turn = self._resume(call, segment, found) if start is Start.RESUMES else self._answer(call, segment)
        segment.number = self.builder.current(session)
        for name, value in call.labels.items():
            self.builder.label_turn(turn.number, name, value)
        if turn.reward:
            self.builder.set_turn_reward(turn.number, turn.reward)
        self._segments.append(segment)
        self._turns.append(turn)
        self.placements.append(Placement(call.request_id, call.order, start, session, segment.number, turn.number))

    # -- where a call belongs --------------------------------------------------------------------------------------
    def _session_of(self, call: Call, found: Found) -> int:
        """The session of its tag; without one, that of the calls it shares a beginning with."""
        below = self.options.new_session_below
        if call.session:
            return self._open(call.session, ())
        if found.parent != NONE:
            return self._segments[found.parent].session
        if found.holder != NONE and found.shared >= below:
            return self._segments[found.holder].session
        if below == 0 or self._tagged.get("") not in self._used:
            return self._open("", ())
        return self.builder.open_session()

    def _open(self, tag: str, opening: tuple[str, ...]) -> int:
        """The session of a tag, opened after those that spawned it."""
        if tag not in self._tagged:
            if tag in opening:
                raise RecordError(f"{self.where}: sessions {' < '.join((*opening, tag))} spawn one another in a circle")
            info = self.infos.get(tag, SessionInfo())
            parent = None if info.parent is None else self._open(info.parent, (*opening, tag))
            self._tagged[tag] = self.builder.open_session(info.kind, parent)
        return self._tagged[tag]

    def _start(self, call: Call, found: Found, session: int) -> Start:
        if found.parent != NONE and found.free:
            whole = found.parent_end == len(call.prompt_ids)
            unfinished = self.calls[found.parent].finish in UNFINISHED
            return Start.RESUMES if whole and unfinished else Start.CONTINUES
        if session not in self._used:
            return Start.OPENS
        if found.against == NONE:
            return Start.FORK
        other = self.calls[found.against]
        offset = found.shared - len(other.prompt_ids)
        start = Start.FORK if found.parent != NONE else Start.REWRITE
        if offset >= 0:
            start = self._contradiction(call, other, offset)
        self.departures.append(
            Departure(
                call.request_id,
                call.order,
                start,
                found.shared,
                found.other_id,
                int(call.prompt_ids[found.shared]),
                other.order,
                max(offset, -1),
            )
        )
        return start

    def _contradiction(self, call: Call, other: Call, offset: int) -> Start:
        """What a prompt that has another token at ``offset`` of an earlier answer did to it."""
        if self.decode is not None:
            shown = self.decode(call.prompt_ids[len(other.prompt_ids) :].tolist())
            if not shown.startswith(self.decode(other.ids.tolist())):
                return Start.CUT if offset else Start.REWRITE
        return Start.DRIFT

    # -- what it adds ----------------------------------------------------------------------------------------------
    def _add_prompt(self, call: Call, session: int, start: Start, told: int, found: Found) -> None:
        """Prompt tokens from ``told`` on, as context and as the turns of messages that end after what is known: after
        the parent where the call continues one, after all shared tokens otherwise."""
        continues = start is Start.CONTINUES
        known = found.parent_end if continues else found.shared
        for span in call.messages:
            if span.role is Role.MODEL or span.end <= known:
                continue
            if continues and span.start < known:
                raise RecordError(
                    f"{self.where}, {call.name}: its message [{span.start}, {span.end}) begins inside the {known} "
                    f"tokens of {self.calls[found.parent].name}, which it continues"
                )
            self.builder.add_context(session, call.prompt_ids[told : span.start])
            ids = call.prompt_ids[span.start : span.end]
            turn = self.builder.add_message(session, span.role, ids, state_key=call.state_key)
            if span.returns is not None:
                self.builder.set_return(self._open(span.returns, ()), turn)
            told = span.end
        self.builder.add_context(session, call.prompt_ids[told:])

    def _answer(self, call: Call, segment: _Segment) -> _Turn:
        number = self.builder.add_model_turn(
            segment.session,
            call.ids,
            call.logp,
            call.versions,
            state_key=call.state_key,
            action_key=call.action_key,
            trained=call.trained,
            field=call.field,
            routed=call.routed,
            routed_from=call.routed_from,
        )
        return _Turn(number, call.reward, int(call.versions[-1]) if len(call.ids) else UNSAMPLED)

    def _resume(self, call: Call, segment: _Segment, found: Found) -> _Turn:
        begun, turn = self.calls[found.parent], self._turns[found.parent]
        if call.trained != begun.trained:
            raise RecordError(f"{self.where}, {call.name}: trained is {call.trained}, but it resumes {begun.name}")
        if len(call.ids) and call.versions[0] < turn.version:
            raise RecordError(
                f"{self.where}, {call.name}: resumes {begun.name} under older weights (policy version "
                f"{call.versions[0]} after {turn.version}); an answer may resume under newer ones only"
            )
        self.builder.extend_model_turn(
            segment.session,
            call.ids,
            call.logp,
            call.versions,
            action_key=call.action_key or None,
            field=call.field,
            routed=call.routed,
            routed_from=call.routed_from,
        )
        version = int(call.versions[-1]) if len(call.ids) else turn.version
        return _Turn(turn.number, turn.reward + call.reward, version)

    def _inherit_routing(self, call: Call, segment: _Segment, found: Found) -> None:
        """Rows of the shared prefix, up to where the call has its own: the engine had these tokens in its cache, so the
        last forward that ran them is the one whose keys and values the answer was sampled with."""
        limit = found.shared if call.routed is None else min(found.shared, call.routed_from)
        held = self._segments[found.holder]
        self.builder.inherit_routed(segment.session, held.session, held.number, limit)
