"""The reward part that reads the environment's last word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ext.environments.protocol import Observation
from megatron_ext.rewards.info import LastInfo
from megatron_ext.rewards.protocol import Episode, EpisodeStep
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task


def episode(info: Mapping[str, Any], done: bool = True) -> Episode:
    last = Observation("bye", done=done, info=info)
    return Episode(Task("t", "library", 0, "train"), Observation("hi"), (EpisodeStep("x", "x", last),), Status.DONE)


def test_reads_the_last_observation() -> None:
    assert LastInfo("f1")(episode({"f1": 0.5, "n": 3})) == 0.5
    assert LastInfo("n")(episode({"f1": 0.5, "n": 3})) == 3.0


def test_an_episode_that_was_cut_off_has_the_value_that_was_chosen() -> None:
    assert LastInfo("f1")(episode({}, done=False)) == 0.0
    assert LastInfo("f1", absent=-1.0)(episode({"f1": 1.0}, done=False)) == -1.0


@pytest.mark.parametrize("info", [{}, {"f1": "high"}, {"f1": True}, {"g": 1.0}])
def test_what_is_not_said_is_an_error_and_no_zero(info: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="environment 'library' ended without the number 'f1'"):
        LastInfo("f1")(episode(info))
