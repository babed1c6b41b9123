from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.models.forward import packed_logits, record_routing, unwrap
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.models.packing import pack

LENGTHS = [17, 5, 29, 1, 12]
Twin = Callable[[HFConfig], tuple[Any, Path]]


def sample(hf: HFConfig, lengths: list[int] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, hf.vocab, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("moe", {}),
        ("moe", {"norm_topk_prob": False, "top_k": 3, "mlp_only_layers": ()}),
        ("moe", {"decoder_sparse_step": 2, "rope_theta": 1e6, "kv_heads": 1}),
        ("dense", {"kv_heads": 4}),
    ],
)
def test_logits_equal_transformers(
    build: Any, hf_twin: Twin, request: pytest.FixtureRequest, family: str, change: dict[str, Any], tied: bool
) -> None:
    hf = replace(request.getfixturevalue(family), tie_word_embeddings=tied, **change)
    reference, folder = hf_twin(hf)
    chunk = build(load_hf_config(folder), weights=str(folder))[0].eval()
    ids, positions, cu = sample(hf)
    with torch.no_grad():
        ours = packed_logits(chunk, ids, positions, cu)
        theirs = torch.cat([reference(x[None]).logits[0] for x in ids.split(LENGTHS)])
    assert float(theirs.std()) > 0.5
    assert float((ours - theirs).abs().max()) <= 1e-5


def test_packed_equals_separate_with_gradients(build: Any, moe: HFConfig) -> None:
    chunk = build(moe)[0]
    ids, positions, cu = sample(moe)
    weight = torch.randn(len(ids), moe.vocab, generator=torch.Generator().manual_seed(1))
    packed = packed_logits(chunk, ids, positions, cu)
    (packed * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in chunk.named_parameters()}
    chunk.zero_grad()
    parts = [packed_logits(chunk, x, torch.arange(len(x)), torch.tensor([0, len(x)])) for x in ids.split(LENGTHS)]
    separate = torch.cat(parts)
    (separate * weight).sum().backward()
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-5)
    for name, p in chunk.named_parameters():
        assert float((p.grad - grads[name]).norm()) <= 1e-5 * float(p.grad.norm()), name


def test_an_empty_micro_batch_gives_zero_gradients(build: Any, moe: HFConfig) -> None:
    chunk = build(moe)[0]
    nothing = torch.zeros(0, dtype=torch.int64)
    for cu in ([0], [0, 0]):
        out = packed_logits(chunk, nothing, nothing, torch.tensor(cu))
        assert out.shape == (0, moe.vocab)
        out.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in chunk.decoder.parameters())


def test_a_shared_plan_and_a_wrapped_chunk(build: Any, moe: HFConfig) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    chunk = build(moe)[0]
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    assert unwrap(wrapped) is chunk
    ids, positions, cu = sample(moe)
    with torch.no_grad():
        assert torch.equal(
            packed_logits(wrapped, ids, positions, cu, pack(cu)), packed_logits(chunk, ids, positions, cu)
        )


def test_recorded_routing_is_what_the_forward_used(build: Any, hf_twin: Twin, moe: HFConfig) -> None:
    reference, folder = hf_twin(moe)
    chunk = build(moe, weights=str(folder))[0]
    ids, positions, cu = sample(moe)
    with record_routing([chunk]) as routing:
        packed_logits(chunk, ids, positions, cu)
    experts = routing.experts()
    assert experts.shape == (len(ids), 3, 2) and experts.dtype is torch.int64
    # The gates of transformers see the same hidden states: the same experts in the same order.
    want: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, a, out: want.append(out[-1]))
        for layer in reference.model.layers[1:]
    ]
    parts = []
    for x in ids.split(LENGTHS):
        want.clear()
        with torch.no_grad():
            reference(x[None])
        parts.append(torch.stack(want, dim=1))
    for hook in hooks:
        hook.remove()
    assert torch.equal(experts, torch.cat(parts))
    packed_logits(chunk, ids, positions, cu)
    assert len(routing.by_layer) == 3, "the recorder outlived its context"


def test_recording_needs_exactly_one_forward(build: Any, dense: HFConfig) -> None:
    chunk = build(dense)[0]
    ids, positions, cu = sample(dense)
    with record_routing([chunk]) as routing:
        packed_logits(chunk, ids, positions, cu)
    with pytest.raises(ValueError, match="exactly one forward"):
        routing.experts()
