"""What a task about the records is: the items to handle and what each needs, the rest of the rows, and the names.

An item's row alone says what it needs, and the first rule that fits decides: a broken item is deleted; one of which
there is none is requested; one that stands on a wrong shelf is moved to the shelf its row names; else it is right as it
is. The fields that do not decide are drawn too, and a broken item always fits a later rule as well.

Invariants (``tests/environments/test_records.py``):

1. A layout says all of a task but the names; the same seed gives the same one in every process.
2. At least one item of a task needs a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from megatron_ext.environments.name_pairs import split_pairs
from megatron_ext.environments.protocol import stable_hash
from megatron_ext.environments.records.database import Database, Item
from megatron_ext.environments.textworld_names import ADJECTIVES, NOUNS

SHELVES = ("north", "south", "east", "west", "upper", "lower", "front", "rear", "left", "right", "inner", "outer")
MOST_STOCK = 9
_TRAIN, _DEV = 0.7, 0.1  # shares of the names; test gets the rest


class Need(StrEnum):
    """What has to be done about an item."""

    REQUEST = "request"
    MOVE = "move"
    DELETE = "delete"
    NOTHING = "nothing"


def need(item: Item) -> Need:
    """What the row says has to be done."""
    if item.broken:
        return Need.DELETE
    if item.stock == 0:
        return Need.REQUEST
    return Need.MOVE if item.shelf != item.home else Need.NOTHING


@dataclass(frozen=True)
class StoreShape:
    """How large a task is: ``items`` to handle, whose needs are drawn from ``needs`` evenly, among ``rows`` rows on
    ``shelves`` shelves; ``words`` first and second words of names, and the ``seed`` of their split."""

    items: int = 2
    rows: int = 8
    shelves: int = 4
    needs: tuple[str, ...] = (Need.REQUEST, Need.MOVE, Need.DELETE)
    words: int = 24
    seed: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.items <= self.rows:
            raise ValueError(f"records: items must be 1 to rows={self.rows}, got {self.items}")
        if not 2 <= self.shelves <= len(SHELVES):
            raise ValueError(f"records.shelves must be 2 to {len(SHELVES)}, got {self.shelves}")
        known, given = [one.value for one in Need], set(self.needs)
        if not given <= set(known) or len(given) < len(self.needs) or not given - {Need.NOTHING}:
            raise ValueError(
                f"records.needs must be different ones of {', '.join(known)}, one of which writes, "
                f"got {list(self.needs)}"
            )
        most = min(len(ADJECTIVES), len(NOUNS))
        if not 4 <= self.words <= most:
            raise ValueError(f"records.words must be 4 to {most}, got {self.words}")
        if (fewest := int(self.words**2 * _DEV)) < self.rows:
            raise ValueError(f"records.words={self.words} gives {fewest} names of the dev split for rows={self.rows}")

    def names(self, split: str) -> tuple[str, ...]:
        """All names that a split may use."""
        return split_pairs(ADJECTIVES[: self.words], NOUNS[: self.words], self.seed, _TRAIN, _DEV, split)


@dataclass(frozen=True)
class Store:
    """A task: the ``items`` to handle in the order in which they are named, the ``others``, and the ``shelves``."""

    items: tuple[Item, ...]
    others: tuple[Item, ...]
    shelves: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"Handle: {', '.join(item.name for item in self.items)}."

    def layout(self) -> str:
        """Everything but the names."""
        rows = [f"{item.stock}/{item.shelf}/{item.home}/{item.broken}" for item in (*self.items, *self.others)]
        return ";".join([str(len(self.items)), *rows])

    def database(self) -> Database:
        """The records before anything is done, sorted by name so that nothing tells which items are meant."""
        return Database(self.shelves, sorted((*self.items, *self.others), key=lambda item: item.name))

    def goal(self) -> Database:
        """The records after everything that is needed, and nothing else."""
        database = self.database()
        for item in self.items:
            match need(item):
                case Need.REQUEST:
                    database.request(item.name)
                case Need.MOVE:
                    database.move(item.name, item.home)
                case Need.DELETE:
                    database.delete(item.name)
        return database


def make_store(shape: StoreShape, names: Sequence[str], seed: int) -> Store:
    """The task of a seed; ``names`` are those of its split."""
    rng = Random(int(stable_hash("records", str(shape.seed), str(seed))[:15], 16))
    shelves = SHELVES[: shape.shelves]
    writing = [one for one in shape.needs if one != Need.NOTHING]
    needs = [rng.choice(shape.needs) for _ in range(shape.items)]
    needs[rng.randrange(shape.items)] = rng.choice(writing)
    others = [rng.choice(list(Need)) for _ in range(shape.rows - shape.items)]
    chosen = rng.sample(names, shape.rows)
    rows = [_row(name, wanted, shelves, rng) for name, wanted in zip(chosen, (*needs, *others), strict=True)]
    return Store(tuple(rows[: shape.items]), tuple(rows[shape.items :]), shelves)


def _row(name: str, wanted: str, shelves: Sequence[str], rng: Random) -> Item:
    home = rng.choice(shelves)
    wrong = rng.choice([shelf for shelf in shelves if shelf != home])
    seems = rng.choice((Need.REQUEST, Need.MOVE)) if wanted == Need.DELETE else wanted
    stock = 0 if seems == Need.REQUEST else rng.randint(1, MOST_STOCK)
    astray = seems == Need.MOVE or (seems == Need.REQUEST and rng.random() < 0.5)
    return Item(name, stock, wrong if astray else home, home, wanted == Need.DELETE)
