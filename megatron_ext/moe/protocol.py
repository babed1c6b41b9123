"""Router policy protocol: what training may do to the routers of a Mixture-of-Experts model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class RouterPolicy(Protocol):
    """Applied once to the built model chunks, before the optimizer is made.

    ``config_overrides`` are fields of Megatron's ``TransformerConfig`` that the policy fixes (auxiliary losses, expert
    bias updates); ``apply`` may set ``requires_grad``; ``check`` asserts after each optimizer step what was promised.
    ``reads_labels`` names the turn labels of the record without which the policy's losses do nothing.
    """

    @property
    def reads_labels(self) -> frozenset[str]: ...

    def config_overrides(self) -> dict[str, Any]: ...

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None: ...

    def check(self, chunks: Sequence[torch.nn.Module]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
