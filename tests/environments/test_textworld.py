"""TextWorldExpress: renaming, state hashes, scripts, the virtual machine."""

from __future__ import annotations

import os
import re
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from megatron_ext.environments.splits import SPLITS, SplitScan, split_of
from megatron_ext.environments.textworld_express import TextWorldExpress
from megatron_ext.environments.textworld_jvm import shared_machine
from megatron_ext.environments.textworld_names import (
    ADJECTIVES,
    NOUNS,
    RENAMED_GAMES,
    NamePairs,
    Renaming,
    renamed_things,
    task_renaming,
)


@pytest.mark.parametrize("pairs", [NamePairs(), NamePairs(words=12, seed=3), NamePairs(train=0.8, dev=0.1)])
def test_pairs_are_disjoint_and_every_word_is_trained(pairs: NamePairs) -> None:
    parts = {split: set(pairs.split(split)) for split in SPLITS}
    assert sum(map(len, parts.values())) == pairs.words**2
    assert all(parts.values()) and not any(parts[a] & parts[b] for a, b in combinations(SPLITS, 2))
    words = [pair.split() for pair in parts["train"]]
    assert {adjective for adjective, _ in words} == set(ADJECTIVES[: pairs.words])
    assert {noun for _, noun in words} == set(NOUNS[: pairs.words])


def test_renaming_is_one_to_one_and_closes_the_old_names() -> None:
    renaming = Renaming((("grape", "grapes"), ("grapefruit",), ("orange",)), ("old kettle", "blue hat", "red drum"))
    said = renaming.outward("You see a grape, a grapefruit, and an orange. An orange! Take 3 grapes. Also a grapevine.")
    assert said == (
        "You see an old kettle, a blue hat, and a red drum. A red drum! Take 3 old kettles. Also a grapevine."
    )
    assert (
        renaming.inward("take 3 old kettles") == "take 3 grapes"
        and renaming.inward("take blue hat") == "take grapefruit"
    )
    assert renaming.inward("take orange") == "take unnamed"


@pytest.mark.parametrize("game", RENAMED_GAMES)
def test_a_task_uses_pairs_of_its_split_only(game: str) -> None:
    environment = TextWorldExpress(game, rename=True)
    own = {split: set(NamePairs().split(split)) for split in SPLITS}
    every = set().union(*own.values())
    for split in SPLITS:
        things = [form for thing in renamed_things(game, split) for form in thing]
        for task in environment.tasks(split, 10):
            texts = [environment.reset(task.seed, split=split).text, *environment.valid_actions()]
            used = {pair for pair in every for text in texts if re.search(rf"\b{pair}s?\b", text)}
            assert used <= own[split] and (used or game == "cookingworld")
            if game != "mapreader":  # a room's name can be part of a thing's ("shower cap")
                assert not [form for form in things for text in texts if f" {form} " in f" {text} "]


def test_original_names_are_not_understood() -> None:
    environment = TextWorldExpress("peckingorder", rename=True)
    (task,) = environment.tasks("train", 1)
    environment.reset(task.seed, split="train")
    renaming = task_renaming(NamePairs(), "peckingorder", "train", "train", task.seed)
    take = next(action for action in environment.valid_actions() if action.startswith("take "))
    twin = environment.copy()
    assert not twin.step(renaming.inward(take)).valid and environment.step(take).valid


def test_equal_states_have_equal_hashes_whatever_led_there() -> None:
    environment = TextWorldExpress("cookingworld", {"numLocations": 3, "includeDoors": 0})
    # Find a kitchen with a fridge and an exit, then come back to it along a detour.
    environment.reset(3)
    start = environment.state_hash()
    assert {"open fridge"} <= set(environment.valid_actions())
    move = next(action for action in environment.valid_actions() if action.startswith("move "))
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[move.split()[1]]

    def after(*actions: str) -> str:
        environment.reset(3)
        for action in actions:
            assert environment.step(action).valid
        return environment.state_hash()

    assert after("look around", "inventory") == start == after(move, f"move {back}")
    opened = after("open fridge")
    assert opened != start and after("open fridge", "close fridge") == start
    assert after(move, f"move {back}", "open fridge", "look around") == opened
    # The open fridge still counts when it is out of sight.
    assert after("open fridge", move) != after(move)
    environment.reset(4)
    assert environment.state_hash() != start


