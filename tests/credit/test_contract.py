"""The contract of ``credit/protocol.py`` against bad edits, and the numbers of the edits that several systems share.

``test_every_method.py`` runs the contract over every credit method there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_ext.credit.edits.length_penalty import LengthPenalty
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.protocol import CreditView, EditTraits, ScoreRequest, Stat
from tests.helpers.credit_contract import advantage, check_contract, check_ranks, never_broken
from tests.helpers.records import Group, Traj, build, model, random_groups, single, user


@dataclass(frozen=True)
class Bad:
    """An advantage-side edit that does as told and declares ``traits``."""

    kind: str
    traits: EditTraits = EditTraits()

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        batch, trained = view.batch, trained_tokens(view.batch)
        if self.kind == "constant":  # breaks e and f
            changed = view.advantage + 1.0
        elif self.kind == "per_segment":  # breaks b
            changed = view.advantage * (1 + batch.token_segment() - batch.token_segment().min())
        elif self.kind == "per_entry":  # breaks g: what stands first in its row counts double
            first = np.zeros(batch.num_tokens, dtype=bool)
            spans = zip(batch.segment_turns, batch.segment_turns[1:], strict=False)
            for turn in (n for a, b in spans for n in [*(i for i in range(a, b) if batch.turn_role[i] == 3)][:1]):
                first[batch.turn_start[turn] : batch.turn_end[turn]] = True
            changed = np.where(first, 2 * view.advantage, view.advantage)
        elif self.kind == "first":  # breaks d
            changed = view.advantage * np.linspace(1.0, 2.0, batch.num_trajectories)[batch.token_trajectory()]
        else:  # local: a mean over what this rank holds, without a reduction
            changed = view.advantage / max(np.abs(view.advantage).sum(), 1e-9)
        return replace(view, advantage=np.where(trained, changed, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


@pytest.mark.parametrize(
    ("kind", "breaks", "message"),
    [
        ("constant", "", "invariant e"),
        ("constant", "e", "invariant f"),
        ("per_segment", "d", "b: cut"),
        ("per_entry", "b", "g: rows of one turn"),
        ("first", "", "d: "),
    ],
)
def test_the_contract_catches_an_undeclared_break(kind: str, breaks: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_contract(lambda: Bad(kind, EditTraits(breaks=frozenset(breaks))), random_groups(1, groups=5))


def test_the_contract_names_what_is_declared_broken_and_never_was() -> None:
    batches = [random_groups(seed, groups=4) for seed in range(3)]
    assert never_broken(lambda: Bad("constant", EditTraits(breaks=frozenset("efd"))), batches) == {"d"}
    assert never_broken(lambda: Bad("per_segment", EditTraits(breaks=frozenset("b"))), batches) == set()


def test_the_contract_catches_a_statistic_that_was_not_reduced() -> None:
    check_ranks(lambda: Bad("local"), random_groups(1, groups=5), 1)
    with pytest.raises(AssertionError, match="2 ranks"):
        check_ranks(lambda: Bad("local"), random_groups(1, groups=5), 2)


def three(rewards: tuple[float, ...], sizes: tuple[int, ...]) -> Group:
    def one(reward: float, size: int) -> Traj:
        return single([user([1]), model(range(size))], reward=reward, success=reward > 0)

    return tuple(one(r, n) for r, n in zip(rewards, sizes, strict=True))


def test_whitening_numbers() -> None:
    batch = build([three((0.0, 1.0), (1, 3)), three((0.0, 0.0, 1.0), (2, 2, 3))])
    trained = trained_tokens(batch)
    got = advantage(lambda: Whiten(), batch).advantage[trained]
    assert np.sqrt(np.mean(got**2)) == pytest.approx(1.0)
    got = advantage(lambda: Whiten(center=True), batch).advantage[trained]
    assert (got.mean(), got.std()) == (pytest.approx(0.0, abs=1e-12), pytest.approx(1.0))
    got = advantage(lambda: Whiten(over="trajectories"), batch).advantage[trained]
    turn_units = advantage(lambda: Whiten(over="turns"), batch).advantage[trained]
    np.testing.assert_allclose(turn_units, got)  # one turn a trajectory
    firsts = got[[0, 1, 4, 6, 8]]
    assert np.mean(firsts**2) == pytest.approx(1.0) and np.mean(got**2) != pytest.approx(1.0)
    with pytest.raises(ValueError, match="over 'rows'"):
        Whiten(over="rows")
    with pytest.raises(ValueError, match="ddof 2"):
        Whiten(ddof=2)


@pytest.mark.parametrize("center", [True, False])
def test_whitening_no_signal_gives_zeros(center: bool) -> None:
    batch = build([three((1.0, 1.0), (1, 3))])
    assert not advantage(lambda: Whiten(center=center), batch).advantage.any()
    nothing = build([(single([model([1], mask=False)]),)])
    assert not advantage(lambda: Whiten(center=center), nothing).advantage.any()


def test_length_penalty_numbers() -> None:
    batch = build([three((1.0, 1.0, 1.0, 0.0), (2, 4, 10, 10))])
    view = advantage(lambda: LengthPenalty(coefficient=0.4, free=2, limit=6), batch)
    np.testing.assert_allclose(view.reward, [1.0, 0.8, 0.6, -0.4])
    view = advantage(lambda: LengthPenalty(coefficient=0.4, free=2, limit=6, successes_only=True), batch)
    np.testing.assert_allclose(view.reward, [1.0, 0.8, 0.6, 0.0])
    view = advantage(lambda: LengthPenalty(coefficient=0.4, free=0, limit=2, unit="turns"), batch)
    np.testing.assert_allclose(view.reward, [0.8, 0.8, 0.8, -0.2])
    with pytest.raises(ValueError, match="unit 'words'"):
        LengthPenalty(coefficient=1.0, free=0, limit=6, unit="words")
    with pytest.raises(ValueError, match="need 0 <= free < limit"):
        LengthPenalty(coefficient=1.0, free=9, limit=6)
