"""Invariants of the router policies, on a real Megatron model and optimizer (``megatron_ext/moe/policies.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import BackendConfig, Config, ModelConfig, OptimizerConfig, RunConfig
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter, check_auxiliary_losses, router_parameters
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.session import build_chunks
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.warm_start.key import warm_start_router
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.replaying import Overridden
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


def test_a_loss_that_comes_on_later_is_an_error(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Invariant 1, at the step where it acts: a z loss, an auxiliary loss (Megatron-LM 5694)."""
    for name, make in POLICIES.items():
        for change, line in (
            ({"moe_z_loss_coeff": 1e-3}, r"a z loss is on \(moe_z_loss_coeff=0.001\)"),
            ({"moe_aux_loss_coeff": 1e-2}, "auxiliary loss none with coefficient 0.01, expected"),
        ):
            trainer = make_trainer(rank, router=make())
            train(trainer, batch, 1)
            for field, value in change.items():
                setattr(trainer.chunks[0].module.config, field, value)
            with pytest.raises(RuntimeError, match=rf"0:module.decoder.layers.0.mlp.router: {line}"):
                train(trainer, batch, 1)
            assert name
    balanced = make_trainer(
        rank, router=Overridden(fields={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1})
    )
    train(balanced, batch, 1)  # asked for
    with pytest.raises(RuntimeError, match="auxiliary loss aux_loss with coefficient 0.1, expected none"):
        check_auxiliary_losses(balanced.chunks, 0.0)
    check_auxiliary_losses(balanced.chunks, 0.1)


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


BIASED = replace(
    TINY, family="minimax_m2", qk_norm="layer", tie_word_embeddings=False
)  # sigmoid routing with an expert bias


@pytest.mark.parametrize("name", ["trained", "frozen", "balanced"])
def test_expert_biases_move_only_when_told_to(rank: ParallelContext, batch: TrajectoryBatch, name: str) -> None:
    """Megatron moves them after every step, without a gradient; a policy that balances does, so that this can fail."""
    policies = POLICIES | {"balanced": lambda: TrainedRouter(bias_update_rate=0.5)}
    trainer = make_trainer(rank, hf=BIASED, router=policies[name]())
    biases = {name: values for name, values in routers(trainer).items() if name.endswith("expert_bias")}
    assert len(biases) == TINY.layers
    train(trainer, batch, 1)
    moved = [not torch.equal(values, routers(trainer)[name]) for name, values in biases.items()]
    assert all(moved) if name == "balanced" else not any(moved)
    with pytest.raises(ValueError, match="bias_update_rate=-1"):
        TrainedRouter(bias_update_rate=-1)


def test_a_skipped_step_moves_no_expert_bias(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, hf=BIASED, router=TrainedRouter(bias_update_rate=0.5))
    train(trainer, batch, 1)
    before, inputs = routers(trainer), random_inputs(batch)
    broken = replace(inputs, advantage=inputs.advantage * float("nan"))
    assert not trainer.update(micro_of(batch, rows_of(batch)), broken, TERMS, lr=1e-2).applied
    assert all(torch.equal(values, routers(trainer)[name]) for name, values in before.items())


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


