"""What a configuration does to the routers of a Mixture-of-Experts model, in one line for people. Pure, no torch.

It says what was configured; ``moe/router_change`` is the evidence of what happened.

Invariants (``tests/moe/test_describe.py``):

1. The line is made from the configuration alone, so that a run whose policy class is gone can still be described.
2. What is on is named: replay, bias updates, auxiliary loss. What is off is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_ext.config.schema import Config

Node = Mapping[str, Any]
# Arguments of the structured policy that the line gives, where they are configured.
_SAID = {"mutual_information": "mutual information", "consistency": "consistency", "pull": "pull"}


def _trained(node: Node) -> str:
    rate = node.get("bias_update_rate", 0)
    return "trained" + (f", expert biases move by {rate:g} a step" if rate else "")


def _frozen(node: Node) -> str:
    return "frozen, in the warm start too" if node.get("in_warm_start") else "frozen"


def _structured(node: Node) -> str:
    said = [f"{words} {node[name]}" for name, words in _SAID.items() if name in node]
    if "entropy_low" in node and "entropy_high" in node:
        said.append(f"while entropy is {node['entropy_low']:g} to {node['entropy_high']:g} nats")
    rest = _trained(node).removeprefix("trained, ")
    said += [rest] if rest != "trained" else []
    return "structured" + (f": {', '.join(said)}" if said else "")


_POLICIES: Mapping[str, Callable[[Node], str]] = {
    "": _trained,  # the default
    "TrainedRouter": _trained,
    "FrozenRouter": _frozen,
    "StructuredRouter": _structured,
}


def routers_line(config: Config) -> str:
    """For example ``trained, replayed``, ``frozen`` or ``structured: mutual information 0.1, ...``; another policy by
    the name of its class. Meaningless for a model without experts."""
    node = config.model.router
    name = str(node.get("_target_", "")).rpartition(".")[2]
    parts = [_POLICIES[name](node) if name in _POLICIES else name]
    if config.rollout.replay_routing:
        parts.append("replayed")
    if config.model.aux_loss_coefficient:
        parts.append(f"load-balancing loss {config.model.aux_loss_coefficient:g}")
    return ", ".join(parts)
