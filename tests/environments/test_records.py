"""The records of a store: a real database behind its tools, tasks that only reading solves, and exact ends."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.environments.protocol import Demonstrator, Environment, Labelling, Observation, ToolCall, check_labels
from megatron_ext.environments.records.database import Database, Item, Record, Refused, difference
from megatron_ext.environments.records.environment import OPERATIONS, TOOLS, Records
from megatron_ext.environments.records.layout import Need, Store, StoreShape, make_store, need
from megatron_ext.environments.splits import SPLITS
from megatron_ext.environments.textworld_names import ADJECTIVES, NOUNS
from megatron_ext.harness.schema import check_schema, first_problem

LAMP, VASE = Item("old lamp", 3, "north", "south", False), Item("red vase", 0, "east", "east", True)
SHELVES = ("north", "south", "east")
ALL_NEEDS = ["request", "move", "delete", "nothing"]
INJECTIONS = (
    "'; DROP TABLE items; --",
    '" OR 1=1; --',
    "old lamp' OR '1'='1",
    "x'); DELETE FROM items; --",
    "old lamp'--",
    "%",
    "_ld lamp",
    "*",
    "NULL",
    "old lamp; DELETE FROM requests",
)


def call(tool: str, **arguments: object) -> ToolCall:
    return ToolCall(tool, arguments)


Log = list[tuple[ToolCall | None, Observation]]


def play(environment: Records, seed: int, rate: float, split: str = "train") -> Log:
    """(call, observation) of a scripted episode; the first entry is the reset."""
    rng = Random(seed)
    log: Log = [(None, environment.reset(seed, split=split))]
    while not log[-1][1].done and len(log) < 60:
        action = environment.expert_action(rng, rate)
        log.append((action, check_labels(environment, environment.step(action))))
    return log


def store_of(environment: Records) -> Store:
    assert environment._store is not None
    return environment._store


# -- the database ------------------------------------------------------------------------------------------------------
@pytest.fixture
def database() -> Iterator[Database]:
    made = Database(SHELVES, [VASE, LAMP])
    yield made
    made.close()


def test_rows_are_those_of_a_real_database(database: Database) -> None:
    assert isinstance(database._connection, sqlite3.Connection)
    assert database.item("old lamp") == LAMP and database.item("red vase") == VASE
    assert database.rows() == (
        ("shelves", "east"),
        ("shelves", "north"),
        ("shelves", "south"),
        ("items", "old lamp", 3, "north", "south", 0),
        ("items", "red vase", 0, "east", "east", 1),
    )
    database.request("old lamp")
    database.move("old lamp", "south")
    database.delete("red vase")
    assert database.rows()[3:] == (("items", "old lamp", 3, "south", "south", 0), ("requests", "old lamp"))
    assert database.records() == {"old lamp": Record(Item("old lamp", 3, "south", "south", False), True)}


def test_what_may_not_be_the_database_refuses(database: Database) -> None:
    database.request("old lamp")
    before = database.rows()
    for refused, says in (
        (lambda: database.move("old lamp", "roof"), "no shelf 'roof'"),
        (lambda: database.request("old lamp"), "requested already"),
        (lambda: database.delete("old lamp"), "it is requested"),
        (lambda: database.delete("old"), "no item 'old'"),
        (lambda: database.item(""), "no item ''"),
        (lambda: database.item("x" * 500), "no item 'x{40}'"),
        (lambda: database.item("\ud800"), "plain text"),
        (lambda: database.move("old lamp", "a\x00"), "plain text"),
    ):
        with pytest.raises(Refused, match=says):
            refused()
        assert database.rows() == before


@pytest.mark.parametrize("text", INJECTIONS)
def test_sql_is_data(database: Database, text: str) -> None:
    before = database.rows()
    for refused in (
        lambda: database.item(text),
        lambda: database.request(text),
        lambda: database.move(text, "north"),
        lambda: database.move("old lamp", text),
        lambda: database.delete(text),
    ):
        with pytest.raises(Refused, match="no (item|shelf)"):
            refused()
        assert database.rows() == before
    odd = Item(text, 1, text, text, False)
    other = Database((text, "north"), [odd])
    other.request(text)
    other.move(text, "north")
    assert other.records() == {text: Record(Item(text, 1, "north", text, False), True)}
    other.close()


def test_a_copy_shares_nothing(database: Database) -> None:
    database.request("old lamp")
    twin = database.copy()
    assert twin.rows() == database.rows()
    before = database.rows()
    twin.move("old lamp", "east")
    twin.delete("red vase")
    assert database.rows() == before != twin.rows()
    with pytest.raises(Refused, match="no shelf"):
        twin.move("old lamp", "roof")
    database.close()
    assert twin.item("old lamp").shelf == "east"
    twin.close()
    database._connection = sqlite3.connect(":memory:")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["request", "move", "delete"]),
            st.sampled_from(["old lamp", "red vase", "none"]),
            st.sampled_from(["north", "south", "roof"]),
        ),
        max_size=8,
    )
)
def test_the_difference_is_what_was_written(writes: list[tuple[str, str, str]]) -> None:
    database = Database(SHELVES, [LAMP, VASE])
    before, rows = database.records(), database.rows()
    items, requested = {item.name: item for item in (LAMP, VASE)}, set()
    for tool, name, shelf in writes:
        with suppress(Refused):
            getattr(database, tool)(*((name, shelf) if tool == "move" else (name,)))
        if name not in items:
            continue
        if tool == "request":
            requested.add(name)
        elif tool == "move" and shelf in SHELVES:
            items[name] = Item(name, items[name].stock, shelf, items[name].home, items[name].broken)
        elif tool == "delete" and name not in requested:
            del items[name]
    after = database.records()
    assert after == {name: Record(item, name in requested) for name, item in items.items()}
    assert difference(before, after) == {n for n in before if before[n] != after.get(n)}
    assert (not difference(before, after)) == (database.rows() == rows)
    database.close()


# -- the tasks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        (Item("a", 2, "north", "north", False), Need.NOTHING),
        (Item("a", 2, "north", "south", False), Need.MOVE),
        (Item("a", 0, "north", "north", False), Need.REQUEST),
        (Item("a", 0, "north", "south", False), Need.REQUEST),
        (Item("a", 2, "north", "north", True), Need.DELETE),
        (Item("a", 0, "north", "south", True), Need.DELETE),
    ],
)
def test_the_first_rule_that_fits_decides(item: Item, wanted: Need) -> None:
    assert need(item) == wanted


def test_layouts() -> None:
    shape = StoreShape(items=3, rows=6, needs=tuple(ALL_NEEDS))
    names = shape.names("train")
    found: Counter[Need] = Counter()
    for seed in range(300):
        store = make_store(shape, names, seed)
        assert make_store(shape, names, seed) == store != make_store(shape, names, seed + 1)
        assert len(store.items) == 3 and len(store.others) == 3
        rows = [*store.items, *store.others]
        assert len({item.name for item in rows}) == 6
        assert not any(name in store.layout() for item in rows for name in item.name.split())
        wanted = [need(item) for item in store.items]
        assert any(one != Need.NOTHING for one in wanted)
        found.update(wanted)
        for item in rows:
            if item.broken:
                assert need(Item(item.name, item.stock, item.shelf, item.home, False)) in (Need.REQUEST, Need.MOVE)
    assert all(found[one] > 100 for one in Need)


def test_held_out_tasks_share_no_name_and_no_layout() -> None:
    environment = Records(items=3)
    held: dict[str, dict[str, set[str]]] = {}
    for split in SPLITS:
        tasks = environment.tasks(split, 150)
        texts, layouts, names = set(), set(), set()
        for task in tasks:
            texts.add(environment.reset(task.seed, split=split).text)
            store = store_of(environment)
            layouts.add(store.layout())
            names |= {item.name for item in (*store.items, *store.others)}
        assert len(texts) == 150
        held[split] = {"layouts": layouts, "names": names}
    for one, other in combinations(SPLITS, 2):
        for what in ("names", "layouts"):
            assert not held[one][what] & held[other][what], (one, other, what)
    trained = {word for name in StoreShape().names("train") for word in name.split()}
    assert trained == {*ADJECTIVES[:24], *NOUNS[:24]}


# -- the environment ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("knobs", [{}, {"items": 4, "rows": 12, "shelves": 12, "needs": ALL_NEEDS, "words": 36}])
def test_script_succeeds_and_its_mistakes_fail(knobs: Mapping[str, Any]) -> None:
    environment = Records(**knobs)
    assert isinstance(environment, Environment) and isinstance(environment, Demonstrator)
    assert isinstance(environment, Labelling)
    schemas = {tool.name: tool.parameters for tool in environment.tools()}
    for split in SPLITS:
        for task in environment.tasks(split, 30):
            log = play(environment, task.seed, 0.0, split)
            last = log[-1][1]
            assert last.success and last.score == last.reward == 1.0 and all(one.valid for _, one in log)
            assert last.info == {"right": len(store_of(environment).items), "damaged": 0, "unread": 0}
            for action, _ in log[1:]:
                assert action is not None
                assert first_problem(action.arguments, schemas[action.name], action.name) == ""
    tasks = environment.tasks("train", 100)
    wins = [sum(play(environment, t.seed, rate)[-1][1].success for t in tasks) for rate in (0.3, 0.6, 1.0)]
    assert 90 > wins[0] > wins[1] > wins[2] and wins[2] < 35
    assert all(play(environment, t.seed, 1.0)[-1][1].done for t in tasks), "a mistaken script comes to an end"


def test_habits() -> None:
    hasty, blind = Records(hasty=1.0), Records(hasty=0.0)
    invalid = 0
    for task in hasty.tasks("train", 60):
        calls = [action.name for action, _ in play(hasty, task.seed, 1.0) if action]
        names = Counter(calls)
        assert names["create_request"] == 2 and names["update_item"] == names["delete_item"] == 0
        log = play(blind, task.seed, 1.0)
        invalid += sum(not seen.valid for _, seen in log)
        done = Counter(action.name for action, _ in log if action)
        overlooked = log[-1][1].info["unread"] == 0 and not log[-1][1].success
        assert overlooked <= any(item.broken for item in store_of(blind).items)
        assert done["create_request"] + done["update_item"] + done["delete_item"] == 2
    assert invalid > 3, "answers to wrong names occur"


def test_random_player_fails() -> None:
    environment = Records()
    wins = 0
    for task in environment.tasks("train", 150):
        rng, observation = Random(task.seed), environment.reset(task.seed)
        store = store_of(environment)
        for _ in range(8):
            if observation.done:
                break
            item = rng.choice(store.items)  # it even knows which items are meant
            tool = rng.choice(TOOLS)
            values = {"name": item.name, "shelf": rng.choice(store.shelves)}
            arguments = {key: values[key] for key in tool.parameters["required"]}
            observation = environment.step(ToolCall(tool.name, arguments))
        wins += observation.success
    assert wins <= 7


def test_right_only_by_reading() -> None:
    """The task's words say nothing of what is needed: the same names come with every need."""
    environment = Records()
    assert all(re.fullmatch(r"Handle: \w+ \w+, \w+ \w+\.", environment.reset(seed).text) for seed in range(20))
    guesses: Counter[str] = Counter()
    for task in environment.tasks("train", 300):
        environment.reset(task.seed)
        guesses.update(need(item) for item in store_of(environment).items)
    assert max(guesses.values()) < 0.42 * sum(guesses.values())


