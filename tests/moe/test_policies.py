"""Invariants of the router policies, on a real Megatron model and optimizer (``megatron_ext/moe/policies.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter, router_parameters
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.training import (
    TERMS,
    TINY,
    gradients,
    make_trainer,
    micro_of,
    one_rank,
    parameters,
    random_inputs,
    rows_of,
)

POLICIES: dict[str, Callable[[], RouterPolicy]] = {"trained": TrainedRouter, "frozen": FrozenRouter}


@pytest.fixture(scope="module")
def rank() -> Iterator[ParallelContext]:
    with one_rank() as context:
        yield context


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


def train(trainer: Trainer, batch: TrajectoryBatch, steps: int) -> None:
    micro = micro_of(batch, rows_of(batch))
    for seed in range(steps):
        assert trainer.update(micro, random_inputs(batch, seed), TERMS, lr=1e-2).applied


def routers(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in router_parameters(trainer.chunks)}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_auxiliary_or_z_loss_is_left_on(rank: ParallelContext, name: str) -> None:
    trainer = make_trainer(rank, router=POLICIES[name]())
    config = trainer.chunks[0].module.config
    assert config.moe_z_loss_coeff is None
    assert config.moe_aux_loss_coeff == 0.0 and config.moe_router_load_balancing_type == "none"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_has_the_protocols_shape(rank: ParallelContext, name: str) -> None:
    policy = POLICIES[name]()
    policy.load_state_dict(policy.state_dict())
    first, second = policy.config_overrides(), policy.config_overrides()
    first["moe_z_loss_coeff"] = 1.0
    assert second["moe_z_loss_coeff"] is None, "overrides are the caller's own"


def test_every_router_is_found(rank: ParallelContext) -> None:
    found = routers(make_trainer(rank))
    assert len(found) == TINY.layers
    assert all(tensor.shape == (TINY.num_experts, TINY.hidden) for tensor in found.values())


def test_trained_routers_learn(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank)
    before = routers(trainer)
    train(trainer, batch, 2)
    after = routers(trainer)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_frozen_routers_are_the_same_bits(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, router=FrozenRouter(), weight_decay=0.1)
    before, everything = routers(trainer), parameters(trainer)
    train(trainer, batch, 5)
    after = routers(trainer)
    assert before and all(torch.equal(after[name], before[name]) for name in before)
    changed = {name for name, value in parameters(trainer).items() if not torch.equal(value, everything[name])}
    assert changed == everything.keys() - {name for name in everything if ".router." in name}, "all else learns"
    assert not any(".router." in name for name in gradients(trainer))


def give_biases(trainer: Trainer) -> list[torch.Tensor]:
    """Turns on Megatron's aux-loss-free balancing, which moves expert biases without a gradient. No supported family
    has them yet, so they are attached to the built routers."""
    from megatron.core.transformer.moe.router import TopKRouter

    config = trainer.chunks[0].module.config
    config.moe_router_enable_expert_bias, config.moe_router_bias_update_rate = True, 0.5
    found = []
    for module in trainer.chunks[0].modules():
        if isinstance(module, TopKRouter):
            module.enable_expert_bias, module.score_function = True, "sigmoid"
            for buffer in ("local_tokens_per_expert", "expert_bias"):
                delattr(module, buffer)
                module.register_buffer(buffer, torch.zeros(TINY.num_experts))
            found.append(module.expert_bias)
    return found


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_expert_biases_of_a_frozen_router_do_not_move(rank: ParallelContext, batch: TrajectoryBatch, name: str) -> None:
    """Those of a trained one do, so that this can fail."""
    trainer = make_trainer(rank, router=POLICIES[name]())
    biases = give_biases(trainer)
    assert len(biases) == TINY.layers
    assert sum(n.endswith("expert_bias") for n in routers(trainer)) == TINY.layers
    train(trainer, batch, 1)
    assert all(bool(bias.any()) == (name == "trained") for bias in biases)


def test_a_router_that_moves_anyway_is_an_error(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """From the very first step on."""
    policy = FrozenRouter()
    trainer = make_trainer(rank, router=policy)
    name, weight = next(iter(router_parameters(trainer.chunks)))
    step = trainer.optimizer.step

    def meddle() -> object:
        with torch.no_grad():
            weight.view(-1)[0] += 1e-6
        return step()

    trainer.optimizer.step = meddle
    with pytest.raises(RuntimeError, match=f"router policy frozen: {name} changed in an optimizer step"):
        train(trainer, batch, 1)
    trainer.optimizer.step = step
    policy.load_state_dict(policy.state_dict())  # other weights were loaded: they are what must stay now
    train(trainer, batch, 2)
