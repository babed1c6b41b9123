"""A world to search: entities, how they are wired, and the passages that say so.

Companies have a founder and a buyer, people a birthplace and a home, so that a question walks one or two relations
("Where was the one who founded Amber Kettle born?"). Beside the passage that is asked for, the same entity has
passages that say something else.

Invariants (``tests/environments/test_search.py``):

1. A world is a function of its shape, split and number, in any process.
2. Worlds of different splits share no name; every word of a name occurs in training names.
3. A person founded or bought one company: a question has one answer, and one passage for each of its relations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random

import bm25s

from megatron_ext.environments.protocol import stable_hash
from megatron_ext.environments.search.names import MOST_WORDS, names
from megatron_ext.environments.splits import SPLITS, check_split

KEPT_WORLDS = 1024
# Ids of documents are a letter and a digit, as on a shelf: pieces that occur often enough to learn to copy them.
_SHELVES = "bcdfghjklmnpqrstvwxz"
DOCUMENT = re.compile(rf"\b[{_SHELVES}]+\d\b")
_WORD = re.compile(r"[a-z0-9]+")

# Relation -> ways to say it. The first ones are equally long, so that BM25 ranks them equal and nothing but reading
# tells them apart.
WORDINGS = {
    "founder": ("{s} was founded by {o}.", "It was {o} who founded the company {s}.", "{o} set up {s} long ago."),
    "buyer": ("{s} was bought by {o}.", "The company {s} belongs to {o}.", "{o} owns all shares of {s}."),
    "birth": ("{s} was born in {o}.", "The birthplace of {s} is {o}.", "{o} is where {s} came into the world."),
    "home": ("{s} has settled in {o}.", "The home of {s} is in {o}.", "{o} is where {s} lives today."),
    "moved": ("{s} once moved to {o}.", "A move to {o} did not help {s}.", "{o} saw {s} move there."),
    "worked": ("{s} once worked in {o}.", "A job in {o} did not please {s}.", "{o} is where {s} had a job."),
}
# What to add to a name to find the relation, one for each wording.
KEYWORDS = {
    "founder": ("founded", "founded", "up"),
    "buyer": ("bought", "belongs", "owns"),
    "birth": ("born", "birthplace", "world"),
    "home": ("settled", "home", "lives"),
}
# A question says the relation with the word of its first wording: a small model finds the passage by it.
ONE_HOP: dict[tuple[str, ...], str] = {
    ("founder",): "Who founded {e}?",
    ("buyer",): "Who bought {e}?",
    ("birth",): "Where was {e} born?",
    ("home",): "Where has {e} settled?",
}
TWO_HOPS: dict[tuple[str, ...], str] = {
    ("founder", "birth"): "Where was the one who founded {e} born?",
    ("founder", "home"): "Where has the one who founded {e} settled?",
    ("buyer", "birth"): "Where was the one who bought {e} born?",
    ("buyer", "home"): "Where has the one who bought {e} settled?",
}
QUESTIONS = ONE_HOP | TWO_HOPS
_FILLER = (
    "The archive keeps a letter about it.",
    "Visitors ask for the story every summer.",
    "A local paper wrote two pages on the matter.",
    "Nobody remembers the weather of that day.",
    "The old records were copied by hand.",
    "A photograph of the event was lost.",
)


@dataclass(frozen=True)
class WorldShape:
    """Knobs of a world.

    Attributes:
        passages: how many there are.
        distractors: share of the passages that say what no question asks for.
        wordings: ways to say each relation that are used, 1 to 3.
        filler: sentences of a passage that say nothing, around the one that does.
        mark: stands around names in questions, and around what a passage says of its subject; with a quotation mark the
            first word of a name is the same token there as at the start of an argument, which is easier to copy.
        words: first and second words that names are made of; with few a small model memorises the pairs.
        seed: of names and worlds.
    """

    passages: int = 200
    distractors: float = 0.1
    wordings: int = 1
    filler: int = 0
    mark: str = ""
    words: int = 24
    seed: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.distractors <= 0.8:
            raise ValueError(f"search.distractors must be in 0..0.8, got {self.distractors}")
        if self.companies < 2:
            raise ValueError(f"search.passages={self.passages} with distractors={self.distractors} is no world")
        if not 1 <= self.wordings <= 3:
            raise ValueError(f"search.wordings must be 1, 2 or 3, got {self.wordings}")
        if self.filler < 0:
            raise ValueError(f"search.filler must be >= 0, got {self.filler}")
        if not 4 <= self.words <= MOST_WORDS:
            raise ValueError(f"search.words must be 4..{MOST_WORDS}, got {self.words}")
        fewest = min(len(names("person", self.words, self.seed, split)) for split in SPLITS)
        if fewest < 2 * self.companies:
            raise ValueError(
                f"search.words={self.words} gives {fewest} names of people, search.passages={self.passages} needs "
                f"{2 * self.companies}: raise words or lower passages"
            )

    @property
    def companies(self) -> int:
        """A company has two passages, and so has each of its two people."""
        return int(self.passages * (1 - self.distractors)) // 6


@dataclass(frozen=True)
class Passage:
    """``doc`` is its id, ``subject relation object`` the fact that ``text`` states."""

    doc: str
    text: str
    subject: str
    relation: str
    object: str


@dataclass(frozen=True)
class Question:
    """``relations`` are walked from ``entity`` to ``answer``; ``gold`` are the documents that say so, in that order."""

    text: str
    entity: str
    relations: tuple[str, ...]
    answer: str
    gold: tuple[str, ...]


def terms(text: str) -> list[str]:
    """Lower-case words, as the index knows them."""
    return _WORD.findall(text.lower())


def document_id(number: int) -> str:
    """``b0`` to ``b9``, ``c0``, ..., ``z9``, ``cb0``, ..."""
    shelf, letters = number // 10, ""
    while shelf or not letters:
        shelf, letter = divmod(shelf, len(_SHELVES))
        letters = _SHELVES[letter] + letters
    return f"{letters}{number % 10}"


class World:
    """Passages of one world and their index."""

    def __init__(self, shape: WorldShape, split: str, number: int) -> None:
        self.shape = shape
        rng = Random(int(stable_hash("search world", str(shape.seed), check_split(split), str(number))[:16], 16))
        n = shape.companies

        def drawn(kind: str, count: int) -> list[str]:
            return rng.sample(names(kind, shape.words, shape.seed, split), count)

        companies, people, cities = drawn("company", n), drawn("person", 2 * n), drawn("city", n)
        facts: list[tuple[str, str, str]] = []
        for i, company in enumerate(companies):
            facts += [(company, "founder", people[2 * i]), (company, "buyer", people[2 * i + 1])]
        for person in people:
            born, home = rng.sample(cities, 2)
            facts += [(person, "birth", born), (person, "home", home)]
        for _ in range(shape.passages - len(facts)):
            relation = rng.choice(("moved", "worked"))
            facts.append((rng.choice(companies if relation == "moved" else people), relation, rng.choice(cities)))
        rng.shuffle(facts)
        self.passages = tuple(
            Passage(document_id(i), _written(shape, rng, *fact), fact[0], fact[1], fact[2])
            for i, fact in enumerate(facts)
        )
        self.starts: dict[tuple[str, ...], list[str]] = {
            ("founder",): companies,
            ("buyer",): companies,
            ("birth",): people,
            ("home",): people,
        }
        self.starts |= {chain: companies for chain in TWO_HOPS}

    @cached_property
    def by_id(self) -> dict[str, Passage]:
        return {passage.doc: passage for passage in self.passages}

    @cached_property
    def facts(self) -> dict[tuple[str, str], Passage]:
        """(subject, relation) -> the passage that says it; distractors left out."""
        return {(p.subject, p.relation): p for p in self.passages if p.relation in KEYWORDS}

    @cached_property
    def subjects(self) -> frozenset[str]:
        """Names that passages are about."""
        return frozenset(passage.subject for passage in self.passages)

    def keywords(self, relation: str) -> str:
        """Words that a passage about the relation has beside the names."""
        return " ".join(dict.fromkeys(KEYWORDS[relation][: self.shape.wordings]))

    @cached_property
    def _index(self) -> bm25s.BM25:
        index = bm25s.BM25(backend="numpy", csc_backend="numpy")
        index.index([terms(passage.text) for passage in self.passages], show_progress=False)
        return index

    def search(self, query: str, count: int) -> tuple[str, ...]:
        """Ids of the ``count`` best passages by BM25 that share a word with the query; ties by number."""
        words = terms(query)
        if not words:
            return ()
        scores = self._index.get_scores(words)
        best = sorted(range(len(self.passages)), key=lambda i: (-scores[i], i))[:count]
        return tuple(self.passages[i].doc for i in best if scores[i] > 0)

    def question(self, relations: tuple[str, ...], entity: str) -> Question:
        """The question that walks ``relations`` from ``entity``."""
        at, gold = entity, []
        for relation in relations:
            passage = self.facts[at, relation]
            gold.append(passage.doc)
            at = passage.object
        return Question(self.asking(relations, entity), entity, relations, at, tuple(gold))

    def asking(self, relations: tuple[str, ...], entity: str) -> str:
        """The text of a question."""
        return QUESTIONS[relations].format(e=_marked(self.shape, entity))

    def asked(self, text: str) -> Question | None:
        """The question that a text asks in the words of ``QUESTIONS`` about something of this world, or None."""
        for relations, form in QUESTIONS.items():
            before, _, after = form.format(e=_marked(self.shape, "\n")).partition("\n")
            entity = text.removeprefix(before).removesuffix(after)
            if text == before + entity + after and entity in self.starts[relations]:
                return self.question(relations, entity)
        return None


def _marked(shape: WorldShape, name: str) -> str:
    return f"{shape.mark}{name}{shape.mark}"


def _written(shape: WorldShape, rng: Random, subject: str, relation: str, thing: str) -> str:
    sentence = rng.choice(WORDINGS[relation][: shape.wordings]).format(s=subject, o=_marked(shape, thing))
    around: Sequence[str] = rng.choices(_FILLER, k=shape.filler)
    at = rng.randint(0, shape.filler)
    return " ".join([*around[:at], sentence, *around[at:]])


@lru_cache(maxsize=KEPT_WORLDS)
def world(shape: WorldShape, split: str, number: int) -> World:
    """The world of that number, made once in a process: all environments of a worker share it and its index."""
    return World(shape, split, number)
