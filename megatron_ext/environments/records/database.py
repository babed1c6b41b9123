"""The records of a store: a sqlite database in memory with items, the shelves they stand on, and requests for more.

Invariants (``tests/environments/test_records.py``):

1. Every value reaches SQL as a parameter: text that looks like SQL is data.
2. A refused write changes nothing. What may not be (a shelf that does not exist, a second request for an item, an item
   deleted while it is requested) the database's own constraints refuse.
3. ``copy`` shares nothing with its original.
4. ``rows`` are equal exactly when the databases' contents are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

_SCHEMA = """
CREATE TABLE shelves (name TEXT PRIMARY KEY) STRICT;
CREATE TABLE items (
    name TEXT PRIMARY KEY,
    stock INTEGER NOT NULL CHECK (stock >= 0),
    shelf TEXT NOT NULL REFERENCES shelves (name),
    home TEXT NOT NULL REFERENCES shelves (name),
    broken INTEGER NOT NULL CHECK (broken IN (0, 1))
) STRICT;
CREATE TABLE requests (item TEXT PRIMARY KEY REFERENCES items (name)) STRICT;
"""
_LONGEST_SHOWN = 40  # characters of an argument that an answer repeats


class Refused(ValueError):
    """A call that cannot be carried out; the message is what the agent sees."""


@dataclass(frozen=True)
class Item:
    """One row of ``items``: how many there are, the shelf they stand on, the one they belong on."""

    name: str
    stock: int
    shelf: str
    home: str
    broken: bool


@dataclass(frozen=True)
class Record:
    """All that the database says of one name: its row (None: no such item), and whether more are requested."""

    item: Item | None
    requested: bool


class Database:
    """One store's records, and what can be done to them: read, create, update, delete."""

    def __init__(self, shelves: Sequence[str], items: Iterable[Item]) -> None:
        self._connection = _connect()
        self._connection.executescript(_SCHEMA)
        self._connection.executemany("INSERT INTO shelves VALUES (?)", [(shelf,) for shelf in shelves])
        self._connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", [astuple(item) for item in items])

    def item(self, name: str) -> Item:
        """Raises ``Refused`` when there is none."""
        found = self._connection.execute("SELECT * FROM items WHERE name = ?", (_plain("name", name),)).fetchone()
        if found is None:
            raise Refused(f"no item {name[:_LONGEST_SHOWN]!r}.")
        return _item(found)

    def request(self, name: str) -> None:
        """Asks for more of an item."""
        self.item(name)
        self._write("INSERT INTO requests VALUES (?)", (name,), "it is requested already.")

    def move(self, name: str, shelf: str) -> None:
        """Writes down that the item stands on another shelf."""
        self.item(name)
        refusal = f"no shelf {_plain('shelf', shelf)[:_LONGEST_SHOWN]!r}."
        self._write("UPDATE items SET shelf = ? WHERE name = ?", (shelf, name), refusal)

    def delete(self, name: str) -> None:
        """Drops an item's row."""
        self.item(name)
        self._write("DELETE FROM items WHERE name = ?", (name,), "it is requested.")

    def records(self) -> Mapping[str, Record]:
        """What is said of each name, sorted."""
        requested = {name for (name,) in self._connection.execute("SELECT item FROM requests")}
        items = map(_item, self._connection.execute("SELECT * FROM items ORDER BY name"))
        return {item.name: Record(item, item.name in requested) for item in items}

    def rows(self) -> tuple[tuple[str | int, ...], ...]:
        """Every row of every table behind its table's name, in a fixed order."""
        return tuple(
            (table, *row)
            for table in ("shelves", "items", "requests")
            for row in self._connection.execute(f"SELECT * FROM {table} ORDER BY 1")  # names of this list alone
        )

    def copy(self) -> Database:
        twin = Database.__new__(Database)
        twin._connection = _connect()
        self._connection.backup(twin._connection)
        return twin

    def close(self) -> None:
        self._connection.close()

    def _write(self, statement: str, values: tuple[str, ...], refusal: str) -> None:
        try:
            self._connection.execute(statement, values)
        except sqlite3.IntegrityError:
            raise Refused(refusal) from None


def difference(before: Mapping[str, Record], after: Mapping[str, Record]) -> frozenset[str]:
    """Names of which the two say different things; an item that only one of them has is among them."""
    return frozenset(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _connect() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _item(row: tuple[str, int, str, str, int]) -> Item:
    name, stock, shelf, home, broken = row
    return Item(name, stock, shelf, home, bool(broken))


def _plain(what: str, value: object) -> str:
    """Text that sqlite can hold: half of a surrogate pair is none."""
    if not isinstance(value, str) or not value.isprintable():
        raise Refused(f"{what} must be plain text.")
    return value
