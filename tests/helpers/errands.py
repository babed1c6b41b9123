"""Errands: an environment of tools in which an agent may send out a sub-agent, small enough to know every answer of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from megatron_ext.environments.protocol import (
    Action,
    EnvironmentEnded,
    Observation,
    SessionChange,
    ToolCall,
    ToolSpec,
    stable_hash,
)
from megatron_ext.trajectory.task import Task

ERRANDS = {"_target_": "tests.helpers.errands.Errands"}
OPERATIONS = ("read", "create", "update")
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
PROMPT = "You are an errand boy. Find word number {number} and report it."


class Errands:
    """Words stand behind numbers. ``look`` reads one, and takes longer to say so the higher the number; ``send`` gives
    a number to a sub-agent (not from within one), ``report`` is its answer; ``finish`` with all words, in order and
    joined by spaces, succeeds from anywhere. ``session`` claims a session change where there is none."""

    def __init__(self, words: int = 4) -> None:
        self._number = words
        self._words: list[str] = []
        self._seen: list[int] = []
        self._told: list[int] = []
        self._asked = -1
        self._done = False

    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        rng = Random(f"{split}/{seed}")
        self._words = [rng.choice(("stop", "word", "talk", "walk", "what")) for _ in range(self._number)]
        self._seen, self._told, self._asked, self._done = [], [], -1, False
        return Observation(f"walk to {self._number} words")

    def step(self, action: Action) -> Observation:
        if self._done:
            raise EnvironmentEnded("errands: over")
        if not isinstance(action, ToolCall):
            return Observation("what?", valid=False)
        match action.name:
            case "look":
                return self._look(action.arguments["number"])
            case "send" if self._asked < 0:
                self._asked = int(action.arguments["number"])
                prompt = PROMPT.format(number=self._asked)
                return Observation(prompt, session=SessionChange.OPEN, labels={"operation": 1})
            case "report" if self._asked >= 0:
                said = str(action.arguments["word"])
                if 0 <= self._asked < self._number and said == self._words[self._asked]:
                    self._told.append(self._asked)
                self._asked = -1
                return Observation(
                    f"the errand boy said {said}", 0.5, session=SessionChange.CLOSE, labels={"operation": 2}
                )
            case "finish":
                self._done = True
                success = action.arguments["word"] == " ".join(self._words)
                return Observation("Answer received.", 1.0, done=True, success=success, score=float(success))
            case "session":
                return Observation("x", session=SessionChange(action.arguments["number"]))
        return Observation("what?", valid=False)

    def _look(self, number: int) -> Observation:
        if not 0 <= number < self._number:
            return Observation("what?", valid=False)
        self._seen.append(number)
        return Observation(" ".join(["go"] * number + [self._words[number]]), labels={"operation": 0})

    def copy(self) -> Errands:
        twin = Errands(self._number)
        twin.__dict__ |= {k: list(v) if isinstance(v, list) else v for k, v in self.__dict__.items()}
        return twin

    def state_hash(self) -> str:
        return stable_hash("errands", *map(str, (self._words, self._seen, self._told, self._asked, self._done)))

    def tools(self) -> Sequence[ToolSpec]:
        return [
            ToolSpec("look", "Reads a word.", NUMBER),
            ToolSpec("send", "Sends somebody to read a word.", NUMBER),
            ToolSpec("report", "Tells the word.", WORD),
            ToolSpec("finish", "Tells all words.", WORD),
            ToolSpec("session", "Not for use.", NUMBER),
        ]

    def label_words(self) -> Mapping[str, Sequence[str]]:
        return {"operation": OPERATIONS}

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        found = []
        for i in range(start, start + count):
            self.reset(i, split=split)
            found.append(Task(f"errands/{split}/{i}", "errands", i, split, {"answer": " ".join(self._words)}))
        return found

    def close(self) -> None: ...

    def expert_action(self, rng: Random, mistake_rate: float) -> ToolCall:
        """Even words itself, odd ones by sub-agents; a mistake looks where nothing is."""
        if rng.random() < mistake_rate:
            return ToolCall("look", {"number": 99})
        if self._asked >= 0:
            if self._asked in self._seen:
                return ToolCall("report", {"word": self._words[self._asked]})
            return ToolCall("look", {"number": self._asked})
        for number in range(self._number):
            if number % 2 == 0 and number not in self._seen:
                return ToolCall("look", {"number": number})
            if number % 2 == 1 and number not in self._told:
                return ToolCall("send", {"number": number})
        return ToolCall("finish", {"word": " ".join(self._words)})

    def expert_summary(self) -> str:
        known = sorted({*self._seen, *self._told})
        return "at " + " ".join(f"{number} {self._words[number]}" for number in known)

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return iter([PROMPT, "go word talk stop what walk the errand boy said"])


class Mislabelled(Errands):
    """Gives a label that it does not declare."""

    def step(self, action: Action) -> Observation:
        return replace(super().step(action), labels={"operation": 7})


RELAY = {"_target_": "tests.helpers.errands.Relay"}


class Relay:
    """Understands any text: of every three actions the first sends a sub-agent and the third is its report. Succeeds
    after ``actions`` of them."""

    def __init__(self, actions: int = 6) -> None:
        self._actions, self._seed, self._count = actions, 0, 0

    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        self._seed, self._count = seed, 0
        return Observation(f"walk {seed}")

    def step(self, action: Action) -> Observation:
        if self._count >= self._actions:
            raise EnvironmentEnded("relay: over")
        change = (SessionChange.OPEN, SessionChange.STAY, SessionChange.CLOSE)[self._count % 3]
        self._count += 1
        done = self._count >= self._actions
        return Observation(f"at {self._count}", done=done, success=done, session=change, score=float(done))

    def copy(self) -> Relay:
        twin = Relay(self._actions)
        twin._seed, twin._count = self._seed, self._count
        return twin

    def state_hash(self) -> str:
        return stable_hash("relay", str(self._seed), str(self._count))

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        return [Task(f"relay/{split}/{i}", "relay", i, split) for i in range(start, start + count)]

    def close(self) -> None: ...


class Unbuildable(Errands):
    def __init__(self, words: int = 4) -> None:
        raise RuntimeError("no errands today")
