"""Scripted players of TextWorldExpress games, imperfect on purpose.

A script plays well except that, with probability ``mistake_rate`` at each decision that matters, it follows a wrong
*habit*. Habits can be learned, so that a model trained on the demonstrations is weak under greedy decoding too and
RL has something to correct; random slips would be averaged away.

=============  =====================================================================================================
peckingorder   takes the first listed item instead of the one the book names
sorting        ignores units ("18ml" after "16l"); where units make no difference, takes the first listed item
cookingworld   slices what should be chopped or diced (chops what should be sliced), puts what should be fried or
               grilled into the oven (what should be roasted on the stove)
coin           takes the first listed exit, explored or not
mapreader      takes the first listed exit instead of the one on the shortest way
simonsays      repeats the previous command; in the memory variant, skips one
arithmetic     takes the first listed quantity instead of the one that equals the answer
twc            none: follows the game's own solver, with random valid commands as mistakes
=============  =====================================================================================================

Invariants (``tests/environments/test_textworld.py``):

1. With ``mistake_rate`` 0 the scripts solve their games (``cookingworld`` in one room, ``coin`` without doors).
2. A script decides from the episode alone and keeps no state: the same view and generator give the same action. (Not
   where the game's own solver is followed through several rooms, in ``twc`` and in ``coin`` with doors: it walks at
   random.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from megatron_ext.environments.textworld_jvm import GameState


@dataclass(frozen=True)
class EpisodeView:
    """What a script sees, in the game's own names.

    Attributes:
        first: first observation.
        state: the game's latest answer; ``state.valid`` are the commands it accepts.
        history: (command, observation) of every step so far.
        gold: the path of the game's solver from the start, computed on first call.
        task: the game's task description.
    """

    first: str
    state: GameState
    history: Sequence[tuple[str, str]]
    gold: Callable[[], tuple[str, ...]]
    task: Callable[[], str]

    def commands(self) -> list[str]:
        return [command for command, _ in self.history]

    def observation(self) -> str:
        return self.history[-1][1] if self.history else self.first

    def seen(self, command: str) -> str | None:
        """The latest observation that followed ``command``."""
        return next((text for done, text in reversed(self.history) if done == command), None)


Expert = Callable[[EpisodeView, Random, float], str]


def expert_for(game: str) -> Expert:
    return _EXPERTS.get(game, follow_gold)


def follow_gold(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    """The solver's next command not yet given in order; a random valid one as mistake and when the path is used up."""
    path = view.gold()
    at = 0
    for command in view.commands():
        if at < len(path) and command == path[at]:
            at += 1
    if at == len(path) or rng.random() < mistake_rate:
        return rng.choice(sorted(view.state.valid))
    return path[at]


def _listed(view: EpisodeView, commands: Sequence[str], prefix: str) -> list[str]:
    """Commands in the order in which what they name is listed in the first observation."""

    def place(command: str) -> tuple[int, str]:
        match = re.search(rf"\b{re.escape(command.removeprefix(prefix))}\b", view.first)
        return (match.start() if match else len(view.first), command)

    return sorted(commands, key=place)


# -- peckingorder --------------------------------------------------------------------------------------------------
_TASK = re.compile(r"^The current task is to take the (.+)\.$")


