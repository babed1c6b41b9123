"""TextWorld games of keys and locks as environments: find a key, undo a lock, fetch a thing, put it where it is wanted.

The world is TextWorld's: its logic decides what may be done and what it changes, its quests when a game is won. Games
are made from facts and told from facts, so that one is ready in about a millisecond.

Invariants (``tests/environments/test_textworld_games.py`` and ``test_contract.py``):

1. Two states of one task with the same facts have the same hash, whatever path led there.
2. Splits differ in layout (fingerprint: facts without names) and in adjective-noun pairs.
3. The agent sees text only: what may be done is not listed, a command that cannot be done is answered and costs a turn.
4. ``info`` holds what a judge of steps needs, from facts alone: ``level`` (number of the last sub-goal that holds) and
   ``levels`` (how many there are).
5. ``action`` is the same for all ways to say a command, and for all commands that are refused.
6. ``copy`` is a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from megatron_ext.environments.corpus import scripted_texts
from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolSpec, stable_hash
from megatron_ext.environments.splits import SPLITS, SplitScan, check_split
from megatron_ext.environments.textworld.layout import GameSize, Layout, make_layout
from megatron_ext.environments.textworld.script import Script
from megatron_ext.environments.textworld.text import REFUSED, WON, Narrator
from megatron_ext.environments.textworld_names import NamePairs
from megatron_ext.trajectory.task import Task

if TYPE_CHECKING:
    from megatron_ext.environments.textworld.engine import Played

_ARTICLES = ("the", "a", "an")
# All commands that cannot be done are one action: none changes anything, and all are answered alike.
_REFUSED_ACTION = "(refused)"


@dataclass(frozen=True)
class _Told:
    """What stays the same during an episode."""

    seed: int
    split: str
    layout: Layout
    narrator: Narrator
    script: Script


class TextWorld:
    """One family of games; ``size`` says how large and hard they are."""

    def __init__(
        self,
        size: Mapping[str, int] | None = None,
        names: Mapping[str, Any] | None = None,
        tell_places: bool = True,
        dense_rewards: bool = False,
    ) -> None:
        """
        Args:
            size: fields of ``GameSize``; its defaults fill the rest.
            names: fields of ``NamePairs`` (adjective-noun pairs, split into train, dev and test).
            tell_places: the goal says where what is needed lies; otherwise it has to be looked for.
            dense_rewards: a step's reward is its change of the score, instead of 1 when the game is won.
        """
        self._size = GameSize(**(size or {}))
        self._pairs = NamePairs(**(names or {}))
        self._names_of = {split: self._pairs.split(split) for split in SPLITS}
        for split, pairs in self._names_of.items():
            if len(pairs) < self._size.names:
                raise ValueError(
                    f"TextWorld: a game of this size names {self._size.names} things, but {split} has {len(pairs)} "
                    "names: raise names.words or the share of the split, or make the game smaller"
                )
        self._tell_places, self._dense = tell_places, dense_rewards
        self._scans: dict[str, SplitScan] = {}
        self._told: _Told | None = None
        self._played: Played | None = None

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        # Imported where a game starts: TextWorld takes a second to load, and only workers play.
        from megatron_ext.environments.textworld.engine import Played

        layout = make_layout(self._size, seed)
        names = self._names(layout, seed, check_split(split))
        narrator = Narrator(layout, names, tell_places=self._tell_places)
        self._told = _Told(seed, split, layout, narrator, Script(layout, names))
        self._played = Played(layout, names)
        facts = self._played.facts
        return Observation(f"{narrator.goal(facts)}\n{narrator.room(facts)}", info=self._info())

    def step(self, action: Action) -> Observation:
        told, played = self._current()
        if played.completed:
            raise EnvironmentEnded("TextWorld: step after the end; call reset first")
        before = self._score()
        if not isinstance(action, str):
            return Observation(
                "This game takes a text command, not a tool call.",
                score=before,
                valid=False,
                info=self._info(),
                action=_REFUSED_ACTION,
            )
        command = " ".join(word for word in action.lower().split() if word not in _ARTICLES)
        move = played.move(command)
        if move is None:
            return Observation(REFUSED, score=before, valid=False, info=self._info(), action=_REFUSED_ACTION)
        played.make(move)
        text, won, score = told.narrator.done(move.rule, move.roles, played.facts), played.completed, self._score()
        return Observation(
            f"{text} {WON}" if won else text,
            reward=score - before if self._dense else float(won),
            done=won,
            success=won,
            score=score,
            info=self._info(),
            action=command,
        )

    def copy(self) -> TextWorld:
        twin = TextWorld.__new__(TextWorld)
        twin.__dict__.update(self.__dict__)
        twin._scans = {}
        twin._played = None if self._played is None else self._played.copy()
        return twin

    def state_hash(self) -> str:
        told, played = self._current()
        identity = (repr(self._size), repr(self._pairs), str(self._tell_places), told.split, str(told.seed))
        return stable_hash(*identity, *sorted(" ".join(fact) for fact in played.facts.all))

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        scan = self._scans.setdefault(split, SplitScan(split))
        for seed in scan.until(start + count):
            scan.offer(seed, self.fingerprint(seed, split), str(seed))
        return [Task(f"textworld/{split}/{seed}", "textworld", seed, split) for seed in scan.seeds[start:][:count]]

    def close(self) -> None:
        self._told = self._played = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> str:
        told, played = self._current()
        return told.script.act(played.facts, rng, mistake_rate)

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return scripted_texts(self, split, count, mistake_rate=0.3, most_turns=100)

    # -- for audits ------------------------------------------------------------------------------------------------
    def valid_actions(self) -> list[str]:
        """Commands the game accepts now; never shown to the agent."""
        return self._current()[1].commands()

    def fingerprint(self, seed: int, split: str) -> str:
        """Content of a task up to names. Equal for every split: layouts belong to seeds."""
        return make_layout(self._size, seed).fingerprint()

    # -- inside ----------------------------------------------------------------------------------------------------
    def _current(self) -> tuple[_Told, Played]:
        if self._told is None or self._played is None:
            raise EnvironmentEnded("TextWorld: no episode; call reset first")
        return self._told, self._played

    def _names(self, layout: Layout, seed: int, split: str) -> dict[str, str]:
        rng = Random(int(stable_hash("textworld names", repr(self._pairs), split, str(seed))[:15], 16))
        return dict(zip(layout.named, _draw(rng, self._names_of[split], len(layout.named)), strict=True))

    def _score(self) -> float:
        told, played = self._current()
        return played.level / len(told.layout.subgoals)

    def _info(self) -> dict[str, Any]:
        told, played = self._current()
        return {"level": played.level, "levels": len(told.layout.subgoals)}


def _draw(rng: Random, pairs: Sequence[str], count: int) -> list[str]:
    """``count`` different pairs, that share no word as long as such are easily found: things of one game are then told
    apart by any word."""
    drawn: list[str] = []
    used: set[str] = set()
    tries = 20 * count
    while len(drawn) < count:
        pair = rng.choice(pairs)
        tries -= 1
        if pair not in drawn and (tries < 0 or used.isdisjoint(pair.split())):
            drawn.append(pair)
            used.update(pair.split())
    return drawn
