"""What is true in a TextWorld state, as plain tuples, and questions about it.

A fact is ``(predicate, entity, ...)``, e.g. ``("in", "k_0", "c_1")``. The letter of an entity is its TextWorld type:
``P`` player, ``I`` inventory, ``r`` room, ``d`` door, ``c`` container, ``s`` supporter, ``k`` key, ``o`` object.

Invariant (``tests/environments/test_textworld_games.py``): the predicates and their order of arguments are those of
TextWorld's knowledge base, so that a set of facts is a state of its engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

Fact = tuple[str, ...]

PLAYER, INVENTORY = "P", "I"
OPPOSITE = {"north": "south", "south": "north", "west": "east", "east": "west"}
# TextWorld keeps one of each pair of opposite directions: ``north_of(a, b)`` says that a lies north of b.
_KEPT = ("north", "west")


def kind(entity: str) -> str:
    return entity[0]


def beside(place: str, direction: str, other: str) -> Fact:
    """The fact that ``other`` lies in ``direction`` of ``place``."""
    if direction in _KEPT:
        return (f"{direction}_of", other, place)
    return (f"{OPPOSITE[direction]}_of", place, other)


class Facts:
    """Questions about one state."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.all = frozenset(facts)

    def __contains__(self, fact: Fact) -> bool:
        return fact in self.all

    @cached_property
    def places(self) -> Mapping[str, tuple[str, str]]:
        """Entity -> (``at``, ``in`` or ``on``; what it is there), for all that has one place."""
        return {fact[1]: (fact[0], fact[2]) for fact in self.all if fact[0] in ("at", "in", "on")}

    @property
    def here(self) -> str:
        """The player's room."""
        return self.places[PLAYER][1]

    @property
    def carried(self) -> list[str]:
        return self.inside(INVENTORY)

    def inside(self, place: str) -> list[str]:
        """What is directly in, on or at ``place``, in the order of entity numbers, without the player."""
        found = (entity for entity, (_, where) in self.places.items() if where == place and entity != PLAYER)
        return sorted(found, key=_order)

    def room(self, entity: str) -> str:
        """The room that ``entity`` is in; what is carried is where the player is."""
        while kind(entity) != "r":
            entity = self.here if entity == INVENTORY else self.places[entity][1]
        return entity

    def shut(self, entity: str) -> str:
        """``open``, ``closed`` or ``locked``: state of a container or door."""
        return next(state for state in ("open", "closed", "locked") if (state, entity) in self.all)

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """What can be locked -> its key."""
        return {fact[2]: fact[1] for fact in self.all if fact[0] == "match"}

    @cached_property
    def exits(self) -> Mapping[str, Mapping[str, tuple[str, str | None]]]:
        """Room -> direction -> (room there, door in between or None)."""
        doors = {(fact[1], fact[3]): fact[2] for fact in self.all if fact[0] == "link"}
        found: dict[str, dict[str, tuple[str, str | None]]] = {}
        for direction in _KEPT:
            for _, there, place in sorted(fact for fact in self.all if fact[0] == f"{direction}_of"):
                found.setdefault(place, {})[direction] = (there, doors.get((place, there)))
                found.setdefault(there, {})[OPPOSITE[direction]] = (place, doors.get((there, place)))
        return found


def _order(entity: str) -> tuple[int, str]:
    return int(entity[2:]), entity
