"""Harness protocol: turns observations into messages and model text into actions.

Invariants (contract test: ``tests/harness/test_contract.py``):

1. ``parse`` never raises: text that is not an action gives ``Parsed(action=None, error=...)``, whose error becomes the
   environment message that the model sees next.
2. ``parse(render(action)).action == action``.
3. A harness holds no state between calls: the same arguments give the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_ext.environments.protocol import Action, Observation, ToolSpec
from megatron_ext.trajectory.record import Role, SessionKind
from megatron_ext.trajectory.task import Task

if TYPE_CHECKING:
    from megatron_ext.harness.fields import Run


class HarnessError(ValueError):
    """Harness and environment do not fit: the message names both and what to change."""


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Parsed:
    """``action`` is None when ``error`` says why the text is no action."""

    action: Action | None
    error: str = ""


@dataclass(frozen=True)
class AnswerCall:
    """A turn that gives the gold answer. ``text[start:end]`` is the answer; ``end`` 0: the task has none."""

    text: str = ""
    start: int = 0
    end: int = 0


class Harness(Protocol):
    @property
    def harness_id(self) -> str:
        """Recorded with every trajectory."""

    @property
    def context_budget(self) -> int | None:
        """Tokens of a prompt beyond which the dialogue is compressed before the next call; None: never."""

    @property
    def summary_tokens(self) -> int | None:
        """Longest summary; None: as long as a turn may be."""

    @property
    def prepares(self) -> frozenset[str]:
        """Names of the ids that it makes ready for scoring (the record's ``prepared``): those of ``answers.py`` where
        ``answer_call`` gives one, else none."""

    def opening(
        self,
        task: Task,
        first: Observation,
        tools: Sequence[ToolSpec],
        kind: SessionKind = SessionKind.NORMAL,
    ) -> Sequence[Message]:
        """Messages before the first model turn (system prompt, tool schema, first observation). ``SUBAGENT``: of a
        sub-agent, whose own prompt the observation is."""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        """The action in one model turn (decoded text without the stop token); ``tools`` as in ``opening``."""

    def render(self, action: Action) -> str:
        """The text that ``parse`` reads as this action: what a demonstration makes the model say. Raises
        ``HarnessError`` for a kind of action that this harness does not speak."""

    def reply(self, observation: Observation) -> Sequence[Message]:
        """Messages that follow an action."""

    def malformed(self, error: str) -> Sequence[Message]:
        """Messages that follow text which is no action."""

    def fields(self, text: str) -> Sequence[Run]:
        """Where thinking, tool use and text begin in one model turn; the first run begins at 0."""

    def compress(self) -> Sequence[Message]:
        """Messages that ask the model for a summary of the dialogue so far."""

    def read_summary(self, text: str) -> str:
        """The summary in the model's answer, a substring of it; empty when there is none. Never raises."""

    def resume(self) -> Sequence[Message]:
        """Messages that follow the summary in the new session."""

    def answer_call(self, task: Task, tools: Sequence[ToolSpec]) -> AnswerCall | None:
        """The turn that would give the task's gold answer, for scoring; None when the harness prepares none. Raises
        ``HarnessError`` when it was told to and cannot."""
