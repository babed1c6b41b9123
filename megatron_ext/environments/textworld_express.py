"""TextWorldExpress games (peckingorder, sorting, cookingworld, ...) as environments.

Invariants (``tests/environments/test_textworld.py`` and ``test_contract.py``):

1. The rewards of an episode sum to its final score; a failed episode has score 0.
2. Splits differ in seeds, in the game's own fold of names, in layout (fingerprint: first observation and gold path,
   with names reduced to their order of appearance; the first observation alone in coin and twc, whose solver walks at
   random) and, when renaming is on, in adjective-noun pairs.
3. The agent sees text only: valid commands are not listed, an unknown one is answered by the game's message and costs
   a turn.
4. Two states of one game with the same surroundings, inventory, score and changed rooms have the same hash, whatever
   path led there.

Parameters of the games, as the generator of ``textworld-express`` 1.1.0 accepts them (``params``; its own defaults
after the ``=``; 0/1 are switches):

=============  =====================================================================================================
cookingworld   numLocations=11 (2..11, 1 works), numIngredients=3 (1..4), numDistractorItems=10 (0..10),
               includeDoors=1, limitInventorySize=1
twc            numLocations=3 (1..3), numItemsToPutAway=4 (1..4), includeDoors=0, limitInventorySize=0
coin           numLocations=11 (2..11), numDistractorItems=0 (0..10), includeDoors=1, limitInventorySize=1
mapreader      numLocations=15 (2..50), maxDistanceApart=4 (1..8), maxDistractorItemsPerLocation=3 (0..3),
               includeDoors=0, limitInventorySize=0
simonsays      gameLength=5 (1..1000), numDistractors=3 (0..5), memorization=0 (1: the whole sequence is said once, at
               the start), verbose=0 (memorization only; 1: "Correct!" after each step instead of nothing)
arithmetic, sorting, peckingorder: none
=============  =====================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from megatron_ext.environments.corpus import scripted_texts
from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolSpec, stable_hash
from megatron_ext.environments.splits import SplitScan, check_split
from megatron_ext.environments.textworld_experts import EpisodeView, expert_for, explore
from megatron_ext.environments.textworld_jvm import Game, GameState, shared_machine
from megatron_ext.environments.textworld_names import RENAMED_GAMES, NamePairs, Renaming, renamed_things, task_renaming
from megatron_ext.trajectory.task import Task

# Share of the script's mistakes that are commands the game does not know: their message must occur in demonstrations,
# or the first bad command of a trained model derails the rest of its episode.
INVALID_SHARE = 0.08
# Games whose solver walks at random: its path is not a function of the seed.
_RANDOM_SOLVER = ("coin", "twc")
_WALK = 60  # steps that a depth-first walk through the largest map takes at most
_ROOM = re.compile(r"^You are in the (.+?)\.")


@dataclass
class _Episode:
    """State of the episode being played; game text is in the game's own names."""

    seed: int
    split: str
    renaming: Renaming | None
    first: GameState
    state: GameState
    history: list[tuple[str, str]]
    actions: list[Action]
    rooms: dict[str, tuple[str, str]]
    score: float = 0.0
    done: bool = False
    gold: tuple[str, ...] | None = None


