"""The rule judge over sub-goals, on played TextWorld games and on made-up episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.environments.protocol import Observation
from megatron_ext.environments.textworld.games import TextWorld
from megatron_ext.rewards.judge import Whitelist
from megatron_ext.rewards.judge_reward import JudgeReward
from megatron_ext.rewards.protocol import Episode, EpisodeStep
from megatron_ext.rewards.subgoal_judge import SubgoalJudge
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task

CASES = {"reached": "D", "undone": "R", "repeated": "R", "unchanged": "N", "new": "E"}
SEES: dict[str, Any] = {"before": None, "state": True, "info": ("level",)}


def episode(*path: tuple[int, str]) -> Episode:
    """An episode through (level, state) pairs, the first of which it begins in."""
    first, *rest = [(Observation("text", info={"level": level}), state) for level, state in path]
    steps = [EpisodeStep("a", "a", observation, state=state) for observation, state in rest]
    return Episode(Task("t/0", "t", 0, "train"), first[0], steps, Status.DONE, first_state=first[1])


def judged(played: Episode, **sees: Any) -> list[str]:
    views = Whitelist(**{**SEES, **sees}).views(played)
    return [verdict.label for verdict in SubgoalJudge(**CASES)(views, {})]


def test_the_first_case_that_holds_decides() -> None:
    start = [(0, "a"), (0, "b"), (1, "c"), (0, "b"), (1, "d"), (1, "d"), (1, "c")]
    labels = judged(episode(*start, (3, "e"), (2, "f"), (3, "e"), (4, "g")))
    assert labels == ["E", "D", "R", "E", "N", "R", "D", "R", "R", "D"]


def test_no_outcome_and_no_text_matters() -> None:
    played = episode((0, "a"), (1, "b"), (0, "a"), (0, "c"))
    told: dict[str, Any] = {"text": "z", "reward": 1.0, "score": 1.0, "success": True, "done": True}
    steps = [replace(s, text="x", action="y", observation=replace(s.observation, **told)) for s in played.steps]
    changed = replace(played, status=Status.MAX_TURNS, steps=steps)
    assert judged(played) == judged(changed) == ["D", "R", "E"]


@pytest.mark.parametrize(
    ("sees", "message"),
    [
        ({"before": 0}, "without the whole past; set before: null"),
        ({"state": False}, "without a state hash; set state: true"),
        ({"info": ()}, "without info 'level'"),
    ],
)
def test_a_view_that_lacks_something_is_one_clear_line(sees: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged(episode((0, "a"), (0, "b"), (1, "c")), **sees)


def play(*choices: str) -> Episode:
    """Plays a game by ``expert`` and named commands; ``KEY`` stands for the key's name, ``BOX`` for what holds it."""
    environment = TextWorld()
    (task,) = environment.tasks("train", 1)
    first = environment.reset(task.seed)
    told, played = environment._current()
    key = told.layout.chain[0][0]
    box = played._names[played.facts.places[key][1]]
    start, steps = environment.state_hash(), []
    for choice in choices:
        words = choice.replace("KEY", played._names[key]).replace("BOX", box)
        command = told.script.next(played.facts) if choice == "expert" else words
        observation = environment.step(command)
        steps.append(EpisodeStep(command, command, observation, state=environment.state_hash()))
    return Episode(task, first, steps, Status.DONE, first_state=start)


def test_on_a_played_game() -> None:
    part = JudgeReward(
        {"_target_": "megatron_ext.rewards.subgoal_judge.SubgoalJudge", **CASES},
        {"D": 0, "E": 1, "N": 2, "R": 3},
        "N",
        malformed="N",
        **SEES,
    )
    perfect = part(play(*["expert"] * 6))
    assert list(perfect.labels["role"]) == [1, 0, 0, 1, 0, 0] and perfect.value == 0.0 and not perfect.missing
    undoing = ["drop KEY", "take KEY", "close BOX", "open BOX"]
    messy = part(play("expert", "look", "nonsense", "expert", *undoing, "expert", "drop KEY"))
    #          open     look  refused  take  drop  take again  close  open again  unlock  drop (needed no more)
    assert list(messy.labels["role"]) == [1, 2, 2, 0, 3, 3, 1, 3, 0, 1]
