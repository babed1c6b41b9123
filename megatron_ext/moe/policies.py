"""Router policies: trained (the default) and frozen.

Invariants (``tests/moe/test_policies.py``): a policy of RL leaves no auxiliary or z loss on; a frozen router's weights
and expert biases are the same bits after any number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_NO_AUXILIARY_LOSS: dict[str, Any] = {"moe_z_loss_coeff": None}


def router_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors (weights and expert biases) of every router."""
    for number, chunk in enumerate(chunks):
        # Of a router's buffers only the bias decides; the others count tokens and change with every forward.
        biases = [(name, tensor) for name, tensor in chunk.named_buffers() if name.endswith(".expert_bias")]
        for name, tensor in [*chunk.named_parameters(), *biases]:
            if ".router." in name:
                yield f"{number}:{name}", tensor


@dataclass(frozen=True)
class TrainedRouter:
    """Routers learn from the policy loss alone."""

    def config_overrides(self) -> dict[str, Any]:
        return dict(_NO_AUXILIARY_LOSS)

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        return None

    def check(self, chunks: Sequence[torch.nn.Module]) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


@dataclass
class FrozenRouter:
    """Routers do not learn: no gradient, no expert-bias update; ``check`` compares every bit after each step."""

    _before: dict[str, torch.Tensor] = field(default_factory=dict)

    def config_overrides(self) -> dict[str, Any]:
        return {**_NO_AUXILIARY_LOSS, "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".router." in name:
                    parameter.requires_grad_(False)
            for name, module in chunk.named_modules():
                if name.endswith(".router"):
                    module.frozen_expert_bias = True

    def check(self, chunks: Sequence[torch.nn.Module]) -> None:
        now = dict(router_parameters(chunks))
        if not self._before:
            self._before = {name: tensor.detach().clone() for name, tensor in now.items()}
            return
        for name, tensor in now.items():
            if not torch.equal(tensor, self._before[name]):
                raise RuntimeError(f"router policy frozen: {name} changed in an optimizer step")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = {}
