"""The environment protocol's invariants, for every environment, and that its tasks measure something."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_ext.environments.pool import EnvironmentPool
from megatron_ext.environments.protocol import (
    Action,
    Demonstrator,
    Environment,
    EnvironmentEnded,
    Observation,
    ToolCall,
    key_of,
)
from megatron_ext.environments.records.environment import Records
from megatron_ext.environments.records.layout import SHELVES
from megatron_ext.environments.search.environment import Search
from megatron_ext.environments.search.names import WORDS
from megatron_ext.environments.splits import SPLITS, NotEnoughTasks
from megatron_ext.environments.textworld.games import TextWorld
from megatron_ext.environments.textworld_express import TextWorldExpress
from megatron_ext.environments.textworld_names import ADJECTIVES, NOUNS
from megatron_ext.environments.worker import build_environment
from megatron_ext.trajectory.task import Task

HERE = Path(__file__).parent
PACKAGE = "megatron_ext.environments"


@dataclass(frozen=True)
class Case:
    """An environment's configuration, how many turns its script needs, and how often a random player may succeed."""

    config: Mapping[str, Any]
    turns: int
    lucky: float = 0.05


def game(
    name: str, turns: int, params: Mapping[str, int] | None = None, rename: bool = True, lucky: float = 0.05
) -> Case:
    target = f"{PACKAGE}.textworld_express.TextWorldExpress"
    return Case({"_target_": target, "game": name, "params": params or {}, "rename": rename}, turns, lucky)


