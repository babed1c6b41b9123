"""Names of people, companies and cities: pairs of words whose held-out pairs never occur in training.

No word is used by two kinds, so that a name says what it names.
"""

from __future__ import annotations

from megatron_ext.environments.name_pairs import split_pairs
from megatron_ext.environments.textworld_names import ADJECTIVES, NOUNS

_GIVEN_LIST = """
Ada Bela Cora Dora Edith Felix Greta Hugo Ines Jonas Karl Lena Mira Nora Otto Petra Quinn Rosa Silas Tara Ulla Vera
Walt Xenia Yara Zeno Alma Bruno Clara Dario Elsa Fritz Gina Heidi Ivan Judith
"""
_FAMILY_LIST = """
Abbot Baker Carver Draper Eaton Fisher Gower Hunter Irving Jarvis Keller Lomax Mercer Norton Osborn Parker Quill Reeve
Sawyer Turner Usher Vance Weaver Yates Zeller Archer Brewer Cooper Dyer Foster Glover Hooper Jensen Lowell Miller Noble
"""
_PLACE_LIST = """
Maple Cedar Birch Willow Heather Clover Raven Falcon Heron Otter Badger Marsh Stone Winter Summer Autumn Thunder Cloud
River Oak Elm Pine Fern Moss Ivy Swan Wolf Fox Bear Salt Sand Flint Chalk Thistle Juniper Walnut
"""
_SITE_LIST = """
Harbor Ford Bay Ridge Valley Falls Grove Hill Creek Point Bridge Field Haven Crossing Landing Springs Meadow Cliff Shore
Pass Mill Gate Vale Island Lake Port Tower Market Abbey Quay Bend Common Court Cove Dale Moor
"""
WORDS = {
    "person": (tuple(_GIVEN_LIST.split()), tuple(_FAMILY_LIST.split())),
    "company": (tuple(word.title() for word in ADJECTIVES[:36]), tuple(word.title() for word in NOUNS[:36])),
    "city": (tuple(_PLACE_LIST.split()), tuple(_SITE_LIST.split())),
}
MOST_WORDS = min(len(words) for pair in WORDS.values() for words in pair)
# Shares of the pairs: a world of 200 passages needs 60 people, whatever its split.
_TRAIN, _DEV = 0.6, 0.15


def names(kind: str, words: int, seed: int, split: str) -> tuple[str, ...]:
    """All names of one kind (``person``, ``company``, ``city``) that a split may use, from ``words`` first and second
    words each."""
    first, second = WORDS[kind]
    return split_pairs(first[:words], second[:words], seed, _TRAIN, _DEV, split)
