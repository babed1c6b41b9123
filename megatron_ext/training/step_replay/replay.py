"""A step of a run made again: the kept step, and the trainer as it stood before.

``replay_training`` trains it again on the groups it trained on, ``replay_rollout`` samples those groups again.

Invariants (``tests/launch/test_replay.py``):

1. Nothing in the run's folder is written or locked, so that a run that is still going can be looked at.
2. What makes the replay differ from the step, weights, settings or ranks, is noted.
3. What cannot be replayed is one line that says what there is: steps that were kept, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.training import deterministic
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.checkpoint import CheckpointError, CheckpointInfo, Restored
from megatron_ext.training.folder import FolderError, differing
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.ranks.ranks import Ranks, joined, launched
from megatron_ext.training.session import (
    TrainerBuilder,
    warm_start_folder,
)
from megatron_ext.training.step_replay.kept_step import KeptStep, KeptStepError, read_step, sampled_steps
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.warm_start.first_weights import place

# What may differ from the run's own configuration without a word: where it is, and what is kept or shown.
_NO_MATTER = ("run.name", "run.root", "run.max_minutes", "tracking", "checkpoint", "evaluation", "samples", "profile")


@dataclass(frozen=True)
class Opened:
    """What a replay starts from: the ``kept`` step, ``weights`` of step ``weights_step`` (0: those that RL started
    from; None: drawn), and ``notes`` on what differs from when the step was made."""

    path: Path
    config: Config
    hf: HFConfig
    kept: KeptStep
    weights_step: int
    weights: CheckpointInfo | Path | None
    notes: tuple[str, ...]

    @property
    def faithful(self) -> bool:
        """Whether the weights are those that the step started from."""
        return self.weights_step == self.kept.step - 1

    @property
    def exact(self) -> bool:
        """Whether the step must repeat to the last bit."""
        return self.config.run.deterministic and self.faithful and not self.notes


def open_step(config: Config, step: int, *, whole: bool) -> Opened:
    """The kept step and the weights nearest before it. ``whole``: every group that it trained on is needed.

    Raises ``FolderError``, ``KeptStepError`` or ``CheckpointError``.
    """
    path = Path(config.run.root) / config.run.name
    if not (path / "config.yaml").is_file():
        raise FolderError(f"{path}: no such run; --replay-step needs the run.name (and run.root) of one that was made")
    saved = load_resolved(path / "config.yaml")
    kept = read_step(path, step)
    if whole and not kept.whole:
        others = [n for n in sampled_steps(path) if n != step and read_step(path, n).whole]
        raise KeptStepError(
            f"{path}: step {step} keeps {kept.batch.num_groups} of the {len(kept.trained)} groups it trained on, and "
            f"training it again needs all: run with samples.groups=0. Steps kept whole: "
            f"{', '.join(map(str, others)) or 'none'}; --replay rollout works on any"
        )
    hf = load_hf_config(path / "model_config.json")
    weights = _weights(config, path, hf)
    nearest = min(weights, key=lambda n: (abs(n - (step - 1)), n >= step))
    notes = [f"configured differently: {line}" for line in differing(saved, config, _NO_MATTER)]
    if nearest != step - 1:
        shown = ", ".join("0 (before training)" if n == 0 else str(n) for n in sorted(weights))
        notes.append(
            f"weights of step {nearest}: step {step} started from those of step {step - 1}, which are not kept (there "
            f"are: {shown}); the numbers will differ"
        )
    worlds = {info.world for info in weights.values() if isinstance(info, CheckpointInfo)} - {launched()[1]}
    if worlds:
        notes.append(f"trained on {min(worlds)} ranks, replayed on {launched()[1]}: sums are taken in another order")
    if config.control.permute_rewards and (not whole or kept.scores is None):
        notes.append("control.permute_rewards=true: what is compared here has the rewards before they were permuted")
    return Opened(path, config, hf, kept, nearest, weights[nearest], tuple(notes))


def _weights(config: Config, path: Path, hf: HFConfig) -> Mapping[int, CheckpointInfo | Path | None]:
    """Where weights are, by the step that they are of."""
    found: dict[int, CheckpointInfo | Path | None] = {}
    if not config.warm_start.enabled:
        found[0] = None
    else:
        folder = warm_start_folder(config, path, hf)
        if (folder / "report.json").is_file():
            found[0] = folder
    found |= {info.step: info for info in checkpoint.list_checkpoints(path / "checkpoints")}
    if not found:
        raise CheckpointError(f"{path}: no checkpoint and no warm start, so there are no weights to start from")
    return found


# -- what both replays stand on --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ReplaySession:
    """This rank with the ``trainer`` as the step found it; ``restored`` is the checkpoint that it came from, None where
    RL had not begun."""

    ranks: Ranks
    trainer: Trainer
    restored: Restored | None
    flag: InterruptFlag


@contextmanager
def replaying(opened: Opened) -> Iterator[ReplaySession]:
    """The trainer with the weights and the optimizer state that the step started from."""
    config = opened.config
    backend = resolve_backend(config.backend)
    with joined(backend.communication) as ranks, ExitStack() as stack:
        torch.set_num_threads(config.run.threads)
        cpu_platform.tune_allocator()
        stack.enter_context(deterministic.exact(config.run.deterministic, backend))
        flag = stack.enter_context(InterruptFlag())
        ranks.listen_to(flag)
        builder = TrainerBuilder(config, opened.hf, backend, stack)
        trainer = builder.build(config.optimizer)
        restored = None
        if isinstance(opened.weights, CheckpointInfo):
            restored = checkpoint.load(opened.weights, config.recipe, trainer)
            trainer.router.load_state_dict(restored.states["router"])
        elif opened.weights is not None:
            checkpoint.load_weights(opened.weights / f"rank_{place(builder.context)}.pt", trainer.chunks)
            trainer.optimizer.reload_model_params()
        yield ReplaySession(ranks, trainer, restored, flag)
