"""Small plug points that configurations under test name by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.protocol import CreditView, EditTraits, PlainEdit, Scale
from megatron_ext.harness.text import TextHarness
from megatron_ext.losses.policy import ClipLoss
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.rewards.outcome import Success
from megatron_ext.rewards.protocol import Episode
from megatron_ext.tracking.jsonl import JsonlTracker
from tests.helpers.worlds import Walk

BUILT: list[object] = []


@dataclass(frozen=True)
class Game(Walk):
    level: int
    rename: bool = False
    rate: float | None = None
    options: Mapping[str, int | str] | None = None
    words: Sequence[str] = ()

    def __post_init__(self) -> None:
        BUILT.append(self)


class Anything:
    """As a reward part: worth as much as it was given arguments."""

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments

    def __call__(self, episode: Episode) -> float:
        return float(len(self.arguments))


class Refuses:
    def __init__(self) -> None:
        raise ValueError("never")


class RefusingHarness(Refuses, TextHarness):
    pass


class RefusingTerm(Refuses, ClipLoss):
    pass


class RefusingReward(Refuses, Success):
    pass


class RefusingTracker(Refuses, JsonlTracker):
    pass


class Breaks(Success):
    def __init__(self) -> None:
        self.value = 1 / 0


class Plain(PlainEdit):
    """An edit that changes nothing, as the others here."""

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[np.float64]]) -> CreditView:
        return view


@dataclass(frozen=True)
class Whitening(Plain):
    traits: EditTraits = EditTraits(scale=Scale.SETS)


@dataclass(frozen=True)
class Keeping(Plain):
    traits: EditTraits = EditTraits()


@dataclass(frozen=True)
class ReadsRoles(Plain):
    traits: EditTraits = EditTraits(labels=frozenset({"role"}))


@dataclass(frozen=True)
class ReadsAnswers(Plain):
    traits: EditTraits = EditTraits(prepared=frozenset({"answer_prefix", "answer"}))


class ClosedRouter(TrainedRouter):
    def config_overrides(self) -> dict[str, Any]:
        return {"moe_aux_loss_coeff": 0.0}


@dataclass
class Inner:
    depth: int = field(default=2, metadata={"help": "how deep"})


@dataclass
class Constants:
    """A recipe's own dataclass."""

    alpha: float = field(default=0.5, metadata={"help": "the paper's alpha"})
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)


NOT_CALLABLE = 3


def graded(episode: Episode) -> float:
    return float(len(episode.steps))
