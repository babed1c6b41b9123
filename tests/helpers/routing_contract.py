"""What every router policy, and every routing loss, must keep (``megatron_ext/moe/protocol.py``), on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.moe.protocol import Gated, RouterPolicy, routing_loss
from megatron_ext.tracking.names import check
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.routing.routing import RoutingLosses
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from tests.helpers.training import (
    TERMS,
    flat,
    gradients,
    identical,
    make_trainer,
    micro_of,
    parameters,
    random_inputs,
    rows_of,
)

Make = Callable[[], RouterPolicy]


def steps(
    trainer: Trainer, batch: TrajectoryBatch, micro: list[MicroBatch], inputs: TokenInputs, updates: int = 2
) -> dict[str, float]:
    """Optimizer steps on a batch under the trainer's own policy; what it says of the batch."""
    routing = RoutingLosses.of(trainer)
    if routing is not None:
        routing.open(batch, micro)
    for _ in range(updates):
        if routing is None:
            trainer.update(micro, inputs, TERMS, lr=1e-2)
            continue
        with routing.attached(micro):
            trainer.update(micro, inputs, TERMS, lr=1e-2)
    return {} if routing is None else routing.close(micro)


def silent(batch: TrajectoryBatch) -> TokenInputs:
    """Inputs that leave the policy loss without a gradient: what moves is the routing loss."""
    return replace(random_inputs(batch), weight=torch.zeros(batch.num_tokens))


def check_policy(make: Make, context: ParallelContext, batch: TrajectoryBatch) -> None:
    """Of a policy: invariant 1, that its answers are its own, and that it trains."""
    policy = make()
    policy.load_state_dict(policy.state_dict())
    first, second = policy.config_overrides(), policy.config_overrides()
    first["moe_z_loss_coeff"] = 1.0
    assert second["moe_z_loss_coeff"] is None, "overrides are the caller's own"
    trainer = make_trainer(context, router=policy)
    config = trainer.chunks[0].module.config
    assert config.moe_z_loss_coeff is None and config.moe_aux_loss_coeff == 0.0
    before = parameters(trainer)
    steps(trainer, batch, micro_of(batch, rows_of(batch)), random_inputs(batch))
    moved = [name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])]
    assert any(".experts." in name for name in moved)
    assert any(".router." in name for name in moved) == policy.learns


def check_loss(make: Make, context: ParallelContext, batch: TrajectoryBatch) -> None:
    """Of an open routing loss: invariants 2 and 4, and that it acts on what it says it acts on."""
    policy = routing_loss(make())
    assert policy is not None
    rows = rows_of(batch)
    everything = list(range(rows.num_rows))
    found, said = [], []
    for micro in (
        micro_of(batch, rows),
        micro_of(batch, rows, cap=40, members=everything[::-1]),
        [build_microbatch(batch, rows, everything, rows.mask, share_prefixes=True)],
        [build_microbatch(batch, rows, part, rows.mask) for part in (everything, [])],
    ):
        # SGD: Adam would make a large step of a rounding error. Two steps: what is kept may say nothing in the first.
        trainer = make_trainer(context, router=policy, name="sgd")
        said.append(steps(trainer, batch, micro, random_inputs(batch)))
        found.append(flat(gradients(trainer)))
    for grads, metrics in zip(found[1:], said[1:], strict=True):
        assert torch.allclose(grads, found[0], atol=1e-5 * float(found[0].abs().max()))
        assert metrics.keys() == said[0].keys()
        assert all(np.isclose(metrics[name], said[0][name], rtol=1e-4, atol=1e-7) for name in metrics)
    check(said[0])
    assert all(np.isfinite(value) for value in said[0].values()) and said[0].get("moe/gate", 1) == 1
    assert ("moe/gate" in said[0]) == ("moe/gate_entropy" in said[0]) == isinstance(policy, Gated)

    plain = make_trainer(context, name="sgd")
    steps(plain, batch, micro_of(batch, rows), random_inputs(batch))
    assert not torch.allclose(flat(gradients(plain)), found[0], atol=1e-6 * float(found[0].abs().max())), "it acts"


def check_reach(make: Make, context: ParallelContext, batch: TrajectoryBatch) -> None:
    """No gradient of the routing loss reaches anything but routers while ``detach_input``."""
    policy = routing_loss(make())
    assert policy is not None and policy.detach_input
    grads = []
    for router in (policy, TrainedRouter()):
        trainer = make_trainer(context, router=router)
        steps(trainer, batch, micro_of(batch, rows_of(batch)), random_inputs(batch), updates=1)
        grads.append(gradients(trainer))
    with_loss, without = grads
    assert with_loss.keys() == without.keys()
    for name in with_loss:
        assert name.endswith(".router.weight") or torch.equal(with_loss[name], without[name]), name


def check_silence(make: Make, context: ParallelContext, batch: TrajectoryBatch) -> None:
    """A batch without tokens that count leaves the step of plain training, bit for bit (invariant 3)."""
    broken = replace(batch, status=np.full_like(batch.status, int(Status.ENV_ERROR)))
    weightless = replace(batch, weight=np.zeros_like(batch.weight))
    for nothing in (broken, weightless):
        trainer = make_trainer(context, router=make())
        said = steps(trainer, nothing, micro_of(nothing, rows_of(nothing)), silent(nothing))
        assert all(np.isfinite(value) for value in said.values())
        assert not any(grad.any() for grad in gradients(trainer).values())


def check_closed(make: Make, context: ParallelContext, batch: TrajectoryBatch) -> None:
    """A routing loss that does not act leaves the parameters of plain training, bit for bit (invariant 3)."""
    after = []
    for router in (make(), TrainedRouter()):
        trainer = make_trainer(context, router=router)
        steps(trainer, batch, micro_of(batch, rows_of(batch), cap=60), random_inputs(batch))
        after.append(parameters(trainer))
    assert identical(*after)
