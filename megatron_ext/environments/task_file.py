"""Tasks from a JSON-lines file, judged by the user's own reward function.

A line is an object with ``id`` and ``prompt`` (strings), optionally ``split`` (train, dev or test) and ``answer`` (a
string, for demonstrations), and whatever else the reward function wants. The reward function is named
``package.module:function`` or ``path/to/file.py:function`` and is called as ``function(answer_text, row)``; it returns
a number, or a mapping with ``reward`` and, optionally, ``success``.

Invariants (``tests/environments/test_single_turn.py``):

1. Every complaint about the file names the file and the line.
2. A row without ``split`` belongs to the split that a hash of its prompt gives; no prompt occurs in two splits.
3. A task names its row by id, so that adding lines to the file does not change what a task means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megatron_ext.config.functions import load_function
from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolSpec, stable_hash
from megatron_ext.environments.splits import SPLITS, NotEnoughTasks, check_split, split_of
from megatron_ext.trajectory.task import Task

RewardFunction = Callable[[str, dict[str, Any]], float | Mapping[str, Any]]


class TaskFileError(ValueError):
    """A task file that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Row:
    """One line of the file. ``fields`` is the whole object as the reward function gets it."""

    row_id: str
    prompt: str
    split: str
    line: int
    fields: Mapping[str, Any]


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by id, in file order. Raises ``TaskFileError``."""
    if not path.is_file():
        raise TaskFileError(f"{path}: no such task file")
    rows: dict[str, Row] = {}
    prompts: dict[str, Row] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = _parse(path, number, line)
                if row.row_id in rows:
                    raise TaskFileError(
                        f"{path}, line {number}: id {row.row_id!r} was used on line {rows[row.row_id].line}"
                    )
                twin = prompts.setdefault(row.prompt, row)
                if twin.split != row.split:
                    raise TaskFileError(
                        f"{path}, line {number}: the prompt is that of line {twin.line}, which is in split "
                        f"{twin.split!r}, not {row.split!r}"
                    )
                rows[row.row_id] = row
    if not rows:
        raise TaskFileError(f"{path}: the file holds no tasks")
    return rows


def _parse(path: Path, number: int, line: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskFileError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(value, dict):
        raise TaskFileError(f"{path}, line {number}: a JSON object is needed, this is {type(value).__name__}")
    for key in ("id", "prompt"):
        if not isinstance(value.get(key), str) or not value[key]:
            raise TaskFileError(f"{path}, line {number}: {key!r} is missing or no text")
    split = value["split"] if "split" in value else split_of(value["prompt"])
    if split not in SPLITS:
        raise TaskFileError(f"{path}, line {number}: split {split!r} is none of {', '.join(SPLITS)}")
    return Row(value["id"], value["prompt"], split, number, value)


class TaskFile:
    """Single-turn tasks of a JSON-lines file."""

    def __init__(self, path: str, reward: str, success_at: float = 1.0) -> None:
        """
        Args:
            path: the JSON-lines file.
            reward: the reward function, ``package.module:function`` or ``path/to/file.py:function``.
            success_at: reward from which an answer counts as solved, where the function does not say.
        """
        self._path = Path(path)
        self._reward_path = reward
        self._reward: RewardFunction = load_function(reward, "answer", "row")
        self._success_at = success_at
        self._rows = read_rows(self._path)
        self._by_split = {split: [r for r in self._rows.values() if r.split == split] for split in SPLITS}
        self._row: Row | None = None
        self._answer: str | None = None

    def _current(self) -> Row:
        if self._row is None:
            raise EnvironmentEnded(f"{self._path}: no episode; call reset first")
        return self._row

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        """``data["id"]`` names the row; without it, ``seed`` counts through the rows of the split."""
        if data is not None and "id" in data:
            if data["id"] not in self._rows:
                raise TaskFileError(f"{self._path}: no row with id {data['id']!r}; was it taken out of the file?")
            row = self._rows[data["id"]]
        else:
            rows = self._by_split[check_split(split)]
            if not rows:
                raise NotEnoughTasks(f"{self._path}: split {split!r} is empty")
            row = rows[seed % len(rows)]
        self._row, self._answer = row, None
        return Observation(row.prompt)

    def step(self, action: Action) -> Observation:
        row = self._current()
        if self._answer is not None:
            raise EnvironmentEnded(f"{self._path}: step after the end; call reset first")
        self._answer = action if isinstance(action, str) else ""
        if not isinstance(action, str):
            return Observation("Answer in text, not by a tool call.", done=True, valid=False)
        result = self._reward(action, dict(row.fields))
        reward = float(result["reward"] if isinstance(result, Mapping) else result)
        success = reward >= self._success_at
        if isinstance(result, Mapping) and "success" in result:
            success = bool(result["success"])
        # A reward that is not a number stays visible in ``reward``, where the caller marks the trajectory.
        score = min(1.0, max(0.0, reward)) if math.isfinite(reward) else 0.0
        return Observation(
            "Answer received.", reward=reward, done=True, success=success, score=score, info={"id": row.row_id}
        )

    def copy(self) -> TaskFile:
        twin = TaskFile(str(self._path), self._reward_path, self._success_at)
        twin._row, twin._answer = self._row, self._answer
        return twin

    def state_hash(self) -> str:
        row = self._current()
        answered = "open" if self._answer is None else f"answered {self._answer}"
        return stable_hash("task_file", row.row_id, row.prompt, answered)

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        rows = self._by_split[check_split(split)]
        if start + count > len(rows):
            raise NotEnoughTasks(
                f"{self._path}: split {split!r} has {len(rows)} tasks, {start + count} were asked for: add lines, "
                f"or give rows a 'split'"
            )
        return [
            Task(f"task_file/{split}/{row.row_id}", "task_file", start + i, split, {"id": row.row_id})
            for i, row in enumerate(rows[start : start + count])
        ]

    def close(self) -> None:
        self._row = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> str:
        """The row's ``answer``; as mistake the answer of another row of its split."""
        row = self._current()
        if not isinstance(row.fields.get("answer"), str):
            raise TaskFileError(f"{self._path}, line {row.line}: no text 'answer', so it cannot be demonstrated")
        others = [
            str(other.fields["answer"])
            for other in self._by_split[row.split]
            if isinstance(other.fields.get("answer"), str) and other.fields["answer"] != row.fields["answer"]
        ]
        if others and rng.random() < mistake_rate:
            return rng.choice(others)
        return str(row.fields["answer"])

    def corpus(self, split: str, count: int) -> Iterator[str]:
        for row in self._by_split[check_split(split)][:count]:
            yield row.prompt
            if isinstance(row.fields.get("answer"), str):
                yield str(row.fields["answer"])
