"""A kept step as plain values: what was generated, masked, rewarded and credited, down to the token.

Invariant (``tests/report/test_samples.py``): every token of the chosen trajectories comes once, in order, after its
turn and its trajectory; values that were not kept are None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from megatron_ext.report.samples import parts, reward_parts, session_text, trained_mask, version_text
from megatron_ext.report.text import pieces
from megatron_ext.training.step_replay.kept_step import KeptStep
from megatron_ext.trajectory.record import Role, Status
from megatron_ext.trajectory.version import UNSAMPLED


@dataclass(frozen=True)
class TokenValues:
    """``position`` counts from the start of the trajectory. ``mask``: sampled to be trained; ``trained``: and its
    trajectory says something about the policy. None where nothing was sampled, or no scores were kept."""

    position: int
    id: int
    text: str
    mask: bool
    trained: bool
    version: str | None
    rollout_logp: float | None
    logp: float | None
    reference_logp: float | None
    entropy: float | None
    advantage: float | None
    weight: float | None


@dataclass(frozen=True)
class TurnValues:
    """``number`` None: a prefix that its segment repeats."""

    role: str
    number: int | None
    session: str
    reward: float
    labels: dict[str, int]
    tokens: tuple[TokenValues, ...]


@dataclass(frozen=True)
class TrajectoryValues:
    """``reward_parts``: None for a part that has no value here."""

    trajectory: str
    group: str
    task: str
    sample: int
    reward: float
    reward_parts: dict[str, float | None]
    success: bool
    status: str
    harness: str
    tokens: int
    trained_tokens: int
    model_turns: int
    advantage_mean: float | None


def trajectory_values(kept: KeptStep, index: int, mask: NDArray[np.bool_]) -> TrajectoryValues:
    """What is known of one trajectory as a whole; ``mask`` is the batch's ``trained_mask``."""
    batch, view = kept.batch, kept.batch.trajectory(index)
    trained = mask[view.tokens]
    group = int(np.searchsorted(batch.group_trajectories, index, side="right")) - 1
    advantage = None
    if kept.scores is not None and trained.any():
        advantage = float(kept.scores.advantage[view.tokens][trained].mean())
    return TrajectoryValues(
        trajectory=view.trajectory_id,
        group=batch.group_id[group],
        task=batch.task_id[group],
        sample=int(batch.sample[index]),
        reward=view.reward,
        reward_parts=dict(reward_parts(batch, index)),
        success=bool(batch.success[index]),
        status=Status(int(batch.status[index])).name,
        harness=batch.harness[index],
        tokens=view.tokens.stop - view.tokens.start,
        trained_tokens=int(trained.sum()),
        model_turns=view.num_model_turns,
        advantage_mean=advantage,
    )


def turn_values(
    kept: KeptStep, index: int, mask: NDArray[np.bool_], tokenizer: Tokenizer | None
) -> Iterator[TurnValues]:
    """The turns of a trajectory, each with its tokens; ``mask`` is the batch's ``trained_mask``."""
    batch, scores, trained = kept.batch, kept.scores, mask
    first = batch.trajectory(index).tokens.start
    for part in parts(batch, index):
        texts = pieces(tokenizer, batch.ids[part.start : part.end].tolist())
        tokens = []
        for t, text in zip(range(part.start, part.end), texts, strict=True):
            sampled = int(batch.version[t]) > UNSAMPLED
            scored = scores if sampled else None
            reference = None if scored is None or scored.reference is None else float(scored.reference[t])
            tokens.append(
                TokenValues(
                    position=t - first,
                    id=int(batch.ids[t]),
                    text=text,
                    mask=bool(batch.loss_mask[t]),
                    trained=bool(trained[t]),
                    version=version_text(int(batch.version[t])) if sampled else None,
                    rollout_logp=float(batch.rollout_logp[t]) if sampled else None,
                    logp=None if scored is None else float(scored.logp[t]),
                    reference_logp=reference,
                    entropy=None if scored is None else float(scored.entropy[t]),
                    advantage=None if scored is None else float(scored.advantage[t]),
                    weight=None if scored is None else float(scored.weight[t]),
                )
            )
        turn = part.turn
        yield TurnValues(
            role=Role(int(batch.turn_role[turn])).name.lower() if turn >= 0 else "repeated prefix",
            number=int(batch.turn_number[turn]) if turn >= 0 else None,
            session=session_text(batch, part.segment, index),
            reward=float(batch.turn_reward[turn]) if turn >= 0 else 0.0,
            labels={name: int(values[turn]) for name, values in batch.turn_labels.items()} if turn >= 0 else {},
            tokens=tuple(tokens),
        )


def json_lines(kept: KeptStep, chosen: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """One object a thing, ``kind`` says which: the step, then each trajectory, its turns and their tokens."""
    yield {
        "kind": "step",
        "step": kept.step,
        "opened": None if kept.opened is None else version_text(kept.opened),
        "whole": kept.whole,
        "scores": kept.scores is not None,
        "groups": list(kept.batch.group_id),
        "trained": list(kept.trained),
        "filtered": [list(pair) for pair in kept.filtered],
        "metrics": {name: value if value == value else None for name, value in kept.metrics.items()},
    }
    mask = trained_mask(kept.batch)
    for index in chosen:
        about = trajectory_values(kept, index, mask)
        yield {"kind": "trajectory", **asdict(about)}
        for turn in turn_values(kept, index, mask, tokenizer):
            said = {name: value for name, value in asdict(turn).items() if name != "tokens"}
            place = {"trajectory": about.trajectory, "turn": turn.number}
            yield {"kind": "turn", "trajectory": about.trajectory, **said}
            for token in turn.tokens:
                yield {"kind": "token", **place, **asdict(token)}
