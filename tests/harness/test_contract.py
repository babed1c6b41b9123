"""Harness contract: runs against every harness (invariants of ``megatron_ext/harness/protocol.py``)."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.environments.protocol import Observation, ToolCall, ToolSpec
from megatron_ext.harness.answers import prepared_answer
from megatron_ext.harness.protocol import AnswerCall, Harness, Parsed
from megatron_ext.harness.schema import first_problem
from megatron_ext.harness.text import TextHarness
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.trajectory.record import Role, SessionKind
from megatron_ext.trajectory.task import Task
from tests.helpers.scripted import small_codec

TASK = Task("calc/train/1", "calc", 1, "train")
ADD = ToolSpec(
    "add",
    "Adds two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number", "maximum": 99}, "unit": {"enum": ["m", "s"]}},
        "required": ["a", "b"],
    },
)
SUBMIT = ToolSpec(
    "submit",
    "Ends the task.",
    {"type": "object", "properties": {"answers": {"type": "array", "items": {"type": "string"}}}},
)
NONE = ToolSpec("look", "Looks around.", {"type": "object", "properties": {}})
TOOLS = (ADD, SUBMIT, NONE)
HARNESSES: list[Harness] = [
    TextHarness(),
    TextHarness(system="Be brief.", show_tools=True),
    ToolHarness(),
    ToolHarness(system="Compute.", show_schema=False),
    ToolHarness(system="Compute.", subagent_system="Help.", context_budget=500, summary_tokens=9, answer_tool="add"),
    TextHarness(
        system="Be brief.", subagent_system="", context_budget=1, compress_prompt="Sum up.", resume_prompt="On."
    ),
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
calls = st.fixed_dictionaries(
    {"name": st.sampled_from(["add", "submit", "look", "ad", ""]) | json_values},
    optional={
        "arguments": json_values
        | st.dictionaries(st.sampled_from(["a", "b", "unit", "answers", "c"]), json_values, max_size=3),
        "extra": json_values,
    },
).map(json.dumps)
fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        " ",
        "NaN",
        "[" * 5000,
        "9" * 5000,
    ]
)
garbage = st.text(max_size=60) | st.lists(fragments | calls | st.text(max_size=5), max_size=8).map("".join)
well_wrapped = (calls | json_values.map(json.dumps) | fragments).map(lambda body: f"<tool_call>{body}</tool_call>")


def fits(action: ToolCall, tools: Sequence[ToolSpec]) -> bool:
    spec = next(tool for tool in tools if tool.name == action.name)
    return first_problem(dict(action.arguments), spec.parameters, "call") == ""


@pytest.mark.parametrize("harness", HARNESSES, ids=repr)
@settings(max_examples=300, deadline=None)
@given(text=garbage | well_wrapped)
@example(text="")
@example(text="<tool_call>" + "[" * 100_000 + "</tool_call>")
@example(text='<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + ', "b": 1}}</tool_call>')
@example(text='<tool_call>{"name": "submit", "arguments": {"answers": ' + "[" * 900 + "]" * 900 + "}}</tool_call>")
def test_parse_never_raises(harness: Harness, text: str) -> None:
    parsed = harness.parse(text, TOOLS)
    assert (parsed.action is None) == bool(parsed.error)
    assert len(parsed.error.encode()) < 400 and "\n" not in parsed.error
    if isinstance(parsed.action, ToolCall):
        assert fits(parsed.action, TOOLS)
    if parsed.error:
        (message,) = harness.malformed(parsed.error)
        assert parsed.error in message.content and message.role in (Role.USER, Role.TOOL)


@pytest.mark.parametrize("harness", HARNESSES, ids=repr)
def test_no_state_between_calls(harness: Harness) -> None:
    twin, first = copy.deepcopy(harness), Observation("You wake up.")

    def everything() -> list[object]:
        said: list[object] = [harness.opening(TASK, first, TOOLS, kind) for kind in SessionKind]
        said += [harness.parse("go", TOOLS), harness.reply(first), harness.compress(), harness.resume()]
        return [*said, harness.fields("go"), harness.read_summary("go")]

    once = everything()
    for text in ("", "<tool_call>{}</tool_call>", "look"):
        harness.parse(text, TOOLS)
        harness.malformed("no")
    assert once == everything()
    assert harness == twin and pickle.loads(pickle.dumps(harness)) == harness
    assert harness.harness_id


@pytest.mark.parametrize("harness", HARNESSES, ids=repr)
def test_messages_carry_the_observation_and_no_model_turn(harness: Harness) -> None:
    for kind in (SessionKind.NORMAL, SessionKind.SUBAGENT):
        opening = harness.opening(TASK, Observation("You wake up."), TOOLS, kind)
        assert opening[-1].content == "You wake up." and opening[-1].role is Role.USER
        assert all(message.role is Role.SYSTEM for message in opening[:-1])
    reply = harness.reply(Observation("It rains."))
    assert [message.content for message in reply] == ["It rains."]
    assert all(message.role is not Role.MODEL for message in [*opening, *reply, *harness.compress(), *harness.resume()])


@pytest.mark.parametrize("harness", HARNESSES, ids=repr)
@given(text=garbage)
def test_a_summary_is_what_the_turn_says(harness: Harness, text: str) -> None:
    summary = harness.read_summary(text)
    assert summary in text and summary == summary.strip()
    assert harness.compress() and harness.resume()
    assert harness.context_budget is None or harness.context_budget >= 1


def test_a_sub_agent_has_a_system_prompt_of_its_own() -> None:
    first, sub = Observation("Hi"), SessionKind.SUBAGENT
    for make in (TextHarness, lambda **more: ToolHarness(show_schema=False, **more)):
        said = [make(system="A", subagent_system=own).opening(TASK, first, TOOLS, sub) for own in (None, "", "B")]
        assert [[message.content for message in messages] for messages in said] == [["A", "Hi"], ["Hi"], ["B", "Hi"]]
        assert make(system="A", subagent_system="B").opening(TASK, first, TOOLS)[0].content == "A"


def test_the_gold_answer_as_a_call() -> None:
    task = Task("calc/train/1", "calc", 1, "train", {"answer": ["a", "b\n"]})
    harness = ToolHarness(answer_tool="submit", answer_argument="answers")
    call = harness.answer_call(task, TOOLS)
    assert call is not None and call.text[call.start : call.end] == '["a", "b\\n"]'
    assert harness.parse(call.text, TOOLS).action == ToolCall("submit", {"answers": ["a", "b\n"]})
    say = ToolSpec("say", "", {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
    for gold, cut in (('x"y', 'x\\"y'), ("say", "say"), ("", ""), ("é", "é")):
        task = Task("calc/train/1", "calc", 1, "train", {"answer": gold})
        call = ToolHarness(answer_tool="say").answer_call(task, (say,))
        assert (
            call is not None and call.text[call.start : call.end] == cut and call.text[call.end :] == '"}}</tool_call>'
        )
    assert ToolHarness(answer_tool="say").answer_call(TASK, (say,)) == AnswerCall(), "no gold answer"
    for none in (ToolHarness(), TextHarness()):
        assert none.answer_call(task, (say,)) is None and none.prepares == frozenset()


def test_a_harness_prepares_what_it_says(tmp_path: Path) -> None:
    codec = small_codec(tmp_path)
    task = Task("calc/train/1", "calc", 1, "train", {"answer": ["a"]})
    for harness in (*HARNESSES, ToolHarness(answer_tool="submit", answer_argument="answers")):
        one = ToolSpec("add", "", {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
        call = harness.answer_call(task, (one, SUBMIT))
        assert harness.prepares == (set() if call is None else set(prepared_answer(codec, call)))


def test_text_action_is_the_stripped_text() -> None:
    harness = TextHarness()
    assert harness.parse("  take lamp\n", ()) == Parsed("take lamp")
    assert harness.parse("<think>left or right?</think>\n\ngo left", ()) == Parsed("go left")
    assert harness.parse("hmm, left</think>go left", ()) == Parsed("go left")
    assert harness.parse("say <think> twice", ()) == Parsed("say <think> twice")
    assert "not closed" in harness.parse("<think>go left", ()).error
    for text in ("", " \n", "<think>x</think>  "):
        assert "empty" in harness.parse(text, ()).error


def test_text_prompt_shows_tools_only_when_asked() -> None:
    first = Observation("Hi")
    assert len(TextHarness().opening(TASK, first, TOOLS)) == 1
    (system, _) = TextHarness(show_tools=True).opening(TASK, first, TOOLS)
    assert all(tool.name in system.content for tool in TOOLS)


def test_tool_prompt_shows_each_schema_as_json() -> None:
    system, _ = ToolHarness(system="Compute.").opening(TASK, Observation("2+2?"), TOOLS)
    body = system.content.split("<tools>\n")[1].split("\n</tools>")[0]
    shown = [json.loads(line)["function"] for line in body.split("\n")]
    assert [(one["name"], one["parameters"]) for one in shown] == [(t.name, dict(t.parameters)) for t in TOOLS]
    assert system.content.startswith("Compute.")


def test_tool_prompt_refuses_what_it_cannot_serve() -> None:
    harness, first = ToolHarness(), Observation("")
    with pytest.raises(ValueError, match="'calc' has no tools; use TextHarness"):
        harness.opening(TASK, first, ())
    with pytest.raises(ValueError, match="two tools are named 'look'"):
        harness.opening(TASK, first, (NONE, NONE))
    wrong = ToolSpec("f", "", {"type": "object", "properties": {"x": {"type": "int"}}})
    with pytest.raises(ValueError, match=r"tool 'f'.x: JSON schema: unknown type 'int'"):
        harness.opening(TASK, first, (wrong,))


def call(name: object, arguments: object, **more: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments, **more})}</tool_call>"


GOOD = ToolCall("add", {"a": 1, "b": 2.5})


@pytest.mark.parametrize(
    "text",
    [
        call("add", {"a": 1, "b": 2.5}),
        f"\n I will add. {call('add', {'a': 1, 'b': 2.5})}\n ",
        '<tool_call>\n\n{ "arguments" : {"b":2.5,\n"a":1}, "name":"add" }\n</tool_call>',
        f"<think>maybe {call('submit', {})} ?</think>{call('add', {'a': 1, 'b': 2.5})}",
        f"maybe {call('submit', {})} ?</think>{call('add', {'a': 1, 'b': 2.5})}",
        f"<think>a</think><think>b</think>{call('add', {'a': 1, 'b': 2.5})}",
    ],
)
def test_good_call(text: str) -> None:
    assert ToolHarness().parse(text, TOOLS) == Parsed(GOOD)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("I add 1 and 2.", "No tool call was found"),
        (f"<think>{call('look', {})}</think>", "No tool call was found"),
        (f"<think>{call('look', {})}", "thinking was not closed"),
        (call("look", {}) + call("look", {}), "2 tool calls were found, one a turn"),
        ("<tool_call>{}", "not closed with </tool_call>"),
        (call("look", {}) + " done", "Nothing may follow"),
        ("<tool_call>add(1)</tool_call>", "not valid JSON: Expecting value at character 0"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ("<tool_call>[1]</tool_call>", "must be a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'lacks "name"'),
        ('<tool_call>{"name": "look"}</tool_call>', 'lacks "arguments"'),
        (call("look", "{}"), 'lacks "arguments", a JSON object'),
        (call("look", {}, id=3), "not 'id'"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1e999}}</tool_call>', "not valid JSON: Out of range"),
        (call("submit", {"answers": ["\ud800"]}), "surrogate"),
        (call("ad", {}), "no tool 'ad' (did you mean 'add'?)"),
        (call("zzzz", {}), "(there is 'add', 'submit', 'look')"),
        (call("add", {"b": 1}), "The call of 'add' lacks 'a'."),
        (call("add", {}), "lacks 'a', 'b'"),
        (call("add", {"a": 1, "b": 1, "unti": "m"}), "no 'unti' (did you mean 'unit'?)"),
        (call("look", {"x": 1}), "no 'x' (there is none)"),
        (call("add", {"a": "1", "b": 1}), "'a' must be integer, not string (\"1\")"),
        (call("add", {"a": True, "b": 1}), "'a' must be integer, not boolean"),
        (call("add", {"a": 1.0, "b": 1}), "'a' must be integer, not number"),
        (call("add", {"a": 1, "b": 100}), "'b' must be at most 99, not 100"),
        (call("add", {"a": 1, "b": 1, "unit": "km"}), 'must be one of "m", "s", not "km"'),
        (call("submit", {"answers": ["x", 3]}), "'answers'[1] must be string, not integer"),
    ],
)
def test_malformed_call_says_what_is_wrong(text: str, error: str) -> None:
    parsed = ToolHarness().parse(text, TOOLS)
    assert parsed.action is None
    assert error in parsed.error


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"]}, [None, "x"], [1, []]),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}, [1, "ab"], ["a", None]),
        ({"const": 1}, [1], [True, 2]),
        ({"enum": [0, "a"]}, [0, "a"], [False, "b"]),
        ({"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1}], [{"x": "1"}]),
        ({"type": "object", "additionalProperties": True}, [{"x": "1"}], [[]]),
        ({"type": "number", "minimum": 0}, [0, 0.5], [-1, True, "0"]),
    ],
)
def test_schema_keywords(schema: dict[str, object], good: list[object], bad: list[object]) -> None:
    for value in good:
        assert first_problem(value, schema, "x") == ""
    for value in bad:
        assert first_problem(value, schema, "x").startswith(("x ", "'x' ", "The length of x "))