def peckingorder(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    named = _TASK.match(view.observation())
    if named is None:
        if rng.random() < mistake_rate / 4:
            return rng.choice(sorted(view.state.valid))
        return "read instructions book"
    takes = _listed(view, [c for c in view.state.valid if c.startswith("take ")], "take ")
    if takes and rng.random() < mistake_rate:
        return takes[0]
    return f"take {named[1]}"


# -- sorting -------------------------------------------------------------------------------------------------------
_QUANTITY = re.compile(r"^take (\d+)(?:(mg|g|kg|ml|l|mm|cm|m) of)? ")
_UNITS = {"mg": 1, "g": 1000, "kg": 10**6, "ml": 1, "l": 1000, "mm": 1, "cm": 10, "m": 1000}


def sorting(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    puts = sorted(c for c in view.state.valid if c.startswith("put ") and c.endswith(" in box"))
    boxed = {c.removeprefix("put ").removesuffix(" in box") for c in view.commands() if c.endswith(" in box")}
    if puts:
        return puts[0]
    amounts: dict[str, tuple[int, int]] = {}
    for command in view.state.valid:
        match = _QUANTITY.match(command)
        if match is not None and command.removeprefix("take ") not in boxed:
            number = int(match[1])
            amounts[command] = (number * _UNITS[match[2]] if match[2] else number, number)
    if not amounts:
        return "look around"
    listed = _listed(view, list(amounts), "take ")
    right = min(listed, key=lambda command: amounts[command][0])
    if rng.random() < mistake_rate:
        by_number = min(listed, key=lambda command: amounts[command][1])
        return by_number if by_number != right else listed[0]
    return right


# -- cookingworld --------------------------------------------------------------------------------------------------
_CUTS = ("slice", "chop", "dice")
_HEAT = {"fry": ("stove",), "roast": ("oven",), "grill": ("toaster", "barbeque")}


def cookingworld(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    valid = view.state.valid
    recipe = view.seen("read cookbook")
    if recipe is None or "Ingredients:" not in recipe:
        return "read cookbook"
    listed, _, directed = recipe.partition("Directions:")
    ingredients = [line.strip() for line in listed.partition("Ingredients:")[2].splitlines() if line.strip()]
    directions = [line.strip().split(" the ", 1) for line in directed.splitlines() if " the " in line]
    held = view.state.inventory
    if "eat meal" in valid:
        return "eat meal"
    missing = [name for name in ingredients if not re.search(rf"\b{re.escape(name)}\b", held)]
    if any(verb in _CUTS for verb, _ in directions) and not re.search(r"\bknife\b", held):
        missing.append("knife")
    for name in missing:
        if f"take {name}" in valid:
            return f"take {name}"
    if missing:
        return _search(view)
    commands = view.commands()
    cut = {c.partition(" ")[2] for c in commands if c.partition(" ")[0] in _CUTS}
    heated = {c.removeprefix("cook ").rsplit(" in ", 1)[0] for c in commands if c.startswith("cook ")}
    # Cutting needs the raw thing, so cuts come before heat, as in the game's own solver.
    for verb, name in sorted(directions, key=lambda direction: direction[0] in _HEAT):
        if name in (cut if verb in _CUTS else heated):
            continue
        mistake = rng.random() < mistake_rate
        if verb in _CUTS:
            return f"{('chop' if verb == 'slice' else 'slice') if mistake else verb} {name}"
        places = [place for place in _HEAT[verb] if f"cook {name} in {place}" in valid]
        if mistake or not places:
            return f"cook {name} in {'stove' if verb == 'roast' else 'oven'}"
        return f"cook {name} in {places[0]}"
    return "prepare meal"


def _search(view: EpisodeView) -> str:
    """Opens the next container that was not opened yet, the likely ones first, then looks in other rooms."""
    opened = set(view.commands())
    containers = [c for c in view.state.valid if c.startswith("open ") and " door " not in c and c not in opened]
    order = ("open fridge", "open kitchen cupboard", "open cutlery drawer")
    for command in (*order, *sorted(containers)):
        if command in containers:
            return command
    return explore(view) or "look around"


# -- rooms: coin and mapreader -------------------------------------------------------------------------------------
_ROOM = re.compile(r"^You are in the (.+?)\.")
_EXIT = re.compile(r"To the (North|South|East|West) you see the ([a-z ]+)\.")


def _room_of(text: str) -> str | None:
    match = _ROOM.match(text)
    return match[1] if match else None


def _exits(text: str) -> dict[str, str]:
    """Room -> command, in the order listed."""
    return {room: f"move {direction.lower()}" for direction, room in _EXIT.findall(text)}


def explore(view: EpisodeView) -> str | None:
    """Depth-first: the first exit to a room never entered, otherwise back the way the room was first entered."""
    here = _room_of(view.state.look)
    if here is None:
        return None
    texts = [view.first] + [text for _, text in view.history]
    path: list[str] = []
    for text in texts:
        room = _room_of(text)
        if room is None or (path and path[-1] == room):
            continue
        # Standing in a room again means that everything entered after it has been left.
        path = path[: path.index(room) + 1] if room in path else [*path, room]
    visited = {room for room in map(_room_of, texts) if room is not None}
    exits = _exits(view.state.look)
    for room, command in exits.items():
        if room not in visited:
            return command
    if here in path and path.index(here) > 0:
        return exits.get(path[path.index(here) - 1])
    return None


def coin(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    if "take coin" in view.state.valid:
        return "take coin"
    if "door" in view.state.look:
        return follow_gold(view, rng, mistake_rate)
    exits = list(_exits(view.state.look).values())
    if exits and rng.random() < mistake_rate:
        return exits[0]
    return explore(view) or "look around"


_PLACES = re.compile(r"located in the (.+?), and put it into the box found in the (.+?)\.")
_CONNECTS = re.compile(r"The (.+?) connects to the (.+?)\.")


def mapreader(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    task, chart = view.seen("task"), view.seen("read map")
    if task is None:
        return "task"
    if chart is None:
        return "read map"
    if "put coin in box" in view.state.valid:
        return "put coin in box"
    if "take coin" in view.state.valid and "put coin in box" not in view.commands():
        return "take coin"
    exits = _exits(view.state.look)
    if exits and rng.random() < mistake_rate:
        return next(iter(exits.values()))
    places = _PLACES.search(task)
    here = _room_of(view.state.look)
    if places is None or here is None:
        return "look around"
    graph = {room: re.split(r", | and ", near) for room, near in _CONNECTS.findall(chart)}
    goal = places[2] if "a coin" in view.state.inventory else places[1]
    following = _first_step(graph, here, goal)
    return exits.get(following, "look around")


def _first_step(graph: Mapping[str, Sequence[str]], start: str, goal: str) -> str:
    """The neighbour of ``start`` on a shortest way to ``goal``, breadth first from it; ``goal`` if unreachable."""
    distance = {goal: 0}
    front = [goal]
    while front:
        following = []
        for room in front:
            for near in graph.get(room, ()):
                if near not in distance:
                    distance[near] = distance[room] + 1
                    following.append(near)
        front = following
    reachable = [room for room in graph.get(start, ()) if room in distance]
    return min(reachable, key=lambda room: distance[room]) if reachable else goal


# -- simonsays and arithmetic --------------------------------------------------------------------------------------
_ORDER = "Simon says, take these actions in order: "


def simonsays(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    mistake = rng.random() < mistake_rate
    if view.first.startswith(_ORDER):
        sequence = view.first.removeprefix(_ORDER).rstrip(".").split(", ")
        at = 0
        for command in view.commands():
            at += at < len(sequence) and command == sequence[at]
        at = min(at + (1 if mistake else 0), len(sequence) - 1)
        return sequence[at]
    asked = [text.split("'")[1] for text in [view.first, *(t for _, t in view.history)] if text.count("'") == 2]
    return asked[-2] if mistake and len(asked) > 1 else asked[-1]


def arithmetic(view: EpisodeView, rng: Random, mistake_rate: float) -> str:
    if view.seen("read math problem") is None:
        return "read math problem" if "read math problem" in view.state.valid else "take math problem"
    puts = sorted(c for c in view.state.valid if re.match(r"put \d", c) and c.endswith(" in box"))
    if puts:
        return puts[0]
    takes = _listed(view, [c for c in view.state.valid if _QUANTITY.match(c)], "take ")
    if takes and rng.random() < mistake_rate:
        return takes[0]
    return view.gold()[-2]


_EXPERTS: Mapping[str, Expert] = {
    "peckingorder": peckingorder,
    "sorting": sorting,
    "cookingworld": cookingworld,
    "coin": coin,
    "mapreader": mapreader,
    "simonsays": simonsays,
    "arithmetic": arithmetic,
}
