"""Renaming of game objects to adjective-noun pairs, so that held-out tasks have held-out names.

Every word occurs in training, the *pairs* of dev and test tasks never do: a model that copies what it reads succeeds on
them, a model that memorised names does not. (Single unseen words do not work for a small model trained from scratch:
its tied output layer pushes tokens down that it has never seen.)

Invariants (``tests/environments/test_textworld.py``):

1. The pairs of train, dev and test are disjoint, and every adjective and every noun occurs in a training pair.
2. Within a task the renaming is one to one: translating back gives the original text.
3. An original name in an action is not understood: the old vocabulary cannot be used as a side door.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from megatron_ext.environments.name_pairs import split_pairs
from megatron_ext.environments.protocol import stable_hash

_ADJECTIVE_LIST = """
amber blue bright broken clean cold copper crooked dark dusty faded green heavy huge new old painted purple red round
rusty sharp silver tiny
ancient bent black carved flat golden hollow little narrow pale plain shiny striped thick warm woven
"""
_NOUN_LIST = """
anchor arrow basket bottle bucket button candle crown feather hammer helmet jacket kettle ladder lantern magnet needle
pillow ribbon rocket saddle trumpet violin whistle
blanket chisel compass drum flute goblet kite locket marble mirror paddle shovel sponge teapot vase wheel
"""
ADJECTIVES = tuple(_ADJECTIVE_LIST.split())
NOUNS = tuple(_NOUN_LIST.split())

RENAMED_GAMES = ("peckingorder", "simonsays", "arithmetic", "sorting", "mapreader", "cookingworld")
_FRUIT = {
    "train": "apple banana grape grapefruit orange papaya peach pineapple strawberry tangerine",
    "dev": "broccoli coconut cucumber lime mango olive onion pear potato watermelon",
    "test": "avocado blueberry cabbage eggplant pea pepper prune pumpkin squash tomato",
}
_IRREGULAR = {
    "peach": "peaches",
    "strawberry": "strawberries",
    "blueberry": "blueberries",
    "broccoli": "brocollis",  # the game's spelling
    "potato": "potatoes",
    "tomato": "tomatoes",
    "squash": "squashes",
}
_MATERIALS = {
    "train": "brick cedar marble oak wood",
    "dev": "acrylic concrete nylon plastic steel",
    "test": "aluminum brass glass metal rubber",
}
# Recipes of every fold draw from the same foods; the other foods appear as distractors.
_FOOD_LIST = """
banana, black pepper, block of cheese, carrot, chicken breast, chicken leg, chicken wing, cilantro, egg, flour,
green apple, green bell pepper, green hot pepper, lettuce, milk, olive oil, orange bell pepper, parsley, peanut oil,
pork chop, purple potato, red apple, red bell pepper, red hot pepper, red onion, red potato, red tuna, salt, sugar,
tomato, vegetable oil, water, white onion, white tuna, yellow apple, yellow bell pepper, yellow onion, yellow potato
"""
_ROOM_LIST = """
alley, attic, backyard, bar, basement, bathroom, bedchamber, bedroom, canteen, cellar, chamber, closet, cookery,
cookhouse, corridor, cubicle, cupboard, driveway, foyer, garage, greenhouse, kitchen, kitchenette, launderette,
laundromat, laundry place, laundry room, library, living room, lounge, office, pantry, parlor, playroom,
recreation zone, salon, sauna, scullery, shower, side yard, spare room, steam room, storage room, street, studio,
study, supermarket, vault, washroom, workshop
"""
_FOODS = tuple(name.strip() for name in _FOOD_LIST.replace("\n", " ").split(","))
_ROOMS = tuple(name.strip() for name in _ROOM_LIST.replace("\n", " ").split(","))


def renamed_things(game: str, fold: str) -> tuple[tuple[str, ...], ...]:
    """Surface forms (singular, plural where the game uses one) of each thing that ``game`` renames in ``fold``."""
    fruit = tuple((name, _IRREGULAR.get(name, name + "s")) for name in _FRUIT[fold].split())
    if game in ("peckingorder", "simonsays", "arithmetic"):
        return fruit
    if game == "sorting":
        return fruit + tuple((name,) for name in _MATERIALS[fold].split())
    if game == "cookingworld":
        return tuple((name,) for name in _FOODS)
    if game == "mapreader":
        return tuple((name,) for name in _ROOMS)
    raise ValueError(f"game {game!r} has no renaming: set rename=false, or use one of {', '.join(RENAMED_GAMES)}")


@dataclass(frozen=True)
class NamePairs:
    """Adjective-noun pairs, split into train, dev and test.

    Attributes:
        words: adjectives and nouns used (``words * words`` pairs). With 12 a small model memorises the pairs, with 24
            it learns to copy.
        seed: of the split of the pairs.
        train, dev: shares of the pairs; test gets the rest.
    """

    words: int = 24
    seed: int = 11
    train: float = 0.6
    dev: float = 0.15

    def __post_init__(self) -> None:
        if not 4 <= self.words <= min(len(ADJECTIVES), len(NOUNS)):
            raise ValueError(f"rename.words must be 4..{min(len(ADJECTIVES), len(NOUNS))}, got {self.words}")
        if not (0 < self.train < 1 and 0 < self.dev < 1 and self.train + self.dev < 1):
            raise ValueError(f"rename shares must be in (0, 1) and sum below 1, got {self.train} and {self.dev}")

    def split(self, split: str) -> tuple[str, ...]:
        """The pairs of one split, in a fixed order."""
        adjectives, nouns = ADJECTIVES[: self.words], NOUNS[: self.words]
        return split_pairs(adjectives, nouns, self.seed, self.train, self.dev, split)


class Renaming:
    """The names of one task: translates what the game says and what the agent answers."""

    def __init__(self, things: Sequence[tuple[str, ...]], names: Sequence[str]) -> None:
        if len(names) < len(things):
            raise ValueError(f"{len(things)} things to rename but {len(names)} names: raise rename.words or the share")
        self._to: dict[str, str] = {}
        for forms, name in zip(things, names, strict=False):
            for form, new in zip(forms, (name, f"{name}s"), strict=False):
                self._to[form] = new
        self._from = {new: old for old, new in self._to.items()}
        self._outward = _matcher(self._to, article=True)
        self._inward = _matcher(self._from, article=False)
        self._old = _matcher(self._to, article=False)

    def outward(self, text: str) -> str:
        """Game text as the agent sees it; ``a``/``an`` follow the new name."""

        def new_name(match: re.Match[str]) -> str:
            name = self._to[match["name"]]
            if match["article"] is None:
                return name
            article = "an" if name[0] in "aeiou" else "a"
            return f"{article if match['article'][0] == 'a' else article.capitalize()} {name}"

        return self._outward.sub(new_name, text)

    def inward(self, action: str) -> str:
        """The agent's action as the game understands it; an original name becomes a word that no game knows."""
        closed = self._old.sub("unnamed", action)
        return self._inward.sub(lambda match: self._from[match["name"]], closed)


def _matcher(names: Mapping[str, str], *, article: bool) -> re.Pattern[str]:
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    prefix = r"(?:\b(?P<article>[Aa]n?) )?" if article else ""
    return re.compile(rf"{prefix}\b(?P<name>{longest_first})\b")


def task_renaming(pairs: NamePairs, game: str, fold: str, split: str, seed: int) -> Renaming:
    """The renaming of one task, drawn from the pairs of its split."""
    rng = Random(int(stable_hash("rename", str(pairs.seed), split, str(seed))[:16], 16))
    things = renamed_things(game, fold)
    names = list(pairs.split(split))
    rng.shuffle(names)
    return Renaming(things, names)