def handled(environment: Records, number: int) -> None:
    """Does what the script would about the item, without reading."""
    item = store_of(environment).items[number]
    match need(item):
        case Need.REQUEST:
            environment.step(call("create_request", name=item.name))
        case Need.MOVE:
            environment.step(call("update_item", name=item.name, shelf=item.home))
        case Need.DELETE:
            environment.step(call("delete_item", name=item.name))


def test_the_end_is_an_exact_comparison() -> None:
    environment = Records(items=2, rows=5)
    for task in environment.tasks("train", 20):
        environment.reset(task.seed)
        store = store_of(environment)
        handled(environment, 0)
        half = environment.copy().step(call("finish"))
        assert (half.score, half.success, half.info["right"]) == (0.5, False, 1)
        handled(environment, 1)
        exact = environment.copy().step(call("finish"))
        assert exact.success and exact.score == 1.0 and exact.info["unread"] == 2
        other = next(item for item in store.others if item.stock or not item.broken)
        for harm in (
            call("create_request", name=other.name),
            call("delete_item", name=other.name),
            call("update_item", name=other.name, shelf=next(s for s in store.shelves if s != other.shelf)),
        ):
            twin = environment.copy()
            assert twin.step(harm).valid
            last = twin.step(call("finish"))
            assert not last.success and last.score == pytest.approx(2 / 3) and last.info["damaged"] == 1
        same = environment.step(call("update_item", name=other.name, shelf=other.shelf))
        assert same.valid and environment.step(call("finish")).success, "a write that changes nothing is no harm"


