"""The sessions of one episode: which dialogue the agent is in, when it is compressed, and what is recorded where.

A trajectory is one main dialogue and those of its sub-agents. A dialogue is one session, or several when it is
compressed:

    session 0  NORMAL               opening, turns, the message that brings it over the budget
    session 1  COMPRESS of 0        all of session 0 (repeated), the request for a summary, the summary
    session 2  NORMAL               opening, the summary (repeated), turns, a call that spawns
    session 3  SUBAGENT of 2        its own opening, turns, its report
               (what session 3 returned is a message of session 2, which goes on)

Invariants (``tests/rollout/test_dialogues.py``, ``test_dialogue_summaries.py``, ``test_dialogue_limits.py``):

1. A session begins with its opening or with the ids that it repeats; what is repeated is context (mask 0, turn -1), and
   every model token is in one turn of one session.
2. The session behind a compression is of the compressed one's kind and parent, and a COMPRESS session's parent is the
   session that it compressed.
3. The ids of the summary in the new session are those that were sampled. Only where one token holds both the end of the
   thinking and the beginning of the summary is the summary's text tokenised anew (``counts.retokenised``).
4. No session is longer than ``max_context``: what does not fit, with room to answer it, is not recorded.
5. A session without a model turn is never compressed, so that there are no more compressions than other model turns.
6. Each dialogue has one engine session at a time; the compression goes on in that of the session it compresses. One
   that nothing more will come of is given by ``take_ended`` once.
7. A returned span is the message of the parent that holds the sub-agent's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_ext.harness.fields import thinking_and_text, token_fields
from megatron_ext.harness.protocol import Harness, Message
from megatron_ext.harness.template import ChatCodec
from megatron_ext.rollout.engine import GenerateResult
from megatron_ext.trajectory.builder import TrajectoryBuilder
from megatron_ext.trajectory.record import Field, Role, SessionKind

Encoded = Sequence[tuple[Role, list[int]]]


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked next: ``ids`` int32 [P]; ``room`` tokens for the answer, at least what was wanted;
    ``session`` of the engine; ``summary``: the answer is a summary and no action."""

    ids: NDArray[np.int32]
    room: int
    session: str
    summary: bool


@dataclass(frozen=True)
class SessionCounts:
    """``sessions`` of all kinds, ``compressions``, sub-agents sent (``subagents``), summaries that went on as text, not
    as the ids that were sampled (``retokenised``), and turns that held no summary (``empty``)."""

    sessions: int = 0
    compressions: int = 0
    subagents: int = 0
    retokenised: int = 0
    empty: int = 0

    def __add__(self, other: SessionCounts) -> SessionCounts:
        return SessionCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class _Dialogue:
    """``session``: the current one. ``answered``: it holds a model turn. ``parent``: the session that spawned it."""

    kind: SessionKind
    parent: int | None
    opening: Sequence[Message]
    session: int
    engine: str
    answered: bool = False


