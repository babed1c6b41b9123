"""Texts of scripted episodes, for a tokenizer to be learned on.

Invariant (``tests/environments/test_contract.py``): the same tasks give the same texts, whatever was played before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Protocol

from megatron_ext.environments.protocol import Action, Demonstrator, Environment, ToolCall


class Scripted(Environment, Demonstrator, Protocol):
    """An environment with a script that plays it."""


def hermes(action: Action) -> str:
    """A call as a tool harness writes it, free text as it is."""
    if not isinstance(action, ToolCall):
        return action
    return f"<tool_call>{json.dumps({'name': action.name, 'arguments': dict(action.arguments)})}</tool_call>"


def scripted_texts(
    environment: Scripted,
    split: str,
    count: int,
    *,
    mistake_rate: float = 0.2,
    say: Callable[[Action], str] = hermes,
    most_turns: int = 200,
) -> Iterator[str]:
    """Observations and actions of the script on ``count`` tasks, some with mistakes; ``say`` words an action."""
    for task in environment.tasks(split, count):
        rng = Random(task.seed)
        observation = environment.reset(task.seed, split=split)
        yield observation.text
        for _ in range(most_turns):
            action = environment.expert_action(rng, mistake_rate)
            observation = environment.step(action)
            yield say(action)
            yield observation.text
            if observation.done:
                break
