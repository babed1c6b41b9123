from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.backends import ResolvedBackend
from megatron_ext.models.parallel import ParallelError, check_layout, initialize, shutdown


def test_alone_without_a_launcher_and_again(backend: ResolvedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    draws = []
    for _ in range(2):
        context = initialize(ParallelConfig(), backend, seed=7)
        assert (context.rank, context.world_size, context.data_parallel_rank, context.data_parallel_size) == (
            0,
            1,
            0,
            1,
        )
        assert context.tensor_group.size() == 1 and context.groups.ep.size() == 1
        assert context.device == torch.device("cpu")
        draws.append(torch.rand(3))
        shutdown(context)
        assert not dist.is_initialized()
    assert torch.equal(draws[0], draws[1])


def test_a_layout_that_does_not_fit_is_refused_before_any_group(backend: ResolvedBackend) -> None:
    with pytest.raises(ParallelError) as error:
        initialize(ParallelConfig(tensor=2, expert=3, virtual_pipeline=2), backend, seed=1)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert "parallel.tensor" in lines[0] and "parallel.expert" in lines[1] and "virtual_pipeline" in lines[2]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("config", "world", "ok"),
    [
        (ParallelConfig(), 3, True),
        (ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=2), 4, True),
        (ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2), 8, True),
        (ParallelConfig(expert=4), 6, False),
        (ParallelConfig(context=2), 3, False),
        (ParallelConfig(sequence=True), 1, False),
        (ParallelConfig(tensor=0), 1, False),
    ],
)
def test_check_layout(config: ParallelConfig, world: int, ok: bool) -> None:
    assert (check_layout(config, world) == []) is ok


def test_nothing_that_megatron_counts_outlives_a_layout(backend: ResolvedBackend) -> None:
    """Its record of auxiliary losses is as long as the first model of the process was deep."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    context = initialize(ParallelConfig(), backend, seed=7)
    tracker = get_moe_metrics_tracker()
    shutdown(context)
    assert get_moe_metrics_tracker() is not tracker