class Dialogues:
    """The dialogues of one episode, the innermost last. Records into ``builder``."""

    def __init__(
        self,
        builder: TrajectoryBuilder,
        codec: ChatCodec,
        harness: Harness,
        *,
        max_context: int,
        least: Callable[[bool], int] = lambda summary: 1,
    ) -> None:
        """``least(summary)``: tokens that the next answer must at least have room for."""
        self._builder, self._codec, self._harness = builder, codec, harness
        self._max_context, self._least = max_context, least
        self._stack: list[_Dialogue] = []
        self._compressing: int | None = None
        self._returning: int | None = None
        self._engines = 0
        self._ended: list[str] = []
        self.counts = SessionCounts()

    @property
    def depth(self) -> int:
        """Sub-agents around the agent's next turn: 0 in the main dialogue."""
        return len(self._stack) - 1

    @property
    def session(self) -> int:
        """The session that the next model turn belongs to."""
        return self._stack[-1].session if self._compressing is None else self._compressing

    # -- dialogues -------------------------------------------------------------------------------------------------
    def open(self, opening: Sequence[Message], state_key: int) -> Prompt | None:
        """Begins a dialogue: the main one, or a sub-agent's inside the current one. None: its opening does not fit."""
        parent = self._stack[-1].session if self._stack else None
        kind = SessionKind.NORMAL if parent is None else SessionKind.SUBAGENT
        self._count(subagents=int(parent is not None))
        self._stack.append(_Dialogue(kind, parent, opening, self._begin(kind, parent), self._engine()))
        return self._ask(self._encoded(opening), state_key)

    def close(self) -> None:
        """Ends the sub-agent's dialogue; the next messages are what its parent gets to see of it."""
        closed = self._stack.pop()
        self._ended.append(closed.engine)
        self._returning = closed.session

    def end(self) -> None:
        """Ends all of them."""
        if not self._engines:  # the environment never came up: a trajectory has a session nevertheless
            self._builder.open_session()
            self._count(sessions=1)
        while self._stack:
            self._ended.append(self._stack.pop().engine)

    def take_ended(self) -> list[str]:
        """Engine sessions that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- calls -----------------------------------------------------------------------------------------------------
    def say(self, messages: Sequence[Message], state_key: int) -> Prompt | None:
        """Records the messages in the current dialogue, and what the model is asked then: its next turn, or a summary.
        None, and nothing recorded: they do not fit."""
        dialogue, budget, encoded = self._stack[-1], self._harness.context_budget, self._encoded(messages)
        if budget is not None and dialogue.answered:
            prompt = len(self._builder.prompt_ids(dialogue.session)) + len(self._codec.generation_prompt())
            if prompt + _size(encoded) > budget:
                return self._compress(dialogue, encoded, state_key)
        return self._ask(encoded, state_key)

    def answered(self, result: GenerateResult, text: str, state_key: int, action_key: int) -> int:
        """Records a model turn that says ``text``. Returns its number."""
        runs = thinking_and_text(text) if self._compressing is not None else self._harness.fields(text)
        ids, session = result.ids.tolist(), self.session
        said = ids[:-1] if ids and ids[-1] in self._codec.stop_ids else ids
        fields = np.full(len(ids), int(Field.OTHER), dtype=np.int8)
        fields[: len(said)] = token_fields(self._codec.pieces(said), runs)
        turn = self._builder.add_model_turn(
            session,
            result.ids,
            result.logp,
            result.versions,
            state_key=state_key,
            action_key=action_key,
            field=fields,
            routed=result.routed,
            routed_from=result.routed_from,
            rerun=result.rerun,
        )
        self._builder.add_context(session, self._codec.close_turn(ids))
        if self._compressing is None:
            self._stack[-1].answered = True
        elif result.routed is not None:
            # Tokens whose forward the engine had kept from the compressed session: their experts are recorded there.
            self._builder.repeat_routed(session, self._stack[-1].session)
        return turn

    def resume(self, sampled: Sequence[int], text: str, state_key: int) -> Prompt | None:
        """After the turn that summed up: goes on in a new session from the opening and the summary. None: that does not
        fit."""
        dialogue = self._stack[-1]
        self._compressing = None
        self._ended.append(dialogue.engine)
        dialogue.session, dialogue.engine = self._begin(dialogue.kind, dialogue.parent), self._engine()
        dialogue.answered = False
        opening, resume = self._encoded(dialogue.opening), self._encoded(self._harness.resume())
        summary = self._summary(sampled, text)
        if not summary:  # nothing was said; the new session has to do without
            self._count(empty=1)
            return self._ask([*opening, *resume], state_key)
        repeated = [*self._codec.generation_prompt(), *summary, *self._codec.close_turn(summary)]
        return self._ask(resume, state_key, opening, repeated)

    # -- inside ----------------------------------------------------------------------------------------------------
    def _begin(self, kind: SessionKind, parent: int | None) -> int:
        session = self._builder.open_session(kind, parent)
        self._builder.add_context(session, self._codec.opening())
        self._count(sessions=1)
        return session

    def _count(self, **more: int) -> None:
        self.counts += SessionCounts(**more)

    def _engine(self) -> str:
        name = self._builder.trajectory_id
        self._engines += 1
        return name if self._engines == 1 else f"{name}~{self._engines - 1}"

    def _encoded(self, messages: Sequence[Message]) -> Encoded:
        return [(message.role, self._codec.message(message)) for message in messages]

    def _ask(
        self,
        messages: Encoded,
        state_key: int,
        before: Encoded = (),
        repeated: Sequence[int] = (),
    ) -> Prompt | None:
        """Records ``before``, the repeated ids and the messages, if they fit with an answer to them."""
        dialogue = self._stack[-1]
        room = self._room(dialogue.session, _size(before) + len(repeated) + _size(messages))
        if room < self._least(False):
            return None
        self._record(dialogue.session, before, state_key)
        self._builder.add_context(dialogue.session, repeated)
        self._record(dialogue.session, messages, state_key)
        return self._prompt(dialogue, dialogue.session, room)

    def _compress(self, dialogue: _Dialogue, messages: Encoded, state_key: int) -> Prompt | None:
        request = self._encoded(self._harness.compress())
        room = self._room(dialogue.session, _size(messages) + _size(request))
        if room < self._least(True):
            return None
        self._record(dialogue.session, messages, state_key)
        self._compressing = self._builder.open_session(SessionKind.COMPRESS, dialogue.session)
        self._count(sessions=1, compressions=1)
        self._builder.add_context(self._compressing, self._builder.prompt_ids(dialogue.session))
        self._record(self._compressing, request, state_key)
        longest = self._harness.summary_tokens
        return self._prompt(dialogue, self._compressing, room if longest is None else min(room, longest))

    def _room(self, session: int, coming: int) -> int:
        """Tokens left for an answer behind ``coming`` more; what stands after a turn that was cut off has its place."""
        taken = len(self._builder.prompt_ids(session)) + coming
        taken += len(self._codec.generation_prompt()) + len(self._codec.close_turn([]))
        return self._max_context - taken

    def _record(self, session: int, messages: Encoded, state_key: int) -> None:
        for role, ids in messages:
            turn = self._builder.add_message(session, role, ids, state_key=state_key)
            if self._returning is not None:
                self._builder.set_return(self._returning, turn)
                self._returning = None

    def _prompt(self, dialogue: _Dialogue, session: int, room: int) -> Prompt:
        self._builder.add_context(session, self._codec.generation_prompt())
        summary = self._compressing is not None
        return Prompt(self._builder.prompt_ids(session), room, dialogue.engine, summary)

    def _summary(self, sampled: Sequence[int], text: str) -> list[int]:
        """Ids of the summary in the sampled turn, with the end token; none when the turn has no summary."""
        summary = self._harness.read_summary(text)
        if not summary:
            return []
        ids = list(sampled)
        if ids and ids[-1] in self._codec.stop_ids:
            ids.pop()
        begin = text.rfind(summary)  # the thinking before it may hold the same words
        lengths = np.array([len(piece) for piece in self._codec.pieces(ids)])
        ends = np.cumsum(lengths)
        # A token that ends inside a character has an empty piece, and begins where the character does.
        kept = ids[int(np.argmax((ends > begin) | (ends - lengths >= begin))) :]
        if self._codec.decode_turn(kept).strip() != summary:
            self._count(retokenised=1)
            return self._codec.encode_turn(summary)
        return [*kept, self._codec.end_id]


def _size(messages: Encoded) -> int:
    return sum(len(ids) for _, ids in messages)
