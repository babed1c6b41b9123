"""Layouts of key-and-lock games: rooms, what stands in them, what is locked by which key, and the quest.

The family: something is wanted on a supporter; it lies behind a chain of locks. Each lock's key lies behind the lock
before it, the first one in a closed container. The sub-goals are facts: the key is held, the lock is undone (for each
lock), the wanted thing is held, and lies where it is wanted.

Invariants (``tests/environments/test_textworld_games.py``):

1. A layout is a function of (size, seed), the same in every process.
2. Every layout can be solved, keeps all constraints of TextWorld's knowledge base, and holds none of its sub-goals at
   the start.
3. The content that decides a task's split (``fingerprint``) holds no name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

from megatron_ext.environments.protocol import stable_hash
from megatron_ext.environments.textworld.facts import INVENTORY, PLAYER, Fact, beside

_STEPS = {"north": (0, 1), "south": (0, -1), "west": (-1, 0), "east": (1, 0)}


@dataclass(frozen=True)
class GameSize:
    """How large and hard a game is.

    Attributes:
        rooms: in a chain; the first ``locks`` passages are locked doors, the others are open.
        locks: things to unlock, one after the other; those that are no doors are containers.
        containers: closed ones without a lock, over all rooms.
        distractors: things that nobody wants, in the containers, with the keys and on the supporters.
        supporters: places to put things on.
    """

    rooms: int = 1
    locks: int = 1
    containers: int = 3
    distractors: int = 3
    supporters: int = 1

    def __post_init__(self) -> None:
        limits = {"rooms": (1, 8), "locks": (0, 6), "containers": (1, 12), "distractors": (0, 20), "supporters": (1, 6)}
        for field in fields(self):
            low, high = limits[field.name]
            value = getattr(self, field.name)
            if not low <= value <= high:
                raise ValueError(f"TextWorld: size.{field.name} must be {low}..{high}, got {value}")
        if self.containers < 1 + self.doors:
            raise ValueError(
                f"TextWorld: size.containers is {self.containers}, but {1 + self.doors} are needed: one for the first "
                "key, and one behind each locked door (rooms and locks say how many doors)"
            )

    @property
    def doors(self) -> int:
        """Locked doors among the locks."""
        return min(self.rooms - 1, self.locks)

    @property
    def names(self) -> int:
        """Things that carry a name."""
        return 2 * self.locks + self.containers + self.distractors + self.supporters + 1


@dataclass(frozen=True)
class Subgoal:
    """Reached in a state that has all facts of one of ``ways``."""

    ways: tuple[tuple[Fact, ...], ...]


@dataclass(frozen=True)
class Layout:
    """A game without its names.

    Attributes:
        facts: the first state.
        named: entities that get a name.
        wanted, place: the thing to bring and the supporter to put it on.
        chain: (key, lock) in the order in which they are needed.
        subgoals: in the order in which they are reached; the last one is the quest.
    """

    facts: tuple[Fact, ...]
    named: tuple[str, ...]
    wanted: str
    place: str
    chain: tuple[tuple[str, str], ...]
    subgoals: tuple[Subgoal, ...]

    def fingerprint(self) -> str:
        return stable_hash("layout", self.wanted, self.place, *(" ".join(fact) for fact in sorted(self.facts)))


def make_layout(size: GameSize, seed: int) -> Layout:
    """The layout of a seed."""
    rng = Random(int(stable_hash("textworld layout", repr(size), str(seed))[:15], 16))
    facts: set[Fact] = set()
    rooms = [f"r_{i}" for i in range(size.rooms)]
    doors = [f"d_{i}" for i in range(size.doors)]
    _connect(rng, facts, rooms, doors)

    # Numbers are drawn so that what is listed first says nothing about what is wanted.
    crates = _shuffled(rng, "c", size.containers + size.locks - size.doors)
    boxes, chests = crates[: size.containers], crates[size.containers :]
    supporters = _shuffled(rng, "s", size.supporters)
    things = _shuffled(rng, "o", size.distractors + 1)
    keys = _shuffled(rng, "k", size.locks)
    wanted, others = things[0], things[1:]

    # Box 0 holds what the chain begins with; behind door i stands box i + 1, which holds what comes next.
    reach = [0, *range(1, size.doors + 1)]
    for i, box in enumerate(boxes):
        at = _reached(rng, size, reach[i]) if i < len(reach) else rng.randrange(size.rooms)
        facts |= {("at", box, rooms[at]), ("closed", box)}
    for chest in chests:
        facts |= {("at", chest, rng.choice(rooms)), ("locked", chest)}
    for supporter in supporters:
        facts.add(("at", supporter, rng.choice(rooms)))
    locks = [*doors, *chests]
    facts |= {("locked", door) for door in doors}
    facts |= {("match", key, lock) for key, lock in zip(keys, locks, strict=True)}
    holders = [boxes[0], *boxes[1 : size.doors + 1], *chests]
    for thing, holder in zip([*keys, wanted], holders, strict=True):
        facts.add(("in", thing, holder))
    # Distractors lie where something wanted lies (so that one has to choose), in other boxes, and on supporters.
    spots = [*holders, *boxes[size.doors + 1 :], *supporters]
    for thing in others:
        spot = rng.choice(holders) if rng.random() < 0.5 else rng.choice(spots)
        facts.add(("on" if spot[0] == "s" else "in", thing, spot))
    facts.add(("at", PLAYER, rooms[0]))

    place = supporters[0]
    subgoals = []
    for key, lock in zip(keys, locks, strict=True):
        subgoals += [Subgoal(((("in", key, INVENTORY),),)), Subgoal(((("closed", lock),), (("open", lock),)))]
    subgoals += [Subgoal(((("in", wanted, INVENTORY),),)), Subgoal(((("on", wanted, place),),))]
    return Layout(
        facts=tuple(sorted(facts)),
        named=tuple(sorted([*doors, *crates, *supporters, *things, *keys])),
        wanted=wanted,
        place=place,
        chain=tuple(zip(keys, locks, strict=True)),
        subgoals=tuple(subgoals),
    )


def _shuffled(rng: Random, letter: str, count: int) -> list[str]:
    entities = [f"{letter}_{i}" for i in range(count)]
    rng.shuffle(entities)
    return entities


def _reached(rng: Random, size: GameSize, doors: int) -> int:
    """A room that can be entered once the first ``doors`` doors are open, and not before."""
    return doors if doors < size.doors else rng.randrange(doors, size.rooms)


def _connect(rng: Random, facts: set[Fact], rooms: list[str], doors: list[str]) -> None:
    """A chain of rooms on a grid that does not meet itself; passage i has door i, if there is one."""
    at, taken = (0, 0), {(0, 0)}
    for i, (room, following) in enumerate(zip(rooms, rooms[1:], strict=False)):
        # A chain of at most 8 rooms that never turns back west cannot shut itself in.
        free = [d for d in ("north", "south", "east") if (at[0] + _STEPS[d][0], at[1] + _STEPS[d][1]) not in taken]
        direction = rng.choice(free)
        at = (at[0] + _STEPS[direction][0], at[1] + _STEPS[direction][1])
        taken.add(at)
        facts.add(beside(room, direction, following))
        if i < len(doors):
            facts |= {("link", room, doors[i], following), ("link", following, doors[i], room)}
        else:
            facts |= {("free", room, following), ("free", following, room)}
