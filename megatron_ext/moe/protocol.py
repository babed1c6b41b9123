"""What training may do to the routers of a Mixture-of-Experts model: a policy, and the routing loss that it may have.

A routing loss is a sum over tokens, because no part of a batch sees the batch: what a formula needs of the whole
(means, loads, mutual information, a gate) is measured in the forward that scores the batch under the weights that open
it, and added up over micro-batches and ranks. The loss of an optimizer step holds it still, or is the tangent there.
``training.routing.routing`` runs the two forwards, ``moe.view`` is what the policy sees in them:

1. ``tokens``: the tokens that count, each with a cell and a share, from the record alone.
2. Scoring, every layer and micro-batch: ``measure`` adds to sums of ``sizes``; ``keep`` says what each token must find
   again in the update (the router's distribution then, say).
3. Once a step: ``is_open`` of a gated one says whether it acts, ``term`` makes of statistics and counts what the loss
   of that step needs.
4. Update, every layer and micro-batch: ``loss`` of the tokens here. It is attached as Megatron attaches its own
   auxiliary losses, so that micro-batches, data-parallel and pipeline ranks need no thought.
5. ``metrics`` of what was measured, and now and then ``metrics_after``, measured once more under the updated weights.

Invariants (``tests/moe/test_contract.py``, over layouts ``tests/integration/test_routing_layouts.py``):

1. ``apply`` and ``check`` keep what RL promises: no auxiliary or z loss unless the configuration asks for it.
2. Values and gradients of a routing loss are those of one rank that runs every row in one micro-batch.
3. A closed gate, and a batch without tokens that count, leave the step of plain training, bit for bit.
4. What a policy reports is in the table of metric names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from megatron_ext.moe.statistics import TokenStructure
    from megatron_ext.moe.view import BatchStatistics, Counts, RouterView
    from megatron_ext.trajectory.record import Field, TrajectoryBatch


class RouterPolicy(Protocol):
    """Applied once to the built model chunks, before the optimizer is made.

    ``config_overrides`` are fields of Megatron's ``TransformerConfig`` that the policy fixes (auxiliary losses, expert
    bias updates); ``apply`` may set ``requires_grad``; ``check`` asserts after each optimizer step what was promised.
    ``learns``: some router does. ``in_warm_start``: the policy acts in the supervised warm start too, which runs with
    the default one otherwise. ``label`` is the turn label whose operations the metric ``moe/op_mi`` tells apart, in the
    tokens of ``measured_fields``, each by itself; ``reads_labels`` those of the record without which the policy's loss
    does nothing.
    """

    @property
    def learns(self) -> bool: ...

    @property
    def in_warm_start(self) -> bool: ...

    @property
    def label(self) -> str: ...

    @property
    def measured_fields(self) -> Sequence[Field]: ...

    @property
    def reads_labels(self) -> frozenset[str]: ...

    def config_overrides(self) -> dict[str, Any]: ...

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None: ...

    def check(self, chunks: Sequence[torch.nn.Module]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class LabelRoom(Protocol):
    """A policy that has room for so many values of a label, from 0, and breaks at a larger one."""

    @property
    def label_room(self) -> Mapping[str, tuple[str, int]]:
        """Label -> the policy's argument that says how many, and how many."""
        ...


@runtime_checkable
class Gated(Protocol):
    """A routing loss that acts only sometimes; one without a gate always does, and nothing is said of one."""

    def is_open(self, opened: BatchStatistics) -> bool:
        """The gate: whether the loss acts on this batch."""
        ...


@runtime_checkable
class RoutingLossPolicy(RouterPolicy, Protocol):
    """A router policy with a loss on what routers do. ``moe.loss_policy.PlainRoutingLoss`` answers all but ``term`` and
    ``loss``.

    ``detach_input``: the loss reaches the routers alone, not the model below them. ``error_every``: every so many
    batches one more forward measures again after the update (``metrics_after``); 0 never.
    """

    @property
    def detach_input(self) -> bool: ...

    @property
    def error_every(self) -> int: ...

    def tokens(self, batch: TrajectoryBatch) -> TokenStructure:
        """The tokens that count. ``batch`` is this rank's part; the answer of a part is the part of the answer."""
        ...

    def sizes(self, experts: int) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what ``measure`` adds up for each layer."""
        ...

    def measure(self, view: RouterView, sums: Mapping[str, torch.Tensor]) -> None:
        """Adds this call's tokens to the layer's ``sums``, fp64 of ``sizes``, in place (``add_``). No gradient. In the
        forward after the update ``view.kept`` is there, in the scoring one it is None."""
        ...

    def keep(self, view: RouterView) -> torch.Tensor | None:
        """What ``loss`` finds as ``view.kept``: fp32 [m, K] of the view's tokens, or None. It costs 4 K bytes a token
        and layer of the rank's batch."""
        ...

    def term(self, opened: BatchStatistics, counts: Counts) -> Any:
        """What ``loss`` needs of an optimizer step with ``counts`` of the batch that ``opened`` is of, coefficient and
        denominators included; None when nothing acts. Tensors stay on the device of ``opened``."""
        ...

    def loss(self, view: RouterView, term: Any) -> torch.Tensor:
        """The part [] of the step's loss that the view's tokens have in this layer. With a gradient through
        ``view.logits``."""
        ...

    def metrics(self, opened: BatchStatistics) -> dict[str, float]:
        """What to report of a batch: ``moe/loss/NAME`` is the loss as it is optimized (by its coefficient, 0 when it is
        not open), ``moe/own/NAME`` any other number."""
        ...

    def metrics_after(self, opened: BatchStatistics, after: BatchStatistics) -> dict[str, float]:
        """The same of one measured again under the updated weights."""
        ...


_OWN = tuple(name for name in vars(RoutingLossPolicy) if not name.startswith("_"))


def routing_loss(policy: RouterPolicy) -> RoutingLossPolicy | None:
    """The policy as one with a routing loss; None for one without (no ``loss``).

    Raises ``ValueError`` for one that has a loss and not the rest, which would never act.
    """
    if not hasattr(policy, "loss"):
        return None
    if isinstance(policy, RoutingLossPolicy):
        return policy
    missing = ", ".join(name for name in _OWN if not hasattr(policy, name))
    raise ValueError(
        f"{type(policy).__name__} has a loss, and lacks {missing or 'members of a router policy'} of a routing loss; "
        "derive it from megatron_ext.moe.loss_policy.PlainRoutingLoss"
    )
