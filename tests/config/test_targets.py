from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.config import targets
from tests.helpers import plug_points

HERE = "tests.helpers.plug_points"


def found(value: object, path: str = "environments") -> list[str]:
    return list(targets.problems(path, value))


def test_good_entries_have_no_problems_and_nothing_is_built() -> None:
    before = len(plug_points.BUILT)
    assert (
        found(
            {
                "game": {
                    "_target_": f"{HERE}.Game",
                    "level": 1,
                    "rename": True,
                    "rate": 2,
                    "options": {"a": 1},
                    "words": ["b"],
                }
            }
        )
        == []
    )
    assert found({"_target_": f"{HERE}.Game"}) == []  # arguments that the program supplies are not judged
    assert found({"_target_": f"{HERE}.Anything", "whatever": 1}) == []
    assert found({}) == []
    assert len(plug_points.BUILT) == before


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"_target_": f"{HERE}.Game", "levl": 1}, ["environments.game.levl", "nearest: level"]),
        ({"_target_": f"{HERE}.Game", "level": "two"}, ["environments.game.level", "needs int", "'two'"]),
        ({"_target_": f"{HERE}.Game", "level": True}, ["environments.game.level", "needs int"]),
        ({"_target_": f"{HERE}.Game", "rate": "x"}, ["environments.game.rate", "float or null"]),
        ({"_target_": f"{HERE}.Game", "level": 1, "options": 3}, ["environments.game.options: needs a map or null"]),
        ({"_target_": f"{HERE}.Game", "level": 1, "words": "ab"}, ["environments.game.words: needs a list, got 'ab'"]),
        ({"_target_": f"{HERE}.Gaem"}, ["environments.game", "Gaem", "Game"]),
        ({"_target_": f"{HERE}.NOT_CALLABLE"}, ["environments.game", "not a class or a function"]),
        ({"_target_": "no.such.module.Name"}, ["environments.game", "no"]),
        ({"_target_": 3}, ["environments.game._target_", "import path"]),
        ({"_target_": "builtins.dict"}, ["environments.game", "does not say what arguments"]),
        ({"_target_": f"{HERE}.Game", "order": 1}, ["environments.game.order"]),  # environments have no order
        ({"level": 3}, ["environments.game", "_target_"]),
        (3, ["environments.game", "_target_"]),
    ],
)
def test_bad_entries(entry: Any, words: list[str]) -> None:
    lines = found({"game": entry})
    assert len(lines) == 1 and "\n" not in lines[0]
    for word in words:
        assert word in lines[0]


def test_keys_of_the_stack_belong_to_their_map() -> None:
    entry = {"_target_": f"{HERE}.Game", "weight": 0.5, "cap": 1}
    assert found({"game": entry}, "rewards") == []
    assert len(found({"game": entry}, "environments")) == 2
    assert found({"game": {**entry, "cap": None}}, "rewards") == []
    for wrong in ("abc", True, float("nan")):
        assert found({"game": {**entry, "weight": wrong}}, "rewards") == [
            f"rewards.game.weight: needs a number, got {wrong!r}"
        ]


def test_all_problems_of_a_map_are_found() -> None:
    entries = {"a": {"_target_": f"{HERE}.Game", "x": 1, "level": "y"}, "b": {"_target_": "nowhere.at.all"}, "c": None}
    assert len(found(entries)) == 4