def test_a_move_can_be_put_right_a_request_cannot() -> None:
    environment = Records(items=1, needs=["move"])
    environment.reset(environment.tasks("train", 1)[0].seed)
    (item,) = store_of(environment).items
    wrong = next(shelf for shelf in store_of(environment).shelves if shelf not in (item.home, item.shelf))
    environment.step(call("update_item", name=item.name, shelf=wrong))
    assert not environment.copy().step(call("finish")).success
    environment.step(call("update_item", name=item.name, shelf=item.home))
    assert environment.copy().step(call("finish")).success
    environment.step(call("create_request", name=item.name))
    assert environment.step(call("finish")).score == 0.0


def test_labels_name_the_operation_of_every_call() -> None:
    environment = Records()
    words = environment.label_words()["op"]
    assert words == ("READ", "CREATE", "UPDATE", "DELETE", "FINISH")
    seen: set[str] = set()
    for task in environment.tasks("train", 20):
        first, *steps = play(environment, task.seed, 0.5)
        assert not first[1].labels
        for action, observation in steps:
            assert action is not None
            assert words[observation.labels["op"]] == OPERATIONS[action.name]
            seen.add(action.name)
    assert seen == set(OPERATIONS)
    environment.reset(0)
    refused = environment.step(call("delete_item", name="nothing such"))
    assert not refused.valid and words[refused.labels["op"]] == "DELETE"
    assert not environment.step("delete it").labels and not environment.step(call("drop", name="x")).labels


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("read the lantern", "call a tool: read_item, create_request, update_item, delete_item, finish"),
        (call("drop_table", name="items"), "no tool 'drop_table'"),
        (call("read_item"), "read_item takes name"),
        (call("read_item", name="x", shelf="north"), "read_item takes name"),
        (call("update_item", name="x"), "update_item takes name, shelf"),
        (call("finish", now=True), "finish takes no arguments"),
        (call("read_item", name=["x"]), "name must be a string"),
        (call("read_item", name=None), "name must be a string"),
        (call("delete_item", name="no such"), "no item 'no such'"),
        (call("read_item", name="\ud800"), "name must be plain text"),
        *((call("read_item", name=text), "no item") for text in INJECTIONS),
        *((call("delete_item", name=text), "no item") for text in INJECTIONS),
    ],
)
def test_bad_calls_are_observations(action: ToolCall | str, says: str) -> None:
    environment = Records()
    environment.reset(environment.tasks("train", 1)[0].seed)
    before = environment.state_hash()
    observation = environment.step(action)
    assert says in observation.text and not observation.valid and not observation.done
    assert environment.state_hash() == before


