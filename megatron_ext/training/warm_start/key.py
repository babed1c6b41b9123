"""What decides a warm start, so that runs that share it find it. No training stack.

Invariant (``tests/training/warm_start/test_key.py``): runs that differ in ``run.seed`` alone share a warm start where
``warm_start.seed`` is given, and not otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.instantiate import instantiate
from megatron_ext.config.saved import as_tree
from megatron_ext.config.schema import Config


def warm_start_key(parts: Mapping[str, Any]) -> str:
    """Key of a cached warm start: equal parts give equal weights."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def warm_start_seed(config: Config) -> int:
    """Seed of everything that happens before RL."""
    return config.warm_start.seed or config.run.seed


def warm_start_router(config: Config) -> dict[str, Any]:
    """The router policy of the warm start: that of RL where it acts there too (``in_warm_start``), else the default."""
    node = config.model.router
    return dict(node) if node and instantiate(node).in_warm_start else {}


def warm_start_parts(config: Config) -> dict[str, Any]:
    """What of a configuration decides its warm start; the tokenizer and the model's own file come to it."""
    tree = as_tree(config)
    return {
        "seed": warm_start_seed(config),
        "warm_start": {k: v for k, v in tree["warm_start"].items() if k not in ("cache", "seed")},
        "model": {**tree["model"], "router": warm_start_router(config)},
        **{k: tree[k] for k in ("environments", "harness", "tasks", "parallel", "backend")},
        "turns": config.rollout.max_turns,
        "microbatch": config.batch.tokens_per_microbatch,
    }