def test_splits_are_stable_and_a_scan_keeps_names_apart() -> None:
    shares = [split_of(str(i)) for i in range(4000)]
    assert [shares.count(split) / 4000 for split in SPLITS] == pytest.approx([0.6, 0.15, 0.25], abs=0.03)
    assert [split_of(text) for text in "abcdefgh"] == [
        "train",
        "train",
        "train",
        "train",
        "test",
        "train",
        "test",
        "train",
    ]
    scan = SplitScan("train")
    fingerprint = next(str(i) for i in range(99) if split_of(str(i)) == "train")
    assert scan.offer(1, fingerprint) and not scan.offer(2, fingerprint) and scan.offer(3, fingerprint, "other names")
    assert scan.seeds == [1, 3]


def test_fingerprints_see_layout_not_names() -> None:
    renamed, plain = TextWorldExpress("sorting", rename=True), TextWorldExpress("sorting")
    assert renamed.fingerprint(5, "train") == plain.fingerprint(5, "train") != plain.fingerprint(6, "train")
    # Same seed, other fold: peckingorder keeps the layout and swaps the names, which is no new task.
    game = TextWorldExpress("peckingorder")
    folds = {game.fingerprint(seed, "train") == game.fingerprint(seed, "test") for seed in range(8)}
    assert True in folds


def test_habits_are_systematic() -> None:
    """At mistake rate 1 the peckingorder script always takes the first listed thing, so its failures can be learned."""
    environment = TextWorldExpress("peckingorder", rename=True)
    for task in environment.tasks("train", 20):
        first = environment.reset(task.seed).text
        observation, rng = environment.step("read instructions book"), Random(1)
        action = environment.expert_action(rng, 0.999)
        takes = [a.removeprefix("take ") for a in environment.valid_actions() if a.startswith("take ")]
        assert action == f"take {min(takes, key=first.index)}" or not environment.step(action).valid
        assert observation.text.startswith("The current task is to take the ")


def test_invalid_commands_occur_in_demonstrations_and_are_answered() -> None:
    environment = TextWorldExpress("peckingorder", rename=True)
    texts = list(environment.corpus("train", 150))
    assert any(text.startswith("Unknown action") for text in texts)


def test_bad_games_parameters_and_names_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"game 'zork'.*Unknown game"):
        TextWorldExpress("zork")
    with pytest.raises(ValueError, match=r"Unrecognized property name \(rooms\)"):
        TextWorldExpress("coin", {"rooms": 3})
    with pytest.raises(ValueError, match="game 'twc' has no renaming"):
        TextWorldExpress("twc", rename=True)
    with pytest.raises(ValueError, match="rename.words must be"):
        TextWorldExpress("peckingorder", rename={"words": 99})


def test_one_virtual_machine_holds_all_games() -> None:
    games = [TextWorldExpress("peckingorder") for _ in range(8)]
    for seed, game in enumerate(games):
        game.reset(seed)
    children = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    java = [pid for pid in children if "java" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert java == [shared_machine().process.pid]
    assert len({game.state_hash() for game in games}) == 8


@pytest.mark.parametrize("name", ["sorting", "peckingorder", "cookingworld", "twc", "mapreader", "arithmetic"])
def test_games_side_by_side_do_not_influence_each_other(name: str) -> None:
    """``sorting`` does in the package itself: all games of one virtual machine move the same objects."""
    game, other = TextWorldExpress(name), TextWorldExpress(name)
    for seed in range(5):
        rng, alone = Random(seed), [game.reset(seed)]
        actions: list[str] = []
        while not alone[-1].done and len(actions) < 12:
            actions.append(rng.choice(game.valid_actions()))
            alone.append(game.step(actions[-1]))
        beside, elsewhere = [game.reset(seed)], other.reset(seed)
        for action in actions:
            if elsewhere.done:
                elsewhere = other.reset(seed)
            elsewhere = other.step(rng.choice(other.valid_actions()))
            beside.append(game.step(action))
        assert beside == alone


def test_task_description_is_shown_on_request() -> None:
    assert TextWorldExpress("mapreader", show_task=True).reset(1).text.startswith("Your task is to take the coin")
    assert TextWorldExpress("mapreader").reset(1).text.startswith("You are in the")