class TextWorldExpress:
    """One game; see the module's docstring for ``params``."""

    def __init__(
        self,
        game: str,
        params: Mapping[str, int] | None = None,
        rename: bool | Mapping[str, Any] = False,
        show_task: bool = False,
    ) -> None:
        """
        Args:
            game: name of the game.
            params: generation parameters; the generator's defaults fill the rest.
            rename: give objects adjective-noun names; a mapping holds the fields of ``NamePairs``.
            show_task: put the game's task description before the first observation.
        """
        self._game_name = game
        self._params = dict(params or {})
        self._rename = rename
        self._show_task = show_task
        self._pairs: NamePairs | None = None
        if rename is not False:
            self._pairs = NamePairs() if rename is True else NamePairs(**rename)
            renamed_things(game, "train")
        self._parameters = ",".join(f"{key}={int(value)}" for key, value in sorted(self._params.items()))
        self._game: Game = shared_machine().game(game, self._parameters)
        self._solver: Game | None = None
        self._scans: dict[str, SplitScan] = {}
        self._episode: _Episode | None = None

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        state = self._game.start(seed, check_split(split))
        renaming = None
        if self._pairs is not None:
            renaming = task_renaming(self._pairs, self._game_name, split, split, seed)
        self._episode = _Episode(seed, split, renaming, state, state, [], [], {})
        self._note_room(state)
        text = state.observation
        if self._show_task:
            text = f"{self._game.description()}\n{text}"
        return Observation(self._outward(text))

    def step(self, action: Action) -> Observation:
        episode = self._current()
        if episode.done:
            raise EnvironmentEnded(f"{self._game_name}: step after the end; call reset first")
        episode.actions.append(action)
        if not isinstance(action, str):
            return Observation("This game takes a text command, not a tool call.", score=episode.score, valid=False)
        command = " ".join(action.split())
        if episode.renaming is not None:
            command = episode.renaming.inward(command)
        valid = command in episode.state.valid
        state = self._game.step(command)
        score = min(1.0, max(0.0, state.score))
        reward, episode.score = score - episode.score, score
        episode.done = state.success or state.failure
        episode.state = state
        episode.history.append((command, state.observation))
        self._note_room(state)
        return Observation(
            self._outward(state.observation),
            reward=reward,
            done=episode.done,
            success=state.success,
            score=score,
            valid=valid,
        )

    def copy(self) -> TextWorldExpress:
        """By replay: the game has no snapshot. Costs one reset and one step an action (about 0.2 ms each)."""
        twin = TextWorldExpress(self._game_name, self._params, self._rename, self._show_task)
        if self._episode is not None:
            twin.reset(self._episode.seed, split=self._episode.split)
            for action in self._episode.actions:
                twin.step(action)
        return twin

    def state_hash(self) -> str:
        """Hash of the visible state and of every room that no longer looks as it did when first seen."""
        episode = self._current()
        state = episode.state
        parts = [self._game_name, self._parameters, episode.split, str(episode.seed), state.look, state.inventory]
        parts += [repr(state.score), str(state.success), str(state.failure), *sorted(state.valid)]
        for room, (first, last) in sorted(episode.rooms.items()):
            if first != last:
                parts += [room, last]
        return stable_hash(*parts)

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        scan = self._scans.setdefault(split, SplitScan(split))
        for seed in scan.until(start + count):
            fingerprint, identity, clear = self._content(seed, split)
            if clear:
                scan.offer(seed, fingerprint, identity)
        return [
            Task(f"{self._game_name}/{split}/{seed}", self._game_name, seed, split)
            for seed in scan.seeds[start : start + count]
        ]

    def close(self) -> None:
        """Forgets the game; the virtual machine stays for the process's other games."""
        self._episode = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> str:
        episode = self._current()
        view = EpisodeView(
            first=episode.first.observation,
            state=episode.state,
            history=episode.history,
            gold=self._gold,
            task=self._game.description,
        )
        action = self._outward(expert_for(self._game_name)(view, rng, mistake_rate))
        if rng.random() < mistake_rate * INVALID_SHARE:
            return action.rsplit(" ", 1)[0] if " " in action else f"{action} {action}"
        return action

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return scripted_texts(self, split, count)

    # -- for audits ------------------------------------------------------------------------------------------------
    def valid_actions(self) -> list[str]:
        """Commands the game accepts now, as the agent would write them; never shown to it."""
        return sorted(self._outward(action) for action in self._current().state.valid)

    def fingerprint(self, seed: int, split: str) -> str:
        """Content of a task up to names: first observation and gold path, names numbered as they appear."""
        return self._content(seed, split)[0]

    # -- inside ----------------------------------------------------------------------------------------------------
    def _current(self) -> _Episode:
        if self._episode is None:
            raise EnvironmentEnded(f"{self._game_name}: no episode; call reset first")
        return self._episode

    def _outward(self, text: str) -> str:
        renaming = self._current().renaming
        return text if renaming is None else renaming.outward(text)

    def _note_room(self, state: GameState) -> None:
        match = _ROOM.match(state.look)
        if match is not None:
            rooms = self._current().rooms
            first = rooms[match[1]][0] if match[1] in rooms else state.look
            rooms[match[1]] = (first, state.look)

    def _content(self, seed: int, split: str) -> tuple[str, str, bool]:
        """Fingerprint of a task, its identity with names, and whether the names tell its things apart."""
        game = self._solving_game()
        state = game.start(seed, check_split(split), gold=True)
        if self._game_name in _RANDOM_SOLVER:
            fingerprint = stable_hash(self._game_name, self._parameters, state.observation)
            return fingerprint, stable_hash(fingerprint, *_rooms_seen(game, state)), True
        path = game.gold_path()
        # Only mapreader's description differs between tasks; asking for it costs a call.
        description = game.description() if self._game_name == "mapreader" else ""
        text = "\n".join((description, state.observation, *path))
        identity = stable_hash(self._game_name, self._parameters, text)
        if self._pairs is not None:
            identity = stable_hash(identity, str(seed))  # the names are drawn by seed
        if self._game_name in RENAMED_GAMES:
            order: dict[str, str] = {}
            forms = [form for thing in renamed_things(self._game_name, split) for form in thing]
            longest_first = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
            pattern = rf"\b(?:(?:a|an|A|An) )?({longest_first})\b"
            text = re.sub(pattern, lambda match: order.setdefault(match[1], f"thing{len(order)}"), text)
        takes = [command for command in path if command.startswith("take ")]
        # The dev fold of peckingorder lists one name twice; two things of one name cannot be told apart.
        clear = self._game_name != "peckingorder" or len(takes) == len(set(takes))
        return stable_hash(self._game_name, self._parameters, text), identity, clear

    def _solving_game(self) -> Game:
        if self._solver is None:
            self._solver = shared_machine().game(self._game_name, self._parameters)
        return self._solver

    def _gold(self) -> tuple[str, ...]:
        """The solver's path for this episode, found in a second copy of the game on first use."""
        episode = self._current()
        if episode.gold is None:
            game = self._solving_game()
            game.start(episode.seed, episode.split, gold=True)
            episode.gold = game.gold_path()
        return episode.gold


def _rooms_seen(game: Game, state: GameState) -> list[str]:
    """What a depth-first walk through open exits shows, sorted: tells games apart that begin alike."""
    first, history = state.observation, list[tuple[str, str]]()
    for _ in range(_WALK):
        command = explore(EpisodeView(first, state, history, tuple, str))
        if command is None:
            break
        state = game.step(command)
        history.append((command, state.observation))
    return sorted({first, *(text for _, text in history)})
