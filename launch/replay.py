"""``python -m launch.train recipe=... run.name=... --replay-step N [--replay train|rollout]``: a step of a run again.

``train`` (the default) repeats scoring, credit, loss and update on the step's groups and prints its metrics, recorded
and replayed; ``rollout`` samples the groups again and says how far tokens and rewards are the same. Both start from the
checkpoint before the step, or the nearest one, and leave the run's folder as it is. Keys given on the command line
count: a step can be replayed under another configuration, which is then told.

Exit status: 0 it agrees (exactly with ``run.deterministic``, else within fp32 rounding), 1 it does not, 2 it cannot be
replayed (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import is_first
from launch.paths import RECIPES
from launch.prepare import missing_packages, prepare
from megatron_ext.config.compose import ConfigError

if TYPE_CHECKING:
    from megatron_ext.training.step_replay.replay import Opened
    from megatron_ext.training.step_replay.replay_rollout import RolloutReplay
    from megatron_ext.training.step_replay.replay_training import Compared, TrainReplay

KINDS = ("train", "rollout")


def replay(overrides: Sequence[str], step: int, kind: str, recipes: Path = RECIPES) -> int:
    """Replays and prints; the exit status. Raises what ``launch.errors`` knows."""
    missing = missing_packages()
    if missing:
        raise ConfigError(missing)
    config = prepare(overrides, recipes)
    if kind == "rollout" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            ["--replay rollout: runs on one rank, whatever trained the weights; start it without torchrun"]
        )
    from megatron_ext.training.interrupt import Interrupted
    from megatron_ext.training.step_replay.replay import open_step
    from megatron_ext.training.step_replay.replay_rollout import replay_rollout
    from megatron_ext.training.step_replay.replay_training import replay_training

    try:
        opened = open_step(config, step, whole=kind == "train")
        if is_first():
            print(_began(opened, kind), file=sys.stderr, flush=True)
        if kind == "rollout":
            sampled = replay_rollout(opened)
            print(rollout_text(sampled))
            return 0 if sampled.agrees else 1
        trained = replay_training(opened)
    except Interrupted:
        print("interrupted; nothing was compared", file=sys.stderr)
        return 130
    if trained is None:  # another rank tells
        return 0
    print(train_text(trained))
    return 0 if trained.agrees else 1


def _began(opened: Opened, kind: str) -> str:
    kept = opened.kept
    what = "trained on again" if kind == "train" else "sampled again"
    weights = "before training" if opened.weights_step == 0 else f"of step {opened.weights_step}"
    return (
        f"{opened.path} step {kept.step}: {kept.batch.num_groups} groups, {kept.batch.num_trajectories} trajectories "
        f"{what}, from the weights {weights}"
    )


def _notes(opened: Opened) -> list[str]:
    return [f"note: {note}" for note in opened.notes]


def _verdict(agrees: bool, opened: Opened, within: str) -> str:
    how = "to the last bit" if opened.exact else within
    return f"agrees {how}" if agrees else f"does not agree {how}"


def train_text(found: TrainReplay) -> str:
    """The comparison as text; lines that differ by more than is allowed end in an arrow."""
    from megatron_ext.training.step_replay.replay_training import ATOL, RTOL

    lines = [*_notes(found.opened), f"{'metric':<36}{'recorded':>16}{'replayed':>16}"]
    lines += [_line(line) for line in sorted(found.metrics, key=lambda line: line.name)]
    if found.tokens:
        lines += ["", f"{'per token':<36}{'largest difference':>32}"]
        lines += [f"{line.name:<36}{line.replayed:>32.3g}{'' if line.agrees else '   <-'}" for line in found.tokens]
    else:
        lines += ["", "no per-token scores were kept (samples.every keeps them)"]
    return "\n".join([*lines, "", _verdict(found.agrees, found.opened, f"within {ATOL:g} + {RTOL:g} of the value")])


def _line(line: Compared) -> str:
    return f"{line.name:<36}{line.recorded:>16.8g}{line.replayed:>16.8g}{'' if line.agrees else '   <-'}"


def rollout_text(found: RolloutReplay) -> str:
    """A line a group, and one for each trajectory that came out otherwise."""
    from megatron_ext.training.step_replay.replay_rollout import SAME_TRAJECTORIES

    lines = [
        *_notes(found.opened),
        f"{'group':<24}{'task':<32}{'same ids':>10}{'reward, recorded':>18}{'replayed':>10}",
    ]
    for group in found.groups:
        count = len(group.same)
        recorded, replayed = (sum(pair[side] for pair in group.rewards) / count for side in (0, 1))
        lines.append(
            f"{group.group:<24}{group.task:<32}{f'{sum(group.same)}/{count}':>10}{recorded:>18.4f}{replayed:>10.4f}"
        )
        lines += [
            f"  trajectory {j}: differs from token {at} on; reward {rewards[0]:g}, now {rewards[1]:g}"
            for j, (at, rewards) in enumerate(zip(group.parted, group.rewards, strict=True))
            if at >= 0
        ]
    lines.append(
        f"{100 * found.same:.1f} % of the trajectories are the same; their log-probs differ by at most {found.logp:.2g}"
    )
    return "\n".join([*lines, _verdict(found.agrees, found.opened, f"in at least {100 * SAME_TRAJECTORIES:.0f} %")])
