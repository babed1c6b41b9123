"""Tool-call harness: one call a turn, in the Hermes syntax that Qwen3 speaks.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Invariants: those of ``harness/protocol.py`` and ``harness/compression.py``; and
1. a ``ToolCall`` that ``parse`` returns names one of ``tools`` and its arguments fit that tool's schema;
2. a call inside the model's thinking is never made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_ext.environments.protocol import Action, Observation, ToolCall, ToolSpec
from megatron_ext.harness.answers import PREPARED
from megatron_ext.harness.compression import Compressing
from megatron_ext.harness.fields import Run, thinking_and_text
from megatron_ext.harness.protocol import AnswerCall, HarnessError, Message, Parsed
from megatron_ext.harness.schema import check_schema, first_problem, hint
from megatron_ext.harness.thinking import after_thinking
from megatron_ext.trajectory.record import Field, Role, SessionKind
from megatron_ext.trajectory.task import Task

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
SYNTAX = f'{CALL_OPEN}{{"name": NAME, "arguments": {{...}}}}{CALL_CLOSE}'


@dataclass(frozen=True)
class ToolHarness(Compressing):
    """Observations are tool messages; the action is the one tool call of the model's turn.

    Attributes:
        system: system prompt, before the tool schemas.
        show_schema: put the tools' schemas and the syntax into the system message; off for models taught on them.
        subagent_system: system prompt of a sub-agent; None: the same.
        answer_tool: tool that gives the final answer. When set, the gold answer ``task.data["answer"]`` is prepared for
            scoring (``harness/answers.py``).
        answer_argument: the argument that holds it; None: the only one that the tool requires.
    """

    system: str = ""
    show_schema: bool = True
    subagent_system: str | None = None
    answer_tool: str | None = None
    answer_argument: str | None = None

    @property
    def harness_id(self) -> str:
        return "tools"

    @property
    def prepares(self) -> frozenset[str]:
        return frozenset() if self.answer_tool is None else PREPARED

    def opening(
        self,
        task: Task,
        first: Observation,
        tools: Sequence[ToolSpec],
        kind: SessionKind = SessionKind.NORMAL,
    ) -> Sequence[Message]:
        """Raises ``HarnessError`` when the environment offers no tools, two of one name, or a schema that is none."""
        if not tools:
            raise HarnessError(f"task {task.task_id!r}: environment {task.environment!r} has no tools; use TextHarness")
        names = [tool.name for tool in tools]
        for tool in tools:
            if names.count(tool.name) > 1:
                raise HarnessError(f"environment {task.environment!r}: two tools are named {tool.name!r}")
            try:
                check_schema(tool.parameters, f"environment {task.environment!r}, tool {tool.name!r}")
            except ValueError as error:
                raise HarnessError(str(error)) from error
        own = kind is SessionKind.SUBAGENT and self.subagent_system is not None
        prompt = (self.subagent_system or "") if own else self.system
        parts = [prompt] if prompt else []
        if self.show_schema:
            parts.append(_describe(tools))
        system = (Message(Role.SYSTEM, "\n\n".join(parts)),) if parts else ()
        return (*system, Message(Role.USER, first.text))

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        said = after_thinking(text)
        if said is None:
            return Parsed(None, "The thinking was not closed with </think>, so there is no tool call.")
        calls = said.count(CALL_OPEN)
        if calls == 0:
            return Parsed(None, f"No tool call was found. Write {SYNTAX}.")
        if calls > 1:
            return Parsed(None, f"{calls} tool calls were found, one a turn is allowed.")
        body, closed, rest = said.partition(CALL_OPEN)[2].partition(CALL_CLOSE)
        if not closed:
            return Parsed(None, f"The tool call was not closed with {CALL_CLOSE}.")
        if rest.strip():
            return Parsed(None, f"Nothing may follow {CALL_CLOSE}.")
        return _read_call(body, tools)

    def render(self, action: Action) -> str:
        """Raises ``HarnessError`` for free text: this harness speaks tool calls."""
        if not isinstance(action, ToolCall):
            raise HarnessError(
                f"the action is free text ({action[:40]!r}), which ToolHarness cannot say; use TextHarness"
            )
        call = json.dumps({"name": action.name, "arguments": dict(action.arguments)}, ensure_ascii=False)
        return f"{CALL_OPEN}{call}{CALL_CLOSE}"

    def reply(self, observation: Observation) -> Sequence[Message]:
        return (Message(Role.TOOL, observation.text),)

    def malformed(self, error: str) -> Sequence[Message]:
        return (Message(Role.TOOL, f"Error: {error}"),)

    def fields(self, text: str) -> Sequence[Run]:
        runs = thinking_and_text(text)
        said = runs[-1][0] if runs[-1][1] is Field.TEXT else len(text)
        begin = text.find(CALL_OPEN, said)
        if begin < 0:
            return runs
        close = text.find(CALL_CLOSE, begin)
        after = [] if close < 0 else [(close + len(CALL_CLOSE), Field.TEXT)]
        before = [run for run in runs if run[0] < begin]
        return [*before, (begin, Field.TOOL_USE), *after]

    def answer_call(self, task: Task, tools: Sequence[ToolSpec]) -> AnswerCall | None:
        """Raises ``HarnessError`` when the environment lacks the tool, or the gold answer does not fit its schema."""
        if self.answer_tool is None:
            return None
        where = f"environment {task.environment!r}, harness.answer_tool {self.answer_tool!r}"
        tool = next((one for one in tools if one.name == self.answer_tool), None)
        if tool is None:
            raise HarnessError(f"{where}: no such tool{hint(self.answer_tool, [one.name for one in tools])}")
        properties: Mapping[str, Any] = tool.parameters.get("properties", {})
        required = list(tool.parameters.get("required", ()))
        name = self.answer_argument or (required[0] if len(required) == 1 else "")
        if name not in properties:
            raise HarnessError(
                f"{where}: name the argument of the answer in harness.answer_argument{hint(name, list(properties))}"
            )
        gold = task.data.get("answer")
        if gold is None:
            return AnswerCall()
        problem = first_problem(gold, properties[name], f"task {task.task_id!r}: its gold answer")
        if problem:
            raise HarnessError(f"{where}: {problem}")
        value = json.dumps(gold, ensure_ascii=False)
        text = self.render(ToolCall(tool.name, {name: gold}))
        # The value is the last thing in the call; the quotes of a string are not the answer's.
        start = text.rindex(value)
        quote = isinstance(gold, str)
        return AnswerCall(text, start + quote, start + len(value) - quote)


def _describe(tools: Sequence[ToolSpec]) -> str:
    """Tool schemas as the chat models know them (one JSON object a line between ``<tools>`` tags), and the syntax."""
    lines = [
        json.dumps(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            },
            ensure_ascii=False,
        )
        for tool in tools
    ]
    return "\n".join(["# Tools", "<tools>", *lines, "</tools>", f"Call one tool a turn: {SYNTAX}"])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_call(body: str, tools: Sequence[ToolSpec]) -> Parsed:
    try:
        call = json.loads(body, parse_constant=_no_constant)
        # What JSON can spell but nothing after this can carry: 1e999 (infinite), and half of a surrogate pair.
        json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError:
        return Parsed(None, "The tool call is not valid JSON: it is nested too deeply.")
    except json.JSONDecodeError as error:
        return Parsed(None, f"The tool call is not valid JSON: {error.msg} at character {error.pos}.")
    except UnicodeEncodeError:
        return Parsed(None, "The tool call holds half of a surrogate pair, which is no text.")
    except ValueError as error:  # a constant such as NaN, or a number that is infinite or of thousands of digits
        return Parsed(None, f"The tool call is not valid JSON: {str(error)[:80]}.")
    if not isinstance(call, dict):
        return Parsed(None, f"The tool call must be a JSON object: {SYNTAX}.")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str):
        return Parsed(None, 'The tool call lacks "name", the name of a tool.')
    tool = next((one for one in tools if one.name == name), None)
    if tool is None:
        return Parsed(None, f"There is no tool {name[:60]!r}{hint(name[:60], [one.name for one in tools])}.")
    if not isinstance(arguments, dict):
        return Parsed(None, f'The call of {name!r} lacks "arguments", a JSON object.')
    if len(call) > 2:
        extra = next(key for key in call if key not in ("name", "arguments"))
        return Parsed(None, f'The call of {name!r} may hold "name" and "arguments" only, not {extra[:60]!r}.')
    try:
        problem = first_problem(arguments, tool.parameters, f"The call of {name!r}")
    except RecursionError:
        problem = f"The arguments of {name!r} are nested too deeply."
    return Parsed(None, problem) if problem else Parsed(ToolCall(name, arguments))