def test_injection_through_a_shelf_is_data() -> None:
    environment = Records()
    environment.reset(3)
    before = environment.state_hash()
    item = store_of(environment).items[0]
    for text in INJECTIONS:
        observation = environment.step(call("update_item", name=item.name, shelf=text))
        assert observation.text.startswith("Error: no shelf") and not observation.valid
        assert environment.state_hash() == before


def test_state_hash_tells_databases_and_reading_apart() -> None:
    environment = Records()
    environment.reset(environment.tasks("train", 1)[0].seed)
    one, two = store_of(environment).items
    hashes = [environment.state_hash()]
    for action in (
        call("read_item", name=one.name),
        call("create_request", name=two.name),
        call("delete_item", name=one.name),
        call("finish"),
    ):
        assert environment.step(action).valid
        hashes.append(environment.state_hash())
    assert len(set(hashes)) == len(hashes)


def test_copies_play_on_alone() -> None:
    environment = Records()
    for task in environment.tasks("train", 10):
        log = play(environment, task.seed, 0.0)
        environment.reset(task.seed)
        environment.step(log[1][0] or "")
        twin, rng = environment.copy(), Random(1)
        state, rows = environment.state_hash(), environment._database and environment._database.rows()
        while not (observation := twin.step(twin.expert_action(rng, 0.0))).done:
            pass
        assert observation.success and environment.state_hash() == state
        assert environment._database is not None and environment._database.rows() == rows
        environment.close()
        assert twin.state_hash() != state, "closing the one leaves the other"


def test_schemas_and_records_are_what_they_look_like() -> None:
    for tool in TOOLS:
        check_schema(tool.parameters, tool.name)
    environment = Records()
    environment.reset(2)
    item = store_of(environment).items[0]
    said = json.loads(environment.step(call("read_item", name=item.name)).text)
    assert Item(item.name, **said) == item


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"items": 0}, "items must be 1 to rows=8"),
        ({"items": 9}, "items must be 1 to rows=8"),
        ({"shelves": 1}, "records.shelves must be 2 to 12"),
        ({"shelves": 13}, "records.shelves must be 2 to 12"),
        ({"needs": []}, "records.needs"),
        ({"needs": ["nothing"]}, "one of which writes"),
        ({"needs": ["repair", "move"]}, "records.needs"),
        ({"needs": ["move", "move"]}, "records.needs"),
        ({"words": 3}, "records.words must be 4 to"),
        ({"words": 8}, "words=8 gives 6 names"),
        ({"hasty": 1.5}, "records.hasty"),
    ],
)
def test_bad_knobs_are_one_clear_line(knobs: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Records(**knobs)
