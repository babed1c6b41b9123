"""Credit of a step over ranks as threads: scoring requests of each rank's groups, and failures of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.pipeline import Pipeline, open_view
from megatron_ext.credit.protocol import CreditEdit, CreditError, CreditView, EditTraits, PlainEdit, ScoreRequest, Stat
from megatron_ext.credit.score_plan import ScorePlan
from megatron_ext.credit.scoring import ScoreError, ScoreReply
from megatron_ext.rollout.agreement import assign
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.training.credit_step import assign_credit, together, weights_table
from megatron_ext.training.ranks.ranks import Gather, alone
from megatron_ext.training.step_replay.sample_parts import group_tokens
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from tests.helpers.asking_edit import Surprise
from tests.helpers.gathering import on_ranks
from tests.helpers.records import random_batch

BATCH = random_batch(5, groups=6)
TABLE = weights_table(3, vocab_size=1 << 20, layers=2, max_tokens=4096, temperature=1.0, reference=True)


def replies_of(plan: ScorePlan) -> list[ScoreReply]:
    """Log-probs that follow from the request alone: its ids, positions and weights."""
    rng = {name: np.random.default_rng(len(name)).random(1 << 12) for name in TABLE}
    return [
        ScoreReply(logp=-rng[request.weights_ref][request.positions - request.positions[0]].astype(np.float32))
        for request in plan.requests
    ]


def homes(ranks: int) -> list[tuple[int, ...]]:
    metas = [GroupMeta.from_batch(BATCH, f"ref{g}", g) for g in range(BATCH.num_groups)]
    return [tuple(BATCH.group_id.index(name) for name in home) for home in assign(metas, ranks)]


def credit(batch: TrajectoryBatch, gather: Gather, *edits: CreditEdit) -> tuple[NDArray[np.float64], dict[str, float]]:
    pipeline = Pipeline([(f"edit{i}", edit) for i, edit in enumerate(edits)])
    return assign_credit(pipeline, batch, step=0, gather=gather, weights=TABLE, run=replies_of)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_whitening_is_over_all_ranks(over: str, ranks: int) -> None:
    edit, shared = Whiten(over=over, center=True), homes(ranks)
    whole, _ = credit(BATCH, alone, edit)
    parts = on_ranks(lambda rank, gather: credit(select_groups(BATCH, shared[rank]), gather, edit)[0], ranks)
    for home, part in zip(shared, parts, strict=True):
        np.testing.assert_array_equal(part, whole[group_tokens(BATCH, home)])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replies_and_advantages_do_not_depend_on_the_ranks(ranks: int) -> None:
    edits = (Surprise(reference="reference"), Whiten())
    whole, metrics = credit(BATCH, alone, *edits)
    shared = homes(ranks)
    parts = on_ranks(lambda rank, gather: credit(select_groups(BATCH, shared[rank]), gather, *edits), ranks)
    for home, (part, own) in zip(shared, parts, strict=True):
        np.testing.assert_array_equal(part, whole[group_tokens(BATCH, home)])
        assert own == pytest.approx(metrics, rel=1e-12)
    assert metrics["scoring/requests"] > 0


def test_what_two_edits_ask_is_run_once() -> None:
    _, one = credit(BATCH, alone, Surprise(reference="reference"))
    _, two = credit(BATCH, alone, Surprise(reference="reference"), Surprise(0.1, reference="reference"))
    assert two["scoring/requests"] == 2 * one["scoring/requests"]
    assert two["scoring/asked_tokens"] == 2 * one["scoring/asked_tokens"]
    assert two["scoring/forward_tokens"] == one["scoring/forward_tokens"] <= one["scoring/asked_tokens"]


def test_nothing_is_run_when_no_edit_asks() -> None:
    def never(plan: ScorePlan) -> Sequence[ScoreReply]:
        raise AssertionError("no edit asked")

    for edits in ([], [("whiten", Whiten())]):
        _, metrics = assign_credit(Pipeline(edits), BATCH, step=0, gather=alone, weights=TABLE, run=never)
        assert not any(name.startswith("scoring/") for name in metrics)


@dataclass(frozen=True)
class ReadsStates(PlainEdit):
    traits: EditTraits = EditTraits(states=True)

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        return view


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_step_without_states_is_refused_where_they_are_read(ranks: int) -> None:  # invariant 5
    shared, keys = homes(ranks), BATCH.turn_state_key
    bare = replace(BATCH, turn_state_key=np.zeros_like(keys))

    def run(batch: TrajectoryBatch, *edits: CreditEdit) -> list[str]:
        def work(rank: int, gather: Gather) -> str:
            try:
                credit(select_groups(batch, shared[rank]), gather, *edits)
            except CreditError as raised:
                return str(raised)
            return ""

        return on_ranks(work, ranks)

    said = run(bare, Whiten(), ReadsStates())
    assert all("credit.edits.edit1: compares turns by their state" in line and "state_hash()" in line for line in said)
    assert run(bare, Whiten()) == run(BATCH, ReadsStates()) == [""] * ranks
    some = np.zeros_like(keys)
    first = int(open_view(BATCH).turns.entry[open_view(BATCH).turns.trainable][0])
    some[first] = 1
    assert run(replace(BATCH, turn_state_key=some), ReadsStates()) == [""] * ranks, "a state of any rank will do"
    failed = replace(bare, status=np.full(BATCH.num_trajectories, int(Status.ENV_ERROR), dtype=BATCH.status.dtype))
    assert run(failed, ReadsStates()) == [""] * ranks, "a step of failures says nothing about states"


@dataclass(frozen=True)
class Fails:
    """An edit that fails where ``at`` says, on the rank that holds the named group."""

    at: str
    group: str
    error: type[Exception] = CreditError

    def _look(self, place: str, view: CreditView) -> None:
        if place == self.at and self.group in view.batch.group_id:
            raise self.error(f"bad {place}")

    @property
    def traits(self) -> EditTraits:
        return EditTraits()

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        self._look("requests", view)
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        self._look("local_stats", view)
        return {}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        self._look("apply", view)
        if self.at == "result" and self.group in view.batch.group_id:
            return replace(view, advantage=np.full(view.batch.num_tokens, np.nan))
        return view

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


@pytest.mark.parametrize("error", [CreditError, IndexError])
@pytest.mark.parametrize("at", ["requests", "local_stats", "apply", "result"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_failure_of_one_rank_ends_all(at: str, error: type[Exception], first: bool) -> None:
    """No rank waits for one that has given up (slime 1487, verl 3873: hangs with no message)."""
    shared = homes(4)
    bad = Fails(at, BATCH.group_id[shared[1][0]], error)
    edits: list[CreditEdit] = [bad, Surprise()] if first else [Surprise(), bad]

    def work(rank: int, gather: Gather) -> str:
        try:
            credit(select_groups(BATCH, shared[rank]), gather, *edits)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""

    said = on_ranks(work, 4)
    own = said.pop(1)
    message = "bad " + at if at != "result" else "nan"
    assert message in own.lower() and not own.startswith("RankError")
    assert all(line.startswith("RankError: data-parallel rank 1: ") and message in line.lower() for line in said)


def test_a_failure_of_all_ranks_is_each_ranks_own() -> None:
    def work(rank: int, gather: Gather) -> str:
        with pytest.raises(ScoreError, match="are not among current, reference") as raised:
            credit(BATCH, gather, Surprise(reference="teacher"))
        return str(raised.value)

    assert len(set(on_ranks(work, 3))) == 1


def test_work_ends_together() -> None:
    def work(rank: int, gather: Gather) -> str:
        def run(gather: Gather) -> int:
            if rank == 2:
                raise ValueError("no")
            return rank

        try:
            return str(together(run, gather))
        except ValueError as raised:
            return str(raised)

    assert on_ranks(work, 3) == ["data-parallel rank 2: no"] * 2 + ["no"]
    assert together(lambda gather: gather(1), alone) == [1]
