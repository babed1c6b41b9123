"""Small plug points that configurations under test name by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.credit.protocol import EditTraits, Scale
from megatron_ext.rewards.protocol import Episode

BUILT: list[object] = []


@dataclass(frozen=True)
class Game:
    level: int
    rename: bool = False
    rate: float | None = None
    options: Mapping[str, int | str] | None = None
    words: Sequence[str] = ()

    def __post_init__(self) -> None:
        BUILT.append(self)


class Anything:
    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments


class Refuses:
    def __init__(self) -> None:
        raise ValueError("never")


class Breaks:
    def __init__(self) -> None:
        self.value = 1 / 0


@dataclass(frozen=True)
class Whitening:
    traits: EditTraits = EditTraits(scale=Scale.SETS)


@dataclass(frozen=True)
class Keeping:
    traits: EditTraits = EditTraits()


@dataclass(frozen=True)
class ReadsRoles:
    traits: EditTraits = EditTraits(labels=frozenset({"role"}))


@dataclass(frozen=True)
class ReadsAnswers:
    traits: EditTraits = EditTraits(prepared=frozenset({"answer_prefix", "answer"}))


class ClosedRouter:
    reads_labels: frozenset[str] = frozenset()

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
