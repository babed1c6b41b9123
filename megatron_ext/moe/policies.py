"""Router policies: trained (the default) and frozen.

Both leave nothing on that moves a router behind the policy loss: no auxiliary or z loss unless the configuration asks
for it (Megatron-LM 5694: one that was silently on made the gradient norm 3.4 times as large), and no update of expert
biases, which Megatron makes without a gradient after every step.

Invariants (``tests/moe/test_policies.py``, over layouts ``tests/integration/test_routing_frozen.py``):

1. A policy of RL leaves no auxiliary or z loss on, and ``check`` asserts it after every step.
2. A frozen router's weights and expert biases are the same bits after any number of steps, in every layout, with the
   distributed optimizer, weight decay and fp32 masters; one that moves anyway is an error at that step.
3. A frozen router's experts, and everything else, still learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.config.errors import ConfigError
from megatron_ext.trajectory.record import Field

MEASURED_FIELDS = (Field.THINKING, Field.TOOL_USE)  # in which operations show, where a policy does not say others


def router_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors (weights and expert biases) of every router."""
    for number, chunk in enumerate(chunks):
        # Of a router's buffers only the bias decides; the others count tokens and change with every forward.
        biases = [(name, tensor) for name, tensor in chunk.named_buffers() if name.endswith(".expert_bias")]
        for name, tensor in [*chunk.named_parameters(), *biases]:
            if ".router." in name:
                yield f"{number}:{name}", tensor


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Names and modules of every router."""
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if name.endswith(".router"):
                yield f"{number}:{name}", module


def check_auxiliary_losses(chunks: Sequence[torch.nn.Module], coefficient: float | None = None) -> None:
    """Raises ``RuntimeError`` where a router has a z loss, or an auxiliary loss other than one of ``coefficient``
    (0: none at all; None: whatever the configuration says, as long as type and coefficient agree)."""
    for name, router in routers(chunks):
        config = router.config
        found = config.moe_aux_loss_coeff
        if config.moe_z_loss_coeff is not None:
            raise RuntimeError(f"{name}: a z loss is on (moe_z_loss_coeff={config.moe_z_loss_coeff}); RL has none")
        on = router.is_aux_loss_enabled()
        wanted = found if coefficient is None else coefficient
        if found != wanted or on != (found != 0.0):
            raise RuntimeError(
                f"{name}: auxiliary loss {config.moe_router_load_balancing_type} with coefficient {found}, expected "
                f"{'none' if wanted == 0 else f'aux_loss with {wanted}'}"
            )


@dataclass(frozen=True)
class TrainedRouter:
    """Routers learn from the policy loss (and from the load-balancing loss of ``model.aux_loss_coefficient``).

    ``bias_update_rate``: how far an expert bias moves after a step towards an even load, where the model has them
    (arXiv 2408.15664); 0 keeps them, which is what RL does unless told otherwise. ``label``: the turn label whose
    operations ``moe/op_mi`` tells apart.
    """

    bias_update_rate: float = 0.0
    label: str = "op"

    def __post_init__(self) -> None:
        if found := self.problems():
            raise ConfigError(found)

    def problems(self) -> list[str]:
        """What is wrong with the arguments, a line each; a subclass adds its own."""
        if not 0 <= self.bias_update_rate < float("inf"):
            return [f"bias_update_rate={self.bias_update_rate}: must be finite and at least 0"]
        return []

    @property
    def learns(self) -> bool:
        return True

    @property
    def in_warm_start(self) -> bool:
        return False

    @property
    def measured_fields(self) -> Sequence[Field]:
        return MEASURED_FIELDS

    @property
    def reads_labels(self) -> frozenset[str]:
        return frozenset()

    def config_overrides(self) -> dict[str, Any]:
        return {"moe_z_loss_coeff": None, "moe_router_bias_update_rate": self.bias_update_rate}

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        for _, router in routers(chunks):
            router.frozen_expert_bias = self.bias_update_rate == 0
        self.check(chunks)

    def check(self, chunks: Sequence[torch.nn.Module]) -> None:
        check_auxiliary_losses(chunks)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


@dataclass
class FrozenRouter:
    """Routers do not learn: no gradient, no optimizer state, no expert-bias update, no auxiliary loss.

    ``in_warm_start``: freeze them in the supervised warm start too (by default it trains them, and RL freezes what it
    left). ``label``: the turn label whose operations ``moe/op_mi`` tells apart.
    """

    in_warm_start: bool = False
    label: str = "op"
    _before: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def learns(self) -> bool:
        return False

    @property
    def measured_fields(self) -> Sequence[Field]:
        return MEASURED_FIELDS

    @property
    def reads_labels(self) -> frozenset[str]:
        return frozenset()

    def config_overrides(self) -> dict[str, Any]:
        return {
            "moe_z_loss_coeff": None,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.0,
        }

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".router." in name:
                    parameter.requires_grad_(False)
        for _, router in routers(chunks):
            router.frozen_expert_bias = True
        check_auxiliary_losses(chunks, 0.0)

    def check(self, chunks: Sequence[torch.nn.Module]) -> None:
        check_auxiliary_losses(chunks, 0.0)
        now = dict(router_parameters(chunks))
        if not self._before:
            self._before = {name: tensor.detach().clone() for name, tensor in now.items()}
            return
        for name, tensor in now.items():
            if not torch.equal(_bits(tensor), _bits(self._before[name])):
                raise RuntimeError(f"router policy frozen: {name} changed in an optimizer step")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = {}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: values would take -0.0 for 0.0, and NaN for another NaN."""
    return tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
