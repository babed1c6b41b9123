"""A step's samples where its groups are at home on several ranks: what a rank gives, and the whole of it. Pure.

Invariant (``tests/training/step_replay/test_sample_parts.py``): parts of any sharing of the groups,
joined, are what one rank with all groups would keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.training.step_replay.kept_step import KeptStep, StepScores
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import TrajectoryBatch


def part_of(kept: KeptStep, wanted: Sequence[str]) -> KeptStep:
    """The groups among ``wanted`` that are here, in their order here."""
    return _chosen(kept, [number for number, group in enumerate(kept.batch.group_id) if group in set(wanted)])


def joined_parts(parts: Sequence[KeptStep]) -> KeptStep:
    """All parts' groups in the order in which the step trained them."""
    scores = [part.scores for part in parts if part.scores is not None]
    joined = None
    if scores:
        references = [score.reference for score in scores if score.reference is not None]
        joined = StepScores(
            np.concatenate([score.advantage for score in scores]),
            np.concatenate([score.weight for score in scores]),
            np.concatenate([score.logp for score in scores]),
            np.concatenate([score.entropy for score in scores]),
            np.concatenate(references) if references else None,
            scores[0].before_update,
        )
    whole = replace(parts[0], batch=concat([part.batch for part in parts]), scores=joined)
    at = {group: number for number, group in enumerate(whole.batch.group_id)}
    return _chosen(whole, [at[group] for group in whole.trained if group in at])


def _chosen(kept: KeptStep, groups: Sequence[int]) -> KeptStep:
    token, scores = group_tokens(kept.batch, groups), kept.scores
    if scores is not None:
        scores = StepScores(
            scores.advantage[token],
            scores.weight[token],
            scores.logp[token],
            scores.entropy[token],
            None if scores.reference is None else scores.reference[token],
            scores.before_update,
        )
    return replace(kept, batch=select_groups(kept.batch, groups), scores=scores)


def group_tokens(batch: TrajectoryBatch, groups: Sequence[int]) -> NDArray[np.int64]:
    """The tokens of these groups, one group after the other, int64."""
    offsets = batch.trajectory_tokens()[batch.group_trajectories]
    spans = [np.arange(offsets[group], offsets[group + 1], dtype=np.int64) for group in groups]
    return np.concatenate([np.empty(0, dtype=np.int64), *spans])
