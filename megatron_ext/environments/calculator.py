"""A calculator as a tool: multi-step arithmetic that has to be worked out one operation a call.

Invariants (``tests/environments/test_calculator.py`` and ``test_contract.py``):

1. ``calculate`` walks the syntax tree of its expression: numbers, ``+ - * /``, signs and parentheses only; results are
   exact; nothing is ever passed to ``eval``, and work is bounded by the expression's length.
2. Bad arguments, unknown tools and plain text are answered by an observation that says what is wrong, and cost a turn.
3. ``answer`` ends the episode; success means that its value equals the exact result.
4. The script's systematic mistake is to work strictly from left to right, against the precedence of ``*`` and ``/``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolCall, ToolSpec, stable_hash
from megatron_ext.environments.splits import SplitScan, check_split
from megatron_ext.trajectory.task import Task

MAX_LENGTH = 200
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,9}|/[1-9]\d{0,17})?")

# (text, expression) with {a}..{e} drawn per task; the values stay positive whatever is drawn.
_STORIES = (
    ("A shop gets {a} crates of {b} lamps and {c} single lamps. How many lamps is that?", "{a} * {b} + {c}"),
    (
        "There are {c} coins in a jar. {a} children add {b} coins each. How many coins are in the jar?",
        "{c} + {a} * {b}",
    ),
    (
        "A baker fills {a} trays with {b} rolls and {c} trays with {d} rolls. How many rolls is that?",
        "{a} * {b} + {c} * {d}",
    ),
    (
        "A farm packs {a} boxes of {b} eggs, finds {c} more eggs and adds {d} bags of {e} eggs. How many eggs is that?",
        "{a} * {b} + {c} + {d} * {e}",
    ),
)


class Refused(ValueError):
    """An expression or value that the calculator does not take; the message is what the agent sees."""


def evaluate(expression: str, max_operations: int | None = None) -> Fraction:
    """Exact value of an arithmetic expression.

    Raises ``Refused`` for anything but numbers, ``+ - * /``, signs and parentheses, for a division by zero, for more
    than ``MAX_LENGTH`` characters, and for more than ``max_operations`` binary operations.
    """
    if len(expression) > MAX_LENGTH:
        raise Refused(f"expression too long ({len(expression)} characters, at most {MAX_LENGTH})")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Refused("not an arithmetic expression") from None
    operations = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if max_operations is not None and operations > max_operations:
        raise Refused(f"at most {max_operations} operation{'s' if max_operations > 1 else ''} a call")
    return _value(tree)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        if not math.isfinite(node.value):
            raise Refused("number too large")
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            if right == 0:
                raise Refused("division by zero")
            return left / right
    raise Refused("only numbers, + - * / and parentheses are allowed")


def show(value: Fraction) -> str:
    """``7``, ``-3``, or ``22/7`` where the value is no integer."""
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


class Calculator:
    """Tasks with the tools ``calculate(expression)`` and ``answer(value)``."""

    def __init__(
        self, operations: int = 3, largest: int = 20, style: str = "mixed", operations_per_call: int = 1
    ) -> None:
        """
        Args:
            operations: binary operations of an expression task (stories have 2 to 4).
            largest: largest operand.
            style: ``expression``, ``story`` or ``mixed``.
            operations_per_call: binary operations that one ``calculate`` may hold.
        """
        if style not in ("expression", "story", "mixed"):
            raise ValueError(f"calculator.style must be expression, story or mixed, got {style!r}")
        if operations < 1 or largest < 2 or operations_per_call < 1:
            raise ValueError("calculator: operations >= 1, largest >= 2 and operations_per_call >= 1 are needed")
        self._arguments = (operations, largest, style, operations_per_call)
        self._operations, self._largest, self._style, self._per_call = self._arguments
        self._scans: dict[str, SplitScan] = {}
        self._seed: int | None = None
        self._split = "train"
        self._question, self._expression = "", ""
        self._plan: list[str] = []
        self._done = False

    def _make(self, seed: int) -> tuple[str, str]:
        """Question and expression of a seed."""
        rng = Random(int(stable_hash("calculator", str(seed))[:15], 16))
        story = self._style == "story" or (self._style == "mixed" and rng.random() < 0.5)
        if story:
            text, expression = rng.choice(_STORIES)
            numbers = {letter: rng.randint(2, self._largest) for letter in "abcde"}
            return text.format(**numbers), expression.format(**numbers)
        parts = [str(rng.randint(2, self._largest))]
        for _ in range(self._operations):
            parts += [rng.choice("+-*"), str(rng.randint(2, self._largest))]
        expression = " ".join(parts)
        return f"What is {expression}?", expression

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        self._seed, self._split = seed, check_split(split)
        self._question, self._expression = self._make(seed)
        self._plan = self._expression.split()
        self._done = False
        return Observation(self._question)

    def step(self, action: Action) -> Observation:
        if self._seed is None or self._done:
            raise EnvironmentEnded("calculator: step after the end or before reset; call reset first")
        observation = self._answered(action)
        self._done = observation.done
        return observation

    def _answered(self, action: Action) -> Observation:
        if not isinstance(action, ToolCall):
            return Observation("Error: call the tool calculate or the tool answer.", valid=False)
        if action.name not in ("calculate", "answer"):
            return Observation(f"Error: no tool {action.name!r}; there are calculate and answer.", valid=False)
        wanted = "expression" if action.name == "calculate" else "value"
        if set(action.arguments) != {wanted}:
            return Observation(f"Error: {action.name} takes exactly one argument, {wanted!r}.", valid=False)
        try:
            if action.name == "calculate":
                return self._calculated(action.arguments["expression"])
            value = _answer_value(action.arguments["value"])
        except Refused as refusal:
            return Observation(f"Error: {refusal}.", valid=False)
        right = value == evaluate(self._expression)
        score = 1.0 if right else 0.0
        return Observation(
            f"Answer {show(value)} received.", reward=score, done=True, success=right, score=score, valid=True
        )

    def _calculated(self, expression: object) -> Observation:
        if not isinstance(expression, str):
            raise Refused("expression must be a string")
        result = show(evaluate(expression, self._per_call))
        words = expression.split()
        for i in range(len(self._plan) - len(words) + 1):
            if len(words) > 1 and self._plan[i : i + len(words)] == words:
                self._plan[i : i + len(words)] = [result]
                break
        return Observation(result)

    def copy(self) -> Calculator:
        twin = Calculator(*self._arguments)
        twin._seed, twin._split, twin._done = self._seed, self._split, self._done
        twin._question, twin._expression = self._question, self._expression
        twin._plan = list(self._plan)
        return twin

    def state_hash(self) -> str:
        """Question, whether it was answered, and how far the expression has been worked off."""
        return stable_hash("calculator", self._question, str(self._done), *self._plan)

    def tools(self) -> Sequence[ToolSpec]:
        limit = "one operation" if self._per_call == 1 else f"up to {self._per_call} operations"
        return (
            ToolSpec(
                "calculate",
                f"Works out an arithmetic expression with {limit}.",
                {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "for example 12 * 7"}},
                    "required": ["expression"],
                },
            ),
            ToolSpec(
                "answer",
                "Gives the final answer and ends the task.",
                {
                    "type": "object",
                    "properties": {"value": {"type": "number", "description": "the result"}},
                    "required": ["value"],
                },
            ),
        )

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        scan = self._scans.setdefault(split, SplitScan(split))
        for seed in scan.until(start + count):
            scan.offer(seed, self._make(seed)[0])
        return [
            Task(f"calculator/{split}/{seed}", "calculator", seed, split) for seed in scan.seeds[start : start + count]
        ]

    def close(self) -> None:
        self._seed = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> ToolCall:
        """Works the expression off, ``*`` first; as mistake the leftmost operation, whatever it is."""
        if len(self._plan) == 1:
            value = self._plan[0]
            return ToolCall("answer", {"value": int(value) if re.fullmatch(r"-?\d+", value) else value})
        first = next((i for i, word in enumerate(self._plan) if word in "*/"), 1)
        if rng.random() < mistake_rate:
            first = 1
        return ToolCall("calculate", {"expression": " ".join(self._plan[first - 1 : first + 2])})

    def corpus(self, split: str, count: int) -> Iterator[str]:
        for task in self.tasks(split, count):
            observation = self.reset(task.seed, split=split)
            yield observation.text
            rng = Random(task.seed)
            while not observation.done:
                call = self.expert_action(rng, 0.2)
                yield " ".join(str(value) for value in call.arguments.values())
                observation = self.step(call)
                yield observation.text


def _answer_value(value: object) -> Fraction:
    """A number, or text that is one (``"12"``, ``"2.5"``, ``"7/2"``)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refused("value must be a number")
    text = str(value).strip()
    if not _NUMBER.fullmatch(text):
        raise Refused("value must be a number")
    return Fraction(text)
