"""A store's records, kept with tools that read, create, update and delete them.

"Handle: copper lantern, red vase." The agent reads an item and does what its row says (``records/layout.py``):
``delete_item`` where it is broken, ``create_request`` where there is none left, ``update_item`` where it stands on the
wrong shelf, nothing where all is right; then ``finish``. Which operation is right can only be known by reading.

Invariants (``tests/environments/test_records.py`` and ``test_contract.py``):

1. ``finish`` ends the episode; it is a success exactly when the database holds what it should and nothing else differs.
2. ``score``, given at the end, is the items handled right over these and every other name that was changed: 1 in
   success alone.
3. Every call of a tool carries its operation as the label ``op``, whatever came of it; nothing else carries one.
4. Bad arguments, unknown items and plain text are answered by an observation and change nothing.
5. Tasks of different splits share no name and no layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from random import Random
from typing import Any

from megatron_ext.environments.corpus import scripted_texts
from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolCall, ToolSpec, stable_hash
from megatron_ext.environments.records.database import Database, Record, Refused, difference
from megatron_ext.environments.records.layout import Need, Store, StoreShape, make_store, need
from megatron_ext.environments.splits import SPLITS, SplitScan, check_split
from megatron_ext.trajectory.task import Task

OPERATIONS = {
    "read_item": "READ",
    "create_request": "CREATE",
    "update_item": "UPDATE",
    "delete_item": "DELETE",
    "finish": "FINISH",
}
LABEL = "op"
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
# Of the script's mistakes, the share that names an item wrongly: the answer to it must occur in demonstrations, or the
# first wrong name of a trained model derails the rest of its episode.
_MISNAMED_SHARE = 0.08


def _tool(tool: str, description: str, **properties: str) -> ToolSpec:
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    return ToolSpec(tool, description, {"type": "object", "properties": fields, "required": list(properties)})


TOOLS = (
    _tool("read_item", "Shows an item's record.", name="the item"),
    _tool("create_request", "Requests more of an item.", name="the item"),
    _tool("update_item", "Writes down that an item stands on another shelf.", name="the item", shelf="the new shelf"),
    _tool("delete_item", "Deletes an item's record.", name="the item"),
    _tool("finish", "Ends the task; everything is handled."),
)


class Records:
    """Tasks with the tools ``read_item``, ``create_request``, ``update_item``, ``delete_item`` and ``finish``."""

    def __init__(
        self,
        items: int = 2,
        rows: int = 8,
        shelves: int = 4,
        needs: Sequence[str] = ("request", "move", "delete"),
        hasty: float = 0.5,
        words: int = 24,
        seed: int = 5,
    ) -> None:
        """
        Args:
            items, rows, shelves, needs, words, seed: see ``StoreShape``.
            hasty: how often, of the script's mistakes, it requests an item that it has not read; where it has read it,
                the mistake is to overlook that the item is broken.
        """
        if not 0 <= hasty <= 1:
            raise ValueError(f"records.hasty must be in 0..1, got {hasty}")
        self._shape = StoreShape(items, rows, shelves, tuple(needs), words, seed)
        self._hasty = hasty
        self._names = {split: self._shape.names(split) for split in SPLITS}
        self._scans: dict[str, SplitScan] = {}
        self._store: Store | None = None
        self._database: Database | None = None
        self._goal: Mapping[str, Record] = {}
        self._read: frozenset[str] = frozenset()
        self._done = False

    # -- tasks -----------------------------------------------------------------------------------------------------
    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        scan = self._scans.setdefault(split, SplitScan(split))
        for seed in scan.until(start + count):
            store = make_store(self._shape, self._names[split], seed)
            scan.offer(seed, store.layout(), store.text)
        return [Task(f"records/{split}/{seed}", "records", seed, split) for seed in scan.seeds[start : start + count]]

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        self.close()
        self._store = make_store(self._shape, self._names[check_split(split)], seed)
        self._database = self._store.database()
        goal = self._store.goal()
        self._goal = goal.records()
        goal.close()
        self._read, self._done = frozenset(), False
        return Observation(self._store.text)

    def step(self, action: Action) -> Observation:
        if self._database is None or self._done:
            raise EnvironmentEnded("records: step after the end or before reset; call reset first")
        if not isinstance(action, ToolCall):
            return Observation(f"Error: call a tool: {', '.join(OPERATIONS)}.", valid=False)
        if action.name not in OPERATIONS:
            text = f"Error: no tool {action.name[:40]!r}; there are {', '.join(OPERATIONS)}."
            return Observation(text, valid=False)
        try:
            observation = self._carried_out(self._database, action.name, _checked(action))
        except Refused as refusal:
            observation = Observation(f"Error: {refusal}", valid=False)
        self._done = observation.done
        return replace(observation, labels={LABEL: _NUMBER[action.name]})

    def _carried_out(self, database: Database, tool: str, arguments: Mapping[str, Any]) -> Observation:
        name = arguments.get("name", "")
        match tool:
            case "read_item":
                item = database.item(name)
                self._read |= {name}
                row = {"stock": item.stock, "shelf": item.shelf, "home": item.home, "broken": item.broken}
                return Observation(json.dumps(row))
            case "create_request":
                database.request(name)
                return Observation("Requested.")
            case "update_item":
                database.move(name, arguments["shelf"])
                return Observation("Updated.")
            case "delete_item":
                database.delete(name)
                return Observation("Deleted.")
            case _:
                return self._finished(database)

    def _finished(self, database: Database) -> Observation:
        assert self._store is not None
        wrong = difference(database.records(), self._goal)
        asked = {item.name for item in self._store.items}
        damaged = len(wrong - asked)
        right = len(asked - wrong)
        score = right / (len(asked) + damaged)
        info = {"right": right, "damaged": damaged, "unread": len(asked - self._read)}
        return Observation("Finished.", reward=score, done=True, success=not wrong, score=score, info=info)

    def copy(self) -> Records:
        twin = copy(self)
        twin._database = None if self._database is None else self._database.copy()
        return twin

    def state_hash(self) -> str:
        """The task, every row of the database, which items were read, and whether it is over."""
        assert self._store is not None and self._database is not None
        rows = (json.dumps(row) for row in self._database.rows())
        return stable_hash("records", self._store.text, str(self._done), ",".join(sorted(self._read)), *rows)

    def tools(self) -> Sequence[ToolSpec]:
        return TOOLS

    def label_words(self) -> Mapping[str, Sequence[str]]:
        return {LABEL: tuple(OPERATIONS.values())}

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> ToolCall:
        """Reads an item and does what it needs, one after the other. Its mistakes are habits: it requests an item
        without reading it, or overlooks that what it read is broken."""
        assert self._store is not None and self._database is not None
        # The draws do not depend on the state, so that two plays of a task differ by their mistakes alone.
        slip, hasty, misnamed = rng.random() < mistake_rate, rng.random() < self._hasty, rng.random() < _MISNAMED_SHARE
        written = difference(self._database.records(), self._before(self._store))
        for item in self._store.items:
            if item.name in written:
                continue
            if item.name not in self._read:
                if slip and misnamed:
                    return ToolCall("read_item", {"name": item.name.split()[0]})
                return ToolCall("create_request" if slip and hasty else "read_item", {"name": item.name})
            seen = replace(item, broken=False) if slip and not misnamed else item
            if (call := _call(need(seen), item.name, item.home)) is not None:
                return call
        return ToolCall("finish", {})

    def _before(self, store: Store) -> Mapping[str, Record]:
        return {item.name: Record(item, False) for item in (*store.items, *store.others)}

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return scripted_texts(self, split, count)


def _call(what: Need, name: str, home: str) -> ToolCall | None:
    """The call that does what an item needs; None for nothing."""
    match what:
        case Need.REQUEST:
            return ToolCall("create_request", {"name": name})
        case Need.MOVE:
            return ToolCall("update_item", {"name": name, "shelf": home})
        case Need.DELETE:
            return ToolCall("delete_item", {"name": name})
        case Need.NOTHING:
            return None


def _checked(call: ToolCall) -> Mapping[str, Any]:
    """The arguments, when they are what the tool takes: all of them, as strings."""
    required = next(tool.parameters["required"] for tool in TOOLS if tool.name == call.name)
    if set(call.arguments) != set(required):
        raise Refused(f"{call.name} takes {', '.join(required) or 'no arguments'}.")
    for name, value in call.arguments.items():
        if not isinstance(value, str):
            raise Refused(f"{name} must be a string.")
    return call.arguments
