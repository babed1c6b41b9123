"""TextWorld games: layouts, the engine, the script, what is told, hashes."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from textworld.generator.data import KnowledgeBase
from textworld.generator.maker import get_failing_constraints
from textworld.generator.world import World

from megatron_ext.environments.protocol import ToolCall
from megatron_ext.environments.splits import SPLITS
from megatron_ext.environments.textworld.engine import Played, plain, proposition
from megatron_ext.environments.textworld.facts import Facts
from megatron_ext.environments.textworld.games import TextWorld
from megatron_ext.environments.textworld.layout import GameSize, make_layout
from megatron_ext.environments.textworld.script import Script
from megatron_ext.environments.textworld_names import NamePairs

ROOT = Path(__file__).resolve().parents[2]
SMALL = GameSize()
LARGE = GameSize(rooms=4, locks=4, containers=6, distractors=6, supporters=3)
SIZES = [
    SMALL,
    GameSize(locks=0, containers=1, distractors=0),
    GameSize(locks=3),
    GameSize(rooms=3, locks=1, containers=3),
    LARGE,
]


def names(entities: tuple[str, ...]) -> dict[str, str]:
    return {entity: f"thing {i}" for i, entity in enumerate(entities)}


def do(played: Played, command: str) -> None:
    move = played.move(command)
    assert move is not None, command
    played.make(move)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_layouts_are_states_of_textworld_with_nothing_reached_yet(size: GameSize) -> None:
    base = KnowledgeBase.default()
    for seed in range(6):
        layout = make_layout(size, seed)
        assert layout == make_layout(size, seed)
        world = World.from_facts([proposition(fact) for fact in layout.facts], kb=base)
        assert not get_failing_constraints(world.state, base), "TextWorld's own constraints"
        assert plain(world.state.facts) == set(layout.facts), "no fact is rewritten"
        assert {fact[0] for fact in layout.facts} <= {p.name for p in base.logic.predicates}
        played = Played(layout, names(layout.named))
        assert played.level == 0 and not played.completed
        assert len(layout.named) == size.names and len(layout.subgoals) == 2 * size.locks + 2


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_script_solves_every_game_from_wherever_it_is(size: GameSize) -> None:
    for seed in range(4):
        layout = make_layout(size, seed)
        played, script = Played(layout, names(layout.named)), Script(layout, names(layout.named))
        rng = Random(seed)
        for _ in range(25):  # a random walk first: keys are dropped, doors closed and locked behind one
            if not played.completed:
                do(played, rng.choice(played.commands()))
        steps = 0
        while not played.completed:
            do(played, script.next(played.facts))
            steps += 1
            assert steps < 60
        assert played.level == len(layout.subgoals) and script.next(played.facts) == "look"


def test_reaching_sub_goals_in_order_and_undoing_them() -> None:
    layout = make_layout(SMALL, 3)
    word = names(layout.named)
    played, script = Played(layout, word), Script(layout, word)
    levels = [0]
    while not played.completed:
        command = script.next(played.facts)
        if command.startswith("unlock"):
            key = word[layout.chain[0][0]]
            twin = played.copy()
            do(twin, f"drop {key}")
            assert (twin.level, played.level) == (0, 1), "a key that is needed was dropped, in the copy alone"
            do(played, command)
            do(played, f"drop {key}")
            assert played.level == 2, "a key whose lock is undone may be dropped"
        else:
            do(played, command)
        levels.append(played.level)
    assert levels == [0, 0, 1, 2, 2, 3, 4]


def test_what_is_told_is_what_is_so_and_what_is_closed_stays_hidden() -> None:
    environment = TextWorld(size={"rooms": 2, "locks": 2, "containers": 4})
    (task,) = environment.tasks("train", 1)
    text = environment.reset(task.seed).text
    told, played = environment._current()
    word = {entity: played._names[entity] for entity in told.layout.named}
    goal, _, room = text.partition("\n")
    facts = played.facts
    assert f"Put the {word[told.layout.wanted]} on the {word[told.layout.place]}." in goal
    for key, lock in told.layout.chain:
        assert f"Unlock the {word[lock]} with the {word[key]}." in goal
        assert f"Take the {word[key]} from the {word[facts.places[key][1]]}." in goal
    assert all(word[entity] in room for entity in facts.inside(facts.here))
    assert not any(word[entity] in room for entity in word if entity[0] in "ok" and facts.places[entity][0] == "in")
    quiet = TextWorld(size={"rooms": 2, "locks": 2, "containers": 4}, tell_places=False).reset(task.seed).text
    assert " from the " not in quiet and "Find the" in quiet and "Unlock the" in quiet
    assert re.search(r"\ba [aeiou]", text) is None and re.search(r"\ban [^aeiou]", text) is None


def test_articles_and_capitals_do_not_matter_and_bad_commands_change_nothing() -> None:
    environment = TextWorld()
    (task,) = environment.tasks("train", 1)
    environment.reset(task.seed)
    before = environment.state_hash()
    for bad in ("", "open", "dance", "take the moon", "go north", ToolCall("open", {"thing": "box"})):
        reply = environment.step(bad)
        assert not reply.valid and environment.state_hash() == before and reply.action == "(refused)"
    command = environment.expert_action(Random(0), 0.0)
    twin = environment.copy()
    shouted = environment.step(f"  {command.replace('open ', 'OPEN The ')} ")
    assert shouted.valid and shouted == twin.step(command) and environment.state_hash() != before
    assert shouted.action == command
    for idle in ("look", "inventory", f"examine {command.removeprefix('open ')}"):
        state = twin.state_hash()
        assert twin.step(idle).valid and twin.state_hash() == state


def test_equal_facts_have_equal_hashes_whatever_led_there() -> None:
    environment = TextWorld()
    (task,) = environment.tasks("train", 1)

    def after(*commands: str) -> str:
        environment.reset(task.seed)
        for command in commands:
            assert environment.step(command).valid
        return environment.state_hash()

    environment.reset(task.seed)
    boxes = [c.removeprefix("open ") for c in environment.valid_actions() if c.startswith("open ")]
    one, other = boxes[:2]
    assert after(f"open {one}", f"open {other}") == after(f"open {other}", "look", f"open {one}")
    assert after(f"open {one}", f"close {one}") == after()
    assert after(f"open {one}") != after(f"open {other}")
    same = TextWorld(tell_places=False)
    same.reset(task.seed)
    assert same.state_hash() != after(), "what the agent was told differs"


def test_rewards() -> None:
    for dense in (False, True):
        environment = TextWorld(dense_rewards=dense)
        (task,) = environment.tasks("train", 1)
        observation = environment.reset(task.seed)
        rewards = []
        while not observation.done:
            observation = environment.step(environment.expert_action(Random(0), 0.0))
            rewards.append(observation.reward)
        assert sum(rewards) == pytest.approx(1.0)
        assert sum(reward > 0 for reward in rewards) == (4 if dense else 1)


def test_splits_share_neither_pairs_nor_layouts_and_words_of_a_game_differ() -> None:
    environment = TextWorld()
    own = {split: set(NamePairs().split(split)) for split in SPLITS}
    layouts = {}
    for split in SPLITS:
        tasks = environment.tasks(split, 200)
        layouts[split] = {environment.fingerprint(task.seed, split) for task in tasks}
        for task in tasks[:30]:
            environment.reset(task.seed, split=split)
            given = list(environment._current()[1]._names.values())
            assert set(given) <= own[split]
            words = [word for name in given for word in name.split()]
            assert len(set(words)) == len(words)
    assert not any(layouts[a] & layouts[b] for a, b in combinations(SPLITS, 2))
    assert len(layouts["train"]) > 150, "layouts vary"


def test_mistakes_are_habits_and_some_commands_are_refused() -> None:
    environment = TextWorld()
    kinds, first = {"undone": 0, "refused": 0}, 0
    for task in environment.tasks("train", 150):
        rng = Random(task.seed)
        observation = environment.reset(task.seed)
        facts = environment._current()[1].facts
        command = environment.expert_action(Random(0), 0.0)
        habit = environment._current()[0].script._habit(facts, command)
        word = environment._current()[1]._names
        closed = [c for c in facts.inside(facts.here) if c[0] == "c" and facts.shut(c) == "closed"]
        assert habit == f"open {word[closed[0]]}"
        first += habit != command
        level = 0
        for _ in range(12):
            if observation.done:
                break
            observation = environment.step(environment.expert_action(rng, 0.6))
            kinds["undone"] += observation.info["level"] < level
            kinds["refused"] += not observation.valid
            level = observation.info["level"]
    assert first > 75 and kinds["undone"] > 10 and kinds["refused"] > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": {"rooms": 3, "locks": 2, "containers": 2}}, r"size.containers is 2, but 3 are needed"),
        ({"size": {"locks": 9}}, r"size.locks must be 0..6, got 9"),
        ({"names": {"words": 4}}, r"names 10 things, but \w+ has \d names"),
    ],
)
def test_impossible_sizes_are_one_clear_line(arguments: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextWorld(**arguments)  # type: ignore[arg-type]


def test_facts_answer_about_carried_things_and_doors() -> None:
    layout = make_layout(LARGE, 1)
    facts = Facts(layout.facts)
    (door, _) = next((lock, key) for key, lock in layout.chain if lock[0] == "d")
    assert facts.shut(door) == "locked" and facts.keys[door] == layout.chain[0][0]
    rooms = {there for exits in facts.exits.values() for there, _ in exits.values()}
    assert len(rooms) == LARGE.rooms
    key = layout.chain[0][0]
    carried = Facts([fact for fact in layout.facts if fact[:2] != ("in", key)] + [("in", key, "I")])
    assert carried.carried == [key] and carried.room(key) == carried.here


def test_loading_the_environment_does_not_load_textworld_and_playing_loads_no_language_model() -> None:
    code = (
        "import sys; from megatron_ext.environments.textworld.games import TextWorld; e = TextWorld();"
        "assert 'textworld' not in sys.modules; e.reset(0); assert 'textworld' in sys.modules;"
        "print(sorted({'spacy', 'thinc', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
