"""Routing replay: the experts that the engine chose, used again where a model trains and scores (R3, arXiv 2510.11370).

Selection is the record's, everything else the router's own: its scores of the recorded experts are live, and so is its
gradient. What is replayed travels with the micro-batch (``MicroBatch.replay``), through the tap of one model.

Invariants (``tests/moe/test_replay.py``, over layouts ``tests/integration/test_layouts.py``):

1. Every recorded id of a micro-batch is used exactly once in each MoE layer's forward, and once more in its
   recomputation where activations are recomputed; ``check`` counts what the routers did and raises otherwise.
2. Tokens without a recording run as the router chooses, bit for bit as without replay.
3. With the experts that the router would have chosen, replay changes nothing, neither values nor gradients.
4. A replay belongs to one model and one pass; another model that runs meanwhile does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.moe.replay_tokens import ReplayError, ReplayTokens
from megatron_ext.moe.tap import MicroRun, RouterCall, RouterTap


def check_replayable(config: Any) -> None:
    """Raises ``ReplayError`` when a router of this ``TransformerConfig`` would not honour a given choice."""
    reasons = {
        "moe_router_fusion": config.moe_router_fusion,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_input_jitter_eps": config.moe_input_jitter_eps is not None,
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing,
        "moe_router_force_biased": config.moe_router_force_biased is not None,
        "moe_enable_routing_replay": config.moe_enable_routing_replay,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"),
    }
    wrong = [f"{name}={getattr(config, name)}" for name, refused in reasons.items() if refused]
    if wrong:
        raise ReplayError(f"routing replay does not go with {', '.join(wrong)}: the router would not use the record")


@dataclass(eq=False)
class Replay:
    """What is replayed in one pass over micro-batches. ``used`` counts recorded ids found in the routers' choices, on
    the device, by (micro-batch, layer, call)."""

    used: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    due: dict[tuple[int, int, int], int] = field(default_factory=dict)
    runs: list[MicroRun] = field(default_factory=list)

    def select(self, call: RouterCall, own: torch.Tensor) -> torch.Tensor:
        """The tap's selector: recorded experts where there are some, else the router's ``own``; int64 [n, k]."""
        tokens = _tokens(call.run)
        if tokens is None or not call.count:
            return own
        group, rows = call.router.tp_group, len(own)
        ranks = group.size() if call.router.config.sequence_parallel else 1
        if rows * ranks < call.run.tokens:
            raise ReplayError(
                f"routing replay: layer {call.layer} sees {rows} tokens on each of {ranks} ranks, the micro-batch has "
                f"{call.run.tokens}"
            )
        experts, valid = _span(tokens, call)
        chosen = torch.where(valid.unsqueeze(1), experts, own[: call.count])
        return chosen if call.count == rows else torch.cat([chosen, own[call.count :]])

    def count(self, call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        """The tap's listener: how many of the recorded ids are in the map that the layer will use."""
        tokens = _tokens(call.run)
        if tokens is None:
            return
        key = (call.run.number, call.layer, len(call.run.calls[call.layer]))
        if key in self.due:
            raise ReplayError(f"routing replay: micro-batch {key[0]} went through layer {call.layer} twice")
        self.due[key] = tokens.due(call.start, call.count) if call.count else 0
        if not self.due[key]:
            return
        experts, valid = _span(tokens, call)
        found = routing_map[: call.count].gather(1, experts) & valid.unsqueeze(1)
        # A token that went to other experts besides loses as many as it has too many.
        extra = (routing_map[: call.count].sum(1) - tokens.top_k).abs() * valid
        self.used[key] = found.sum() - extra.sum()

    def check(self, layers: Sequence[tuple[MicroRun, Sequence[int]]], *, backward: bool) -> None:
        """Raises ``ReplayError`` unless every recorded id was used exactly once a forward and once a recomputation.

        ``layers``: each forward of the pass with the MoE layers of the chunk that ran it.
        """
        for run, expected in layers:
            if _tokens(run) is None:
                continue
            for layer in expected:
                calls = run.calls.get(layer, [])
                # Without gradients first, with them again: an activation checkpoint.
                wanted = ([True], [False, True]) if backward else ([False],)
                if calls not in wanted:
                    raise ReplayError(
                        f"routing replay: micro-batch {run.number} asked layer {layer} for experts {len(calls)} times "
                        f"(gradients on: {calls}); expected once, and once more where activations are recomputed"
                    )
                if any((run.number, layer, call + 1) not in self.due for call in range(len(calls))):
                    raise ReplayError(
                        f"routing replay: micro-batch {run.number}, layer {layer}: nobody counted which of the "
                        "recorded experts its router used"
                    )
        keys = list(self.used)
        found = torch.stack([self.used[key] for key in keys]).tolist() if keys else []
        for key, used in zip(keys, found, strict=True):
            if used != self.due[key]:
                number, layer, call = key
                where = "forward" if call == 1 else "recomputation"
                raise ReplayError(
                    f"routing replay: micro-batch {number}, layer {layer}: {used} of {self.due[key]} recorded expert "
                    f"ids were used in the {where}"
                )


@contextmanager
def replaying(tap: RouterTap) -> Iterator[Replay]:
    """Replays what the micro-batches of a pass carry, in the model of ``tap``, while the context is open."""
    for _, router in tap.routers():
        check_replayable(router.config)
    replay = Replay()
    with tap.selecting(replay.select), tap.listening(replay.count):
        yield replay


def _tokens(run: MicroRun) -> ReplayTokens | None:
    tokens: ReplayTokens | None = run.micro.replay
    return tokens


def _span(tokens: ReplayTokens, call: RouterCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [count, k] and validity [count] of a call's rows in its layer. Places that are not valid read 0."""
    span = slice(call.start, call.start + call.count)
    return tokens.experts[span, call.position].to(torch.int64), tokens.valid[span]
