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
from typing import Protocol

from megatron_ext.environments.protocol import Action, Observation, ToolSpec
from megatron_ext.trajectory.record import Role
from megatron_ext.trajectory.task import Task


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


class Harness(Protocol):
    @property
    def harness_id(self) -> str:
        """Recorded with every trajectory."""

    def opening(self, task: Task, first: Observation, tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """Messages before the first model turn (system prompt, tool schema, first observation)."""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        """The action in one model turn (decoded text without the stop token); ``tools`` as in ``opening``."""

    def render(self, action: Action) -> str:
        """The text that ``parse`` reads as this action: what a demonstration makes the model say. Raises
        ``HarnessError`` for a kind of action that this harness does not speak."""

    def reply(self, observation: Observation) -> Sequence[Message]:
        """Messages that follow an action."""

    def malformed(self, error: str) -> Sequence[Message]:
        """Messages that follow text which is no action."""
