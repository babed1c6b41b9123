"""What single keys may hold: choices, smallest values, shares. Judges each key by itself; ``validate.py`` judges what
they say together.

Invariants (``tests/config/test_ranges.py``):

1. A value outside its range, NaN included, is one line that names the key, the value and the range.
2. The tables name keys of the schema, whose defaults are inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from megatron_ext.config import keys
from megatron_ext.config.keys import Kind
from megatron_ext.config.schema import Config
from megatron_ext.losses.aggregation import MODES

# Allowed values of the keys that choose by name.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.init": ("fan_in", "normal"),
    "credit.normalize": ("std", "mean", "none"),
    "loss.aggregation": MODES,
    "rollout.replay_missing": ("error", "live"),
    "rollout.replay_rerun": ("segment", "first"),
    "optimizer.name": ("adam", "sgd"),
    "optimizer.schedule": ("constant", "cosine", "linear"),
    "warm_start.optimizer.name": ("adam", "sgd"),
    "warm_start.optimizer.schedule": ("constant", "cosine", "linear"),
}

# Smallest allowed value of the keys that count something.
AT_LEAST: Mapping[str, float] = {
    "run.seed": 0,
    "run.steps": 0,
    "run.max_minutes": 0,
    "run.threads": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.expert": 1,
    "parallel.expert_tensor": 1,
    "parallel.context": 1,
    "model.max_context": 2,
    "model.vocab_multiple": 1,
    "model.aux_loss_coefficient": 0,
    "tokenizer.corpus_tasks": 1,
    "batch.tasks_per_step": 1,
    "batch.trajectories_per_task": 1,
    "batch.optimizer_steps_per_batch": 1,
    "batch.tokens_per_microbatch": 1,
    "batch.tokens_per_row": 0,
    "rollout.top_k": 0,
    "rollout.max_new_tokens": 1,
    "rollout.max_turns": 1,
    "rollout.concurrency": 1,
    "rollout.env_workers": 1,
    "credit.eps": 0,
    "credit.filter.draw_limit": 1,
    "credit.filter.tolerance": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_grad": 0,
    "warm_start.seed": 0,
    "warm_start.demonstrations": 1,
    "warm_start.min_epochs": 0,
    "warm_start.gate_tasks": 1,
    "warm_start.gate_every": 1,
    "warm_start.trajectories_per_step": 1,
    "warm_start.observation_weight": 0,
    "warm_start.aux_loss_coefficient": 0,
    "tasks.train_tasks": 1,
    "tasks.dev_tasks": 0,
    "tasks.test_tasks": 0,
    "evaluation.every": 0,
    "evaluation.samples": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.warm_start_minutes": 0,
    "samples.every": 0,
    "samples.groups": 0,
}

ABOVE_ZERO = (
    "model.embedding_std",
    "rollout.env_deadline_s",
    "rollout.lease_deadline_s",
    "optimizer.lr",
    "optimizer.eps",
    "warm_start.optimizer.lr",
    "warm_start.optimizer.eps",
)
BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "warm_start.optimizer.beta1", "warm_start.optimizer.beta2")
SHARES = ("optimizer.min_lr_ratio", "warm_start.mistake_rate", "warm_start.target_success")
SEEDS = ("run.seed", "warm_start.seed")
MAX_VOCAB = 2048
MIN_VOCAB = 264  # the special tokens, the 256 bytes, and at least one piece to learn
MAX_SEED = 2**32 - 1  # what every generator takes


def problems(cfg: Config) -> Iterator[str]:
    """One line a value that its key cannot hold."""
    for key in keys.walk(Config):
        if key.kind is Kind.VALUE and isinstance(value := keys.value(cfg, key.path), float) and value in (inf, -inf):
            yield f"{key.path}={value}: must be finite"
    for path, allowed in CHOICES.items():
        if (value := keys.value(cfg, path)) not in allowed:
            yield f"{path}={value}: must be one of {', '.join(allowed)}"
    for path, least in AT_LEAST.items():
        if not (value := keys.value(cfg, path)) >= least:  # written so that NaN fails
            yield f"{path}={value}: must be at least {least:g}"
    for path in ABOVE_ZERO:
        if not (value := keys.value(cfg, path)) > 0:
            yield f"{path}={value}: must be above 0"
    for path in BELOW_ONE:
        if not 0 <= (value := keys.value(cfg, path)) < 1:
            yield f"{path}={value}: must be at least 0 and below 1"
    for path in SHARES:
        if not 0 <= (value := keys.value(cfg, path)) <= 1:
            yield f"{path}={value}: is a share, 0 to 1"
    for path in SEEDS:
        if (value := keys.value(cfg, path)) > MAX_SEED:
            yield f"{path}={value}: must be at most {MAX_SEED}"
    if cfg.credit.std_ddof not in (0, 1):
        yield f"credit.std_ddof={cfg.credit.std_ddof}: must be 0 (population) or 1 (sample)"
    if not cfg.model.tokenizer and not MIN_VOCAB <= cfg.tokenizer.vocab_size <= MAX_VOCAB:
        yield (
            f"tokenizer.vocab_size={cfg.tokenizer.vocab_size}: a learned vocabulary has {MIN_VOCAB} to {MAX_VOCAB} "
            "tokens, special tokens and bytes included"
        )