KITCHEN = {"numLocations": 1, "numDistractorItems": 2, "includeDoors": 0, "limitInventorySize": 0}
ROOMS = {"rooms": 2, "locks": 2, "containers": 3, "distractors": 3, "supporters": 2}
FAMILIES = {"chain_sum": {"min_terms": 3, "max_terms": 4}, "letter_counting": {}, "number_sorting": {"max_numbers": 4}}
CASES = {
    "peckingorder": game("peckingorder", 8),
    "peckingorder-own-names": game("peckingorder", 8, rename=False),
    "sorting": game("sorting", 10),
    "cookingworld": game("cookingworld", 20, {"numIngredients": 2, **KITCHEN}),
    "coin": game("coin", 30, {"numLocations": 8, "includeDoors": 0}, rename=False, lucky=0.7),
    "mapreader": game("mapreader", 20, {"numLocations": 10, "maxDistanceApart": 3, "maxDistractorItemsPerLocation": 1}),
    "simonsays": game("simonsays", 6, {"gameLength": 6}),
    "simonsays-memory": game("simonsays", 6, {"gameLength": 6, "memorization": 1, "verbose": 1}),
    "arithmetic": game("arithmetic", 4, lucky=0.1),
    "twc": game("twc", 20, {"numLocations": 1, "numItemsToPutAway": 2}, rename=False, lucky=0.4),
    "textworld": Case({"_target_": f"{PACKAGE}.textworld.games.TextWorld"}, 8),
    "textworld-rooms": Case({"_target_": f"{PACKAGE}.textworld.games.TextWorld", "size": ROOMS}, 16),
    "reasoning_gym": Case({"_target_": f"{PACKAGE}.reasoning_gym.ReasoningGym", "families": FAMILIES}, 1),
    "search": Case({"_target_": f"{PACKAGE}.search.environment.Search", "worlds": 8}, 12),
    "calculator": Case({"_target_": f"{PACKAGE}.calculator.Calculator"}, 6),
    "records": Case({"_target_": f"{PACKAGE}.records.environment.Records"}, 8),
    "task_file": Case({"_target_": f"{PACKAGE}.task_file.TaskFile", "reward": "grading:exact"}, 1),
}


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    rows = [{"id": f"row-{i}", "prompt": f"Double {i}.", "answer": str(2 * i)} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Of the environments that share their code the fast tests take one.
SLOW = {"peckingorder", "peckingorder-own-names", "sorting", "coin", "mapreader", "simonsays", "simonsays-memory"}
SLOW |= {"arithmetic", "twc", "textworld-rooms"}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(name: str, task_file: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.syspath_prepend(str(HERE))
    chosen = CASES[name]
    if name == "task_file":
        return Case({**chosen.config, "path": str(task_file)}, chosen.turns, chosen.lucky)
    return chosen


@pytest.fixture
def make(name: str, case: Case) -> Callable[[], Any]:
    """Typed ``Any`` because each environment here is both an Environment and a Demonstrator."""
    return lambda: build_environment(name, case.config)


@pytest.fixture
def environment(make: Callable[[], Any]) -> Iterator[Any]:
    made = make()
    yield made
    made.close()


def start(environment: Any, task: Task) -> Observation:
    observation: Observation = environment.reset(task.seed, split=task.split, data=task.data)
    return observation


def scripted(
    environment: Any, task: Task, turns: int, rate: float = 0.0
) -> list[tuple[Action | None, Observation, str]]:
    """(action, observation, state hash) of a scripted episode; the first entry is the reset."""
    rng = Random(task.seed)
    log: list[tuple[Action | None, Observation, str]] = [(None, start(environment, task), environment.state_hash())]
    while not log[-1][1].done and len(log) <= turns:
        action = environment.expert_action(rng, rate)
        observation = environment.step(action)
        log.append((action, observation, environment.state_hash()))
    return log


def test_protocol_and_tasks(environment: Any, make: Callable[[], Any]) -> None:
    assert isinstance(environment, Environment) and isinstance(environment, Demonstrator)
    tasks = environment.tasks("train", 12)
    assert len({task.task_id for task in tasks}) == 12
    assert all(
        task.split == "train" and Task.from_json(json.loads(json.dumps(task.to_json()))) == task for task in tasks
    )
    assert list(environment.tasks("train", 5, start=7)) == list(tasks[7:])
    texts = list(environment.corpus("train", 2))
    assert len(texts) >= 4 and texts == list(environment.corpus("train", 2))
    with pytest.raises(ValueError, match="unknown split 'trainn'"):
        environment.tasks("trainn", 1)
    with pytest.raises((ValueError, EnvironmentEnded)):
        environment.reset(0, split="trainn")
    with pytest.raises(EnvironmentEnded):
        make().step("before reset")


def test_repeats_itself_in_any_process(name: str, case: Case, environment: Any) -> None:
    tasks = environment.tasks("train", 4)
    with EnvironmentPool({"case": case.config}, workers=1, deadline_s=60.0) as pool:
        elsewhere = pool.tasks("case", "train", 4)
        assert [task.seed for task in elsewhere] == [task.seed for task in tasks]
        for task in tasks:
            log = scripted(environment, task, case.turns, rate=0.5)
            assert scripted(environment, task, case.turns, rate=0.5) == log
            pool.reset("e", Task(task.task_id, "case", task.seed, task.split, task.data))
            for action, observation, state_hash in log:
                if action is not None:
                    pool.step("e", action)
                (reply,) = pool.poll(30.0)
                assert (reply.observation, reply.state_hash) == (observation, state_hash)
            pool.release("e")


def test_copy_is_independent_and_hashes_are_equal_for_equal_states(make: Callable[[], Any], case: Case) -> None:
    environment = make()
    for task in environment.tasks("dev", 3):
        log = scripted(environment, task, case.turns)
        middle = len(log) // 2
        start(environment, task)
        for action, _, _ in log[1 : middle + 1]:
            environment.step(action)
        twin = environment.copy()
        assert twin.state_hash() == environment.state_hash() == log[middle][2]
        for action, observation, state_hash in log[middle + 1 :]:
            assert twin.step(action) == observation and twin.state_hash() == state_hash
        assert environment.state_hash() == log[middle][2]
        for action, observation, _ in log[middle + 1 :]:
            assert environment.step(action) == observation
        hashes = [state_hash for _, _, state_hash in log]
        assert key_of(hashes[0]) > 0 and hashes[0] != hashes[-1]
    first, second = (start(environment, task) and environment.state_hash() for task in environment.tasks("dev", 2))
    assert first != second, "states of different tasks differ"


JUNK: list[Action] = ["", "   ", "xyzzy", "take", "é\n\x00 ☃", "x" * 5000, 'take (nothing)\'s "end"']
JUNK += [
    ToolCall("nonsense", {}),
    ToolCall("calculate", {"expression": "__import__('os').getcwd()"}),
    ToolCall("calculate", {"expression": 7}),
    ToolCall("calculate", {}),
    ToolCall("answer", {"value": None}),
]


def test_bad_actions_are_answered_and_the_end_is_an_end(environment: Any, case: Case) -> None:
    (task,) = environment.tasks("train", 1)
    for action in JUNK:
        start(environment, task)
        observation = environment.step(action)
        assert isinstance(observation.text, str) and not observation.success
        if not isinstance(action, str) or (case.turns > 1 and not observation.done):
            assert not observation.valid
        if observation.done:
            with pytest.raises(EnvironmentEnded):
                environment.step(action)
    log = scripted(environment, task, case.turns)
    assert log[-1][1].done
    with pytest.raises(EnvironmentEnded):
        environment.step(log[-1][0])


def random_action(environment: Any, rng: Random) -> Action:
    if isinstance(environment, TextWorld | TextWorldExpress):
        return rng.choice(environment.valid_actions())
    if isinstance(environment, Search):
        name = " ".join(rng.choice(words) for words in WORDS[rng.choice(("person", "company", "city"))])
        tool, argument = rng.choice((("search", "query"), ("answer", "value"), ("spawn_subagent", "query")))
        return ToolCall(tool, {argument: name})
    if isinstance(environment, Records):
        spec = rng.choice(environment.tools())
        values = {"name": " ".join(rng.choice(words) for words in (ADJECTIVES, NOUNS)), "shelf": rng.choice(SHELVES)}
        return ToolCall(spec.name, {key: values[key] for key in spec.parameters["required"]})
    if environment.tools():
        number = rng.randint(0, 200)
        if rng.random() < 0.5:
            return ToolCall("answer", {"value": number})
        return ToolCall("calculate", {"expression": f"{number} + {rng.randint(0, 20)}"})
    return str(rng.randint(0, 2000))


def test_the_script_succeeds_its_mistakes_fail_and_chance_does_not_succeed(environment: Any, case: Case) -> None:
    for split in SPLITS:
        tasks = environment.tasks(split, 15)
        logs = [scripted(environment, task, case.turns) for task in tasks]
        for log in logs:
            assert log[-1][1].success and log[-1][1].done and log[-1][1].score == pytest.approx(1.0)
            assert all(observation.valid for _, observation, _ in log)
            assert sum(observation.reward for _, observation, _ in log) == pytest.approx(log[-1][1].score)
    tasks = environment.tasks("train", 60)
    wins = 0
    for task in tasks:
        rng = Random(task.seed)
        observation = start(environment, task)
        for _ in range(case.turns):
            if observation.done:
                break
            observation = environment.step(random_action(environment, rng))
            assert 0.0 <= observation.score <= 1.0
        wins += observation.success
    assert wins / len(tasks) <= case.lucky
    sloppy = [scripted(environment, task, case.turns, rate=0.6)[-1][1].success for task in tasks]
    assert sum(sloppy) < len(tasks), "mistakes must cost something"


def test_splits_share_no_content(environment: Any, name: str) -> None:
    count = 20 if name == "task_file" else 60
    content: dict[str, set[str]] = {}
    for split in SPLITS:
        tasks = environment.tasks(split, count)
        if isinstance(environment, TextWorld | TextWorldExpress):
            content[split] = {environment.fingerprint(task.seed, split) for task in tasks}
        else:
            content[split] = {start(environment, task).text for task in tasks}
            assert len(content[split]) == count
    for one, other in combinations(SPLITS, 2):
        assert not content[one] & content[other]


def test_too_few_tasks_is_one_clear_line() -> None:
    tiny = TextWorldExpress("coin", {"numLocations": 2, "includeDoors": 0})
    with pytest.raises(NotEnoughTasks, match=r"split 'train' has \d+ distinct tasks, 5000 were asked for"):
        tiny.tasks("train", 5000)