def test_bits_and_not_values_are_compared(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    policy = FrozenRouter()
    trainer = make_trainer(rank, router=policy)
    _, weight = next(iter(router_parameters(trainer.chunks)))
    with torch.no_grad():
        weight[0, 0], weight[0, 1] = 0.0, float("nan")
    policy.check(trainer.chunks)
    policy.check(trainer.chunks)
    with torch.no_grad():
        weight[0, 0] = -0.0
    with pytest.raises(RuntimeError, match="changed in an optimizer step"):
        policy.check(trainer.chunks)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_freezing_behind_the_optimizer_is_noticed(rank: ParallelContext, batch: TrajectoryBatch, name: str) -> None:
    """Momentum and weight decay from before would go on moving a weight that has no gradient."""
    trainer = make_trainer(rank, weight_decay=0.1, name=name)
    train(trainer, batch, 2)
    policy = FrozenRouter()
    policy.apply(trainer.chunks)
    trainer.router = policy
    with pytest.raises(RuntimeError, match=r"router policy frozen: .*router.weight changed"):
        train(trainer, batch, 1)


def test_a_run_that_trained_its_routers_goes_on_with_frozen_ones(
    rank: ParallelContext, batch: TrajectoryBatch, tmp_path: Path
) -> None:
    """What is saved is the weights, not the choice: resumed under the other policy, the routers stay what they were."""
    from megatron_ext.training.checkpoints import checkpoint

    trained = make_trainer(rank, weight_decay=0.1)
    train(trained, batch, 2)
    request = checkpoint.SaveRequest(2, "tiny", {})
    checkpoint.save(tmp_path, request, trained)
    (info,) = checkpoint.list_checkpoints(tmp_path)
    frozen = make_trainer(rank, seed=9, router=FrozenRouter(), weight_decay=0.1)
    checkpoint.load(info, "tiny", frozen)
    assert all(torch.equal(routers(frozen)[name], values) for name, values in routers(trained).items())
    train(frozen, batch, 2)
    assert all(torch.equal(routers(frozen)[name], values) for name, values in routers(trained).items())


def test_frozen_routers_in_bf16(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Parameters in bf16 with fp32 masters, an expert bias in fp32."""
    policy = FrozenRouter()
    trainer = bf16_trainer(rank, policy)
    before, everything = routers(trainer), parameters(trainer)
    assert {values.dtype for name, values in before.items() if name.endswith("weight")} == {torch.bfloat16}
    train(trainer, batch, 3)
    after = routers(trainer)
    assert all(torch.equal(after[name].float(), before[name].float()) for name in before)
    assert any(not torch.equal(values, everything[name]) for name, values in parameters(trainer).items())


def bf16_trainer(rank: ParallelContext, policy: RouterPolicy, **optimizer: Any) -> Trainer:
    backend = resolve_backend(BackendConfig(device="cpu", dtype="bfloat16"))
    model = ModelConfig(hf_config="", max_context=256)
    chunks = build_model(BIASED, model, rank.config, backend, policy.config_overrides(), 1)
    policy.apply(chunks)
    wrapped, megatron = wrap(chunks, OptimizerConfig(weight_decay=0.1, **optimizer), rank.config, backend)
    return Trainer(wrapped, megatron, rank, temperature=1.0, router=policy)


def test_the_warm_start_trains_the_routers_that_rl_freezes(rank: ParallelContext) -> None:
    """With its own load-balancing loss; runs that only freeze share its key with those that do not."""
    config = Config(recipe="r", run=RunConfig(name="n"), model=ModelConfig(hf_config="", max_context=256))
    target = {"_target_": "megatron_ext.moe.policies.FrozenRouter"}
    frozen, throughout = (
        replace(config, model=replace(config.model, router=node))
        for node in (target, {**target, "in_warm_start": True})
    )
    backend = resolve_backend(BackendConfig(device="cpu"))

    def learns(config: Config, aux: float | None) -> bool:
        chunks, _ = build_chunks(config, TINY, backend, aux)
        return all(p.requires_grad for name, p in router_parameters(chunks))

    assert learns(frozen, 0.01) and not learns(frozen, None)
    assert not learns(throughout, 0.0) and not learns(throughout, None)
    with pytest.raises(RuntimeError, match="auxiliary loss none with coefficient 0.0, expected aux_loss with 0.01"):
        learns(throughout, 0.01)
    assert warm_start_router(frozen) == {} == warm_start_router(config)
    assert warm_start_router(throughout) == throughout.model.router


class ActsEverywhere(TrainedRouter):
    in_warm_start = True


def test_a_policy_says_whether_it_acts_in_the_warm_start() -> None:
    for name, acts in (("ActsEverywhere", True), ("TrainedRouter", False)):
        node = {"_target_": f"{__name__ if acts else 'megatron_ext.moe.policies'}.{name}", "label": "kind"}
        model = ModelConfig(hf_config="", max_context=256, router=node)
        config = Config(recipe="r", run=RunConfig(name="n"), model=model)
        assert warm_start_router(config) == (node if acts else {})
