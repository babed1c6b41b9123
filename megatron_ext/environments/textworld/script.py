"""A scripted player: plans from any state by working back from the goal, and errs in habits of its own.

Invariants (``tests/environments/test_textworld_games.py``):

1. Without mistakes it solves every game from every state that can be reached.
2. Its mistakes are habits, not noise (a greedy copy of it errs too): what is listed first is opened, taken or used
   first; what was just taken is put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random

from megatron_ext.environments.textworld.facts import INVENTORY, Facts, kind
from megatron_ext.environments.textworld.layout import Layout

# Of the mistakes, the share that undoes something and the share that are commands the game does not know: their answer
# must occur in demonstrations, or the first bad command of a trained model derails the rest of its episode.
UNDO_SHARE = 0.15
INVALID_SHARE = 0.08


class Script:
    """Says what to do next in a state of one game, as a command."""

    def __init__(self, layout: Layout, names: Mapping[str, str]) -> None:
        self._layout, self._names = layout, names

    def next(self, facts: Facts) -> str:
        """The first step of the plan; ``look`` when the quest is done."""
        layout = self._layout
        if ("on", layout.wanted, layout.place) in facts:
            return "look"
        return (
            self._hold(facts, layout.wanted)
            or self._reach(facts, facts.room(layout.place))
            or f"put {self._names[layout.wanted]} on {self._names[layout.place]}"
        )

    def act(self, facts: Facts, rng: Random, mistake_rate: float) -> str:
        """``next``, or with probability ``mistake_rate`` what the habits make of it."""
        command = self.next(facts)
        # The draws do not depend on the state, so that two plays of a task differ by their mistakes alone.
        slip, undo, invalid = rng.random() < mistake_rate, rng.random() < UNDO_SHARE, rng.random() < INVALID_SHARE
        if not slip:
            return command
        if invalid:
            return command.rsplit(" ", 1)[0]
        if undo:
            return self._undone(facts) or command
        return self._habit(facts, command)

    # -- plan: each returns the first command towards its end, None when it is reached -------------------------------
    def _hold(self, facts: Facts, thing: str) -> str | None:
        relation, place = facts.places[thing]
        if place == INVENTORY:
            return None
        name = self._names[thing]
        if relation == "at":
            return self._reach(facts, place) or f"take {name}"
        opening = self._open(facts, place) if kind(place) == "c" else None
        return opening or self._reach(facts, facts.room(place)) or f"take {name} from {self._names[place]}"

    def _open(self, facts: Facts, container: str) -> str | None:
        state = facts.shut(container)
        if state == "open":
            return None
        if state == "locked":
            key = facts.keys[container]
            ready = self._hold(facts, key) or self._reach(facts, facts.room(container))
            return ready or f"unlock {self._names[container]} with {self._names[key]}"
        return self._reach(facts, facts.room(container)) or f"open {self._names[container]}"

    def _reach(self, facts: Facts, room: str) -> str | None:
        here = facts.here
        if here == room:
            return None
        direction, door = _first_step(facts, here, room)
        if door is None or facts.shut(door) == "open":
            return f"go {direction}"
        if facts.shut(door) == "closed":
            return f"open {self._names[door]}"
        key = facts.keys[door]
        return self._hold(facts, key) or f"unlock {self._names[door]} with {self._names[key]}"

    # -- habits ------------------------------------------------------------------------------------------------------
    def _undone(self, facts: Facts) -> str | None:
        """Puts down what the quest needs, into the first open container at hand."""
        needed = [*(key for key, _ in self._layout.chain), self._layout.wanted]
        held = next((thing for thing in reversed(needed) if thing in facts.carried), None)
        if held is None:
            return None
        places = [c for c in facts.inside(facts.here) if kind(c) == "c" and facts.shut(c) == "open"]
        return f"insert {self._names[held]} into {self._names[places[0]]}" if places else f"drop {self._names[held]}"

    def _habit(self, facts: Facts, command: str) -> str:
        verb, _, rest = command.partition(" ")
        at_hand = facts.inside(facts.here)
        if verb == "open":
            closed = [c for c in at_hand if kind(c) == "c" and facts.shut(c) == "closed"]
            return f"open {self._names[closed[0]]}" if closed else command
        if verb == "take":
            taken, _, source = rest.partition(" from ")
            found = next((e for e in at_hand if self._names.get(e) == source), None)
            first = [self._names[e] for e in (facts.inside(found) if found else []) if self._names[e] != taken]
            return f"take {first[0]} from {source}" if first else command
        if verb == "put":
            thing, _, place = rest.partition(" on ")
            other = [self._names[s] for s in at_hand if kind(s) == "s" and self._names[s] != place]
            return f"put {thing} on {other[0]}" if other else command
        return command


def _first_step(facts: Facts, start: str, goal: str) -> tuple[str, str | None]:
    """(direction, door) of the first passage of a shortest way, doors counted as open."""
    front: deque[tuple[str, tuple[str, str | None] | None]] = deque([(start, None)])
    seen = {start}
    while front:
        room, first = front.popleft()
        for direction, (there, door) in facts.exits.get(room, {}).items():
            if there in seen:
                continue
            seen.add(there)
            step = first or (direction, door)
            if there == goal:
                return step
            front.append((there, step))
    raise ValueError(f"no way from {start} to {goal}")
