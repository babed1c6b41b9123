"""The calculator: safe evaluation, refusals, and the left-to-right habit of its script."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.environments.calculator import Calculator, Refused, evaluate, show
from megatron_ext.environments.protocol import ToolCall


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", Fraction(14)),
        ("(2 + 3) * -4", Fraction(-20)),
        ("7 / 2 - .5", Fraction(3)),
        ("1 / 3 * 3", Fraction(1)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("--5", Fraction(5)),
    ],
)
def test_evaluation_is_exact(expression: str, value: Fraction) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "2 ** 999999",
        "abs(3)",
        "__import__('os')",
        "x",
        "[1]",
        "1 < 2",
        "True",
        "'a' * 9",
        "1j",
        "1e999",
        "2 // 3",
        "5 % 2",
        "lambda: 1",
        "1 if 1 else 2",
        "(" * 150 + "1" + ")" * 150,
        "9" * 500,
        "1 / 0",
        "2 / (3 - 3)",
        "a\x00b",
    ],
)
def test_everything_else_is_refused(expression: str) -> None:
    with pytest.raises(Refused) as refusal:
        evaluate(expression)
    assert "\n" not in str(refusal.value)


@given(st.text(max_size=60))
def test_no_text_raises_anything_but_refused(text: str) -> None:
    with suppress(Refused):
        assert isinstance(evaluate(text), Fraction)


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, arguments)


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("12", "call the tool"),
        (call("solve"), "no tool 'solve'"),
        (call("calculate"), "exactly one argument, 'expression'"),
        (call("calculate", expression="1 + 2", extra=1), "exactly one argument"),
        (call("calculate", expression=["1"]), "must be a string"),
        (call("calculate", expression="1 + 2 + 3"), "at most 1 operation a call"),
        (call("calculate", expression="1 / 0"), "division by zero"),
        (call("answer", value="many"), "value must be a number"),
        (call("answer", value=True), "value must be a number"),
        (call("answer", value=float("inf")), "value must be a number"),
    ],
)
def test_bad_calls_are_observations(action: ToolCall | str, says: str) -> None:
    environment = Calculator()
    environment.reset(1)
    before = environment.state_hash()
    observation = environment.step(action)
    assert says in observation.text and not observation.valid and not observation.done
    assert environment.state_hash() == before


def test_answers_in_any_notation() -> None:
    environment = Calculator(operations=2, style="expression")
    for seed in range(20):
        environment.reset(seed)
        value = evaluate(environment.copy().reset(seed).text.removeprefix("What is ").removesuffix("?"))
        for notation in (int(value), str(value), f"{value}.0"):
            environment.reset(seed)
            assert environment.step(call("answer", value=notation)).success
        environment.reset(seed)
        wrong = environment.step(call("answer", value=int(value) + 1))
        assert wrong.done and not wrong.success and wrong.valid


def test_habit_is_working_from_left_to_right() -> None:
    environment = Calculator(operations=3, style="expression")
    outcomes = []
    for task in environment.tasks("train", 50):
        text = environment.reset(task.seed).text.removeprefix("What is ").removesuffix("?")
        left, *rest = text.split()
        for operator, number in zip(rest[::2], rest[1::2], strict=True):
            left = show(evaluate(f"({left}) {operator} {number}"))
        observation = None
        while observation is None or not observation.done:
            observation = environment.step(environment.expert_action(Random(0), 1.0))
        assert observation.text == f"Answer {left} received."
        assert observation.success == (evaluate(text) == Fraction(left))
        outcomes.append(observation.success)
    assert 5 < sum(outcomes) < 45


def test_bad_configuration() -> None:
    with pytest.raises(ValueError, match="calculator.style"):
        Calculator(style="words")
    with pytest.raises(ValueError, match="operations >= 1"):
        Calculator(operations=0)
