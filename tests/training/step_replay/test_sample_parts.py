"""Samples of a step whose groups lie on several ranks (``megatron_ext/training/step_replay/sample_parts.py``)."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.training.step_replay.kept_step import KeptStep, StepScores
from megatron_ext.training.step_replay.sample_parts import joined_parts, part_of
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import TrajectoryBatch, equal
from tests.helpers.records import random_batch


def kept(batch: TrajectoryBatch, trained: tuple[str, ...], reference: bool) -> KeptStep:
    """Scores that name their token: they depend on its id and place within its group alone."""
    rng = [np.random.default_rng(int(batch.ids[t])) for t in range(batch.num_tokens)]
    draw = [np.array([r.normal() for r in rng]) for _ in range(4)]
    scores = StepScores(
        draw[0],
        draw[1],
        draw[2].astype(np.float32),
        draw[3].astype(np.float32),
        draw[0].astype(np.float32) if reference else None,
    )
    return KeptStep(3, batch, trained, (("x", "constant reward"),), scores, 7, {0: 0}, {"reward/mean": 0.5})


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("homes", [((0, 1, 2, 3, 4),), ((1, 4), (0, 2, 3)), ((2,), (), (3, 4), (0, 1))])
@pytest.mark.parametrize("wanted", [5, 3, 1])
def test_parts_joined_are_what_one_rank_would_keep(
    homes: tuple[tuple[int, ...], ...], reference: bool, wanted: int
) -> None:
    whole = random_batch(3, groups=5)
    names = whole.group_id[:wanted]
    parts = [part_of(kept(select_groups(whole, home), whole.group_id, reference), names) for home in homes]
    joined = joined_parts(parts)
    expected = kept(whole, whole.group_id, reference).first(wanted)
    assert equal(joined.batch, expected.batch) and joined.batch.group_id == names
    assert joined.scores is not None and expected.scores is not None
    for name, value in vars(expected.scores).items():
        np.testing.assert_array_equal(vars(joined.scores)[name], value, err_msg=name)
    assert (joined.step, joined.trained, joined.filtered, joined.opened) == (3, whole.group_id, expected.filtered, 7)
