"""What nobody reads is no load of a router's experts (``training/routing/filler.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import TrainedRouter, router_parameters
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.replaying import RECOMPUTE, Overridden
from tests.helpers.training import TERMS, TINY, gradients, make_trainer, micro_of, one_rank, random_inputs, rows_of

BIASED = replace(TINY, family="minimax_m2", qk_norm="layer", tie_word_embeddings=False)
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


@pytest.fixture(scope="module")
def rank() -> Iterator[ParallelContext]:
    with one_rank() as context:
        yield context


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


def empty(batch: TrajectoryBatch) -> MicroBatch:
    rows = rows_of(batch)
    return build_microbatch(batch, rows, [], rows.mask)


@pytest.mark.parametrize("recompute", ["none", "full", "moe"])
def test_an_empty_microbatch_has_no_load_balancing_loss(
    rank: ParallelContext, batch: TrajectoryBatch, recompute: str
) -> None:
    """Invariant 2: half of Megatron's mean over two micro-batches is that of the one with tokens, the other half 0."""
    inputs = random_inputs(batch)
    inputs = replace(inputs, weight=torch.zeros_like(inputs.weight))

    def router_gradients(micro: list[MicroBatch]) -> dict[str, np.ndarray]:
        fields: dict[str, Any] = {**BALANCED, **RECOMPUTE[recompute]}
        trainer = make_trainer(rank, router=Overridden(fields=fields))
        assert trainer.update(micro, inputs, TERMS, lr=0.0).applied
        return {name: grad.numpy().copy() for name, grad in gradients(trainer).items() if ".router." in name}

    micro = micro_of(batch, rows_of(batch))
    alone, beside, nothing = (router_gradients(given) for given in (micro, [*micro, empty(batch)], [empty(batch)]))
    assert len(micro) == 1 and len(alone) == TINY.layers
    for name, grad in alone.items():
        assert np.abs(grad).max() > 1e-4
        np.testing.assert_allclose(beside[name], grad / 2, rtol=1e-5, atol=1e-8, err_msg=name)
        assert not nothing[name].any(), name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_expert_biases_move_by_the_records_tokens(
    rank: ParallelContext, batch: TrajectoryBatch, recompute: str
) -> None:
    """Invariant 1: a single row, and two tokens of filler for each empty micro-batch beside it."""
    (row, *_) = micro_of(batch, rows_of(batch), cap=80)
    moved = []
    for seed in range(3):
        for micro in ([row], [row, *[empty(batch)] * 9]):
            router = Overridden(bias_update_rate=0.5, fields=RECOMPUTE[recompute])
            trainer = make_trainer(rank, seed=seed, hf=BIASED, router=router)
            assert trainer.update(micro, random_inputs(batch), TERMS, lr=0.0).applied
            held = dict(router_parameters(trainer.chunks))
            moved.append(torch.cat([held[name] for name in held if name.endswith("expert_bias")]))
        assert torch.equal(*moved[-2:]), seed
    assert all(values.abs().max() == 0.5 for values in moved)


def test_nobody_listens_where_nothing_is_kept_even(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, router=TrainedRouter())
    heard: list[object] = []
    listen = trainer.tap.listening
    trainer.tap.listening = lambda listener: heard.append(listener) or listen(listener)  # type: ignore[method-assign, func-returns-value]
    trainer.update(micro_of(batch, rows_of(batch)), random_inputs(batch), TERMS, lr=0.0)
    assert not heard
