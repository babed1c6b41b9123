"""Learning-rate schedule: a pure function of the optimizer step, so that nothing needs to be restored."""

from __future__ import annotations

import math

from megatron_ext.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Rate of optimizer step ``step`` (counted from 0) of ``total``: linear warm-up, then the schedule.

    With ``total`` unknown (0) cosine and linear stay at the peak.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = total - config.warmup_steps
    if config.schedule == "constant" or span <= 0:
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif config.schedule == "linear":
        share = 1 - done
    else:
        raise ValueError(f"optimizer.schedule={config.schedule!r}: constant, cosine or linear")
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
