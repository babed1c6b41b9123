"""TextWorld's own engine on a layout: its logic, its knowledge base, its quests.

Invariants (``tests/environments/test_textworld_games.py``):

1. What may be done, what it changes and when a quest is completed is decided by ``textworld`` alone.
2. A copy is a snapshot: acting in it leaves the original as it was.
3. Commands are TextWorld's templates with the entities' names.

The package's compiler (Inform 7) writes the story of a game as a Z-machine program; it takes about two seconds a game
and is not used. Without it a game is ready in about a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from textworld.generator.data import KnowledgeBase
from textworld.generator.game import Event, Quest
from textworld.generator.world import World
from textworld.logic import Action, Proposition, Rule, State, Variable

from megatron_ext.environments.textworld.facts import Fact, Facts
from megatron_ext.environments.textworld.layout import Layout


@dataclass(frozen=True)
class Move:
    """Something that may be done: TextWorld's rule, and who plays which of its roles (``{"o": "k_0", "c": "c_1"}``)."""

    rule: str
    roles: Mapping[str, str]
    action: Action


@lru_cache(maxsize=65536)
def proposition(fact: Fact) -> Proposition:
    """A fact as TextWorld's."""
    return Proposition(fact[0], [Variable(entity, entity[0]) for entity in fact[1:]])


def plain(facts: Iterable[Proposition]) -> frozenset[Fact]:
    """TextWorld's facts as tuples."""
    return frozenset((fact.name, *fact.names) for fact in facts)


class Played:
    """One game being played."""

    def __init__(self, layout: Layout, names: Mapping[str, str]) -> None:
        world = World.from_facts([proposition(fact) for fact in layout.facts], kb=KnowledgeBase.default())
        self._quests = tuple(
            Quest(win_events=[Event(conditions=[proposition(fact) for fact in way]) for way in subgoal.ways])
            for subgoal in layout.subgoals
        )
        self._names = dict(names)
        self._enter(world.state.copy())

    def _enter(self, state: State) -> None:
        self._state = state
        self._facts: Facts | None = None
        self._moves: dict[str, dict[str, Move]] = {}

    def copy(self) -> Played:
        twin = Played.__new__(Played)
        twin._quests, twin._names = self._quests, self._names
        twin._enter(self._state.copy())
        return twin

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = Facts(plain(self._state.facts))
        return self._facts

    @property
    def completed(self) -> bool:
        return bool(self._quests[-1].is_winning(self._state))

    @property
    def level(self) -> int:
        """Number of the last sub-goal that holds now, counted from 1; 0: none does.

        A sub-goal before one that holds is needed no more: a key may be dropped once its lock is undone.
        """
        return max((i + 1 for i, quest in enumerate(self._quests) if quest.is_winning(self._state)), default=0)

    def move(self, command: str) -> Move | None:
        """What a command does, None if it cannot be done now."""
        return self._with_verb(command.partition(" ")[0]).get(command)

    def commands(self) -> list[str]:
        """All that may be done now."""
        return sorted(command for verb in _rules_by_verb() for command in self._with_verb(verb))

    def make(self, move: Move) -> None:
        """Carries out a move of this state."""
        self._state.apply(move.action)
        self._enter(self._state)

    def _with_verb(self, verb: str) -> Mapping[str, Move]:
        """Command -> move. Only the rules of one verb are matched: that is most of what a step costs."""
        if verb not in self._moves:
            base = KnowledgeBase.default()
            found: dict[str, Move] = {}
            for rule in _rules_by_verb().get(verb, ()):
                for action in self._state.all_applicable_actions([rule], base.types.constants_mapping):
                    roles = {place.name: variable.name for place, variable in rule.match(action).items()}
                    words = {role: self._names.get(entity, entity) for role, entity in roles.items()}
                    # Rules that share a command ("examine") change nothing, so any of them will do.
                    found.setdefault(base.inform7_commands[rule.name].format(**words), Move(rule.name, roles, action))
            self._moves[verb] = found
        return self._moves[verb]


@lru_cache(maxsize=1)
def _rules_by_verb() -> Mapping[str, tuple[Rule, ...]]:
    base = KnowledgeBase.default()
    found: dict[str, tuple[Rule, ...]] = {}
    for name, command in sorted(base.inform7_commands.items()):
        verb = command.partition(" ")[0]
        found[verb] = (*found.get(verb, ()), base.rules[name])
    return found
