"""Free-text harness: what the model says is the action.

Invariants: those of ``harness/protocol.py`` and ``harness/compression.py``; and a stripped text without thinking is its
own action.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.environments.protocol import Action, Observation, ToolCall, ToolSpec
from megatron_ext.harness.compression import Compressing
from megatron_ext.harness.fields import Run, thinking_and_text
from megatron_ext.harness.protocol import AnswerCall, HarnessError, Message, Parsed
from megatron_ext.harness.thinking import after_thinking
from megatron_ext.trajectory.record import Role, SessionKind
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class TextHarness(Compressing):
    """Observations are user messages; the action is the model's text, stripped, without leading thinking.

    Attributes:
        system: system prompt; empty = no system message (unless tools are shown).
        show_tools: list the environment's tools in the system message, for environments that read calls as text.
        subagent_system: system prompt of a sub-agent; None: the same.
    """

    system: str = ""
    show_tools: bool = False
    subagent_system: str | None = None

    @property
    def harness_id(self) -> str:
        return "text"

    @property
    def prepares(self) -> frozenset[str]:
        return frozenset()

    def opening(
        self,
        task: Task,
        first: Observation,
        tools: Sequence[ToolSpec],
        kind: SessionKind = SessionKind.NORMAL,
    ) -> Sequence[Message]:
        own = kind is SessionKind.SUBAGENT and self.subagent_system is not None
        prompt = (self.subagent_system or "") if own else self.system
        parts = [prompt] if prompt else []
        if self.show_tools and tools:
            lines = (f"- {tool.name} {json.dumps(dict(tool.parameters))}: {tool.description}" for tool in tools)
            parts.append("\n".join(["Tools:", *lines]))
        system = (Message(Role.SYSTEM, "\n\n".join(parts)),) if parts else ()
        return (*system, Message(Role.USER, first.text))

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        action = after_thinking(text)
        if action is None:
            return Parsed(None, "The thinking was not closed with </think>, so there is no action.")
        if not action:
            return Parsed(None, "The action was empty. Say what to do.")
        return Parsed(action)

    def render(self, action: Action) -> str:
        """Raises ``HarnessError`` for a tool call: this harness speaks free text."""
        if isinstance(action, ToolCall):
            raise HarnessError(
                f"the action is a call of tool {action.name!r}, which TextHarness cannot say; use ToolHarness"
            )
        return action

    def reply(self, observation: Observation) -> Sequence[Message]:
        return (Message(Role.USER, observation.text),)

    def malformed(self, error: str) -> Sequence[Message]:
        return (Message(Role.USER, error),)

    def fields(self, text: str) -> Sequence[Run]:
        return thinking_and_text(text)

    def answer_call(self, task: Task, tools: Sequence[ToolSpec]) -> AnswerCall | None:
        """None: it prepares no answers."""
        return None
