"""What a TextWorld state and a move look like in words.

Short on purpose: a small model reads an episode in 100 to 200 tokens. Everything said is a fact; what is in a closed
container is not said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.environments.textworld.facts import Facts, kind
from megatron_ext.environments.textworld.layout import Layout

REFUSED = "You cannot do that."
WON = "You have won."
# What a move is answered with: a word for it, and whose role is named. Repeating the name is worth its tokens: a model
# that starts from nothing learns from it that names are copied.
_DONE = {
    "take": ("take", "o"),
    "drop": ("drop", "o"),
    "put": ("put down", "o"),
    "insert": ("put away", "o"),
    "open": ("open", "cd"),
    "close": ("close", "cd"),
    "lock": ("lock", "cd"),
    "unlock": ("unlock", "cd"),
    "eat": ("eat", "f"),
}


class Narrator:
    """Tells one game, with its names."""

    def __init__(self, layout: Layout, names: Mapping[str, str], *, tell_places: bool) -> None:
        """``tell_places``: the goal says where what is needed lies; otherwise it has to be looked for."""
        self._layout, self._names, self._tell_places = layout, names, tell_places

    def goal(self, start: Facts) -> str:
        """The quest as the first observation says it, in the order in which it is done."""
        name, layout, said = self._names, self._layout, []
        for key, lock in layout.chain:
            said.append(self._fetch(start, key))
            said.append(f"Unlock the {name[lock]} with the {name[key]}.")
        said.append(self._fetch(start, layout.wanted))
        said.append(f"Put the {name[layout.wanted]} on the {name[layout.place]}.")
        return " ".join(said)

    def _fetch(self, start: Facts, thing: str) -> str:
        if not self._tell_places:
            return f"Find the {self._names[thing]}."
        return f"Take the {self._names[thing]} from the {self._names[start.places[thing][1]]}."

    def room(self, facts: Facts) -> str:
        """The room that the player is in."""
        here = facts.here
        seen = [self._seen(facts, entity) for entity in facts.inside(here)]
        said = [f"You see {', '.join(seen)}." if seen else "You see nothing."]
        exits = facts.exits.get(here, {})
        if exits:
            said.insert(0, f"Room {int(here[2:]) + 1}.")
        for direction, (_, door) in exits.items():
            way = "a passage" if door is None else _with_article(f"{facts.shut(door)} {self._names[door]}")
            said.append(f"To the {direction}: {way}.")
        return " ".join(said)

    def carried(self, facts: Facts) -> str:
        return f"You carry {self._listed(facts.carried)}."

    def done(self, rule: str, roles: Mapping[str, str], facts: Facts) -> str:
        """The answer to a move that led to ``facts``."""
        if rule.startswith("go/") or rule == "look":
            return self.room(facts)
        if rule == "inventory":
            return self.carried(facts)
        verb = rule.partition("/")[0]
        if verb == "examine":
            return self._examined(facts, next(roles[role] for role in ("d", "o", "t", "I") if role in roles))
        if rule == "open/c":
            return f"The {self._names[roles['c']]} holds {self._listed(facts.inside(roles['c']))}."
        done, subject = _DONE[verb]
        return f"You {done} the {self._names[next(roles[role] for role in subject if role in roles)]}."

    def _seen(self, facts: Facts, entity: str) -> str:
        what, inside = self._names[entity], facts.inside(entity)
        if kind(entity) == "c":
            state = facts.shut(entity)
            what = f"{state} {what}"
            inside = inside if state == "open" else []
        return _with_article(what) + (f" with {self._listed(inside)}" if inside else "")

    def _examined(self, facts: Facts, entity: str) -> str:
        if kind(entity) == "c" and facts.shut(entity) == "open":
            return self._content(facts, entity)
        if kind(entity) in "cd":
            return f"It is {facts.shut(entity)}."
        return self._content(facts, entity) if kind(entity) == "s" else "It is nothing special."

    def _content(self, facts: Facts, place: str) -> str:
        return f"It holds {self._listed(facts.inside(place))}."

    def _listed(self, entities: Sequence[str]) -> str:
        return " and ".join(_with_article(self._names[entity]) for entity in entities) or "nothing"


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
