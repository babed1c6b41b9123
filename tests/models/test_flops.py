"""Invariants of the FLOP count (numbers refer to ``megatron_ext/models/flops.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megatron_ext.models import causal_cpu
from megatron_ext.models.flops import Passes, Work, added, forward_flops, rows_work, total_flops, tree_work
from megatron_ext.models.forward import packed_logits
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.packing import SharedTokens
from megatron_ext.trajectory.prefix_tree import build_prefix_tree

Build = Callable[..., list[Any]]


def counted(chunk: torch.nn.Module, lengths: Sequence[int], shared: SharedTokens | None = None) -> tuple[int, int]:
    """What torch counts of a forward over rows of ``lengths``, and of its backward."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.randint(0, 90, (len(positions),), generator=torch.Generator().manual_seed(0))
    if shared is not None:
        positions = shared.positions
        ids = ids[: len(positions)]
    # torch knows no formula for the flash kernel of CPUs.
    flash = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: sdpa_flop_count(
            q, k, v
        )
    }
    with FlopCounterMode(display=False, custom_mapping=flash) as counter:
        logits = packed_logits(chunk, ids, positions, offsets, shared=shared)
        forward = counter.get_total_flops()
        logits.square().sum().backward()
    return forward, counter.get_total_flops() - forward


def test_by_hand() -> None:  # invariant 1
    hf = HFConfig(
        family="qwen3_moe",
        vocab=10,
        hidden=4,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=4,
        intermediate=5,
        max_position_embeddings=16,
        rope_theta=10000.0,
        num_experts=8,
        top_k=2,
        moe_intermediate=7,
        norm_topk_prob=True,
        mlp_only_layers=(0,),
    )
    # Rows of 3 and 2 tokens: 6 + 3 pairs. A layer's attention has 4x8 + 2 x 4x4 + 8x4 = 96 multiplications a token and
    # 2 heads x 4 x 2 a pair; the dense layer 3 x 4x5 = 60; the other a router of 4x8 and two experts of 3 x 4x7.
    layers = 5 * (96 + 60) + 5 * (96 + 32 + 2 * 84) + 2 * 9 * 16
    assert rows_work([3, 2]) == Work(tokens=5, pairs=9, predicted=5)
    assert forward_flops(hf, rows_work([3, 2])) == 2 * (layers + 5 * 40)
    assert forward_flops(hf, rows_work([3, 2], predicted=1)) == 2 * (layers + 40)
    assert forward_flops(hf, Work()) == 0 and rows_work([]) == Work() and rows_work([0, 0]) == Work()


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_torch_counts_the_same_on_the_model(
    build: Build, moe: HFConfig, dense: HFConfig, family: str
) -> None:  # invariants 1 and 3
    hf = {"moe": moe, "dense": dense}[family]
    (chunk,) = build(hf)
    work = rows_work([1] * 12)  # rows of one token: no kernel runs a masked pair
    forward, backward = counted(chunk, [1] * 12)
    assert forward == forward_flops(hf, work)
    assert forward + backward == total_flops(hf, Passes(work, work))


def test_attention_grows_with_the_pairs(build: Build, moe: HFConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel runs whole squares torch counts those; the model's own are the causal pairs."""  # invariant 1
    (chunk,) = build(moe)
    lengths = [24, 40]
    squares = Work(64, sum(n * n for n in lengths), 64)
    blocks = counted(chunk, lengths)[0]
    assert forward_flops(moe, rows_work(lengths)) < blocks <= forward_flops(moe, squares)
    monkeypatch.setattr(causal_cpu, "MAX_LENGTH", 0)  # torch's own kernel instead of blocks
    # Lengths alike are attended to in one call, padded to the longest.
    assert counted(chunk, [40, 40])[0] == forward_flops(moe, Work(80, 2 * 40 * 40, 80))


def test_shared_prefixes_count_once(build: Build, moe: HFConfig) -> None:  # invariants 1 and 2
    # Two rows share all but their last token: 5 distinct tokens.
    tree = build_prefix_tree(torch.tensor([1, 2, 3, 4, 1, 2, 3, 5]).numpy(), torch.tensor([0, 4, 8]).numpy())
    shared = SharedTokens.of(tree)
    work = tree_work(shared.positions)
    assert work == Work(tokens=5, pairs=10 + 4, predicted=5)
    (chunk,) = build(moe)
    forward, _ = counted(chunk, [4, 4], shared)
    unshared = forward_flops(moe, rows_work([4, 4]))
    assert forward_flops(moe, work) <= forward < unshared
    per_pair = 2 * 2 * moe.layers * moe.heads * moe.head_dim
    # Its kernel runs some masked pairs of its rectangles; nothing else is beyond the count.
    assert (forward - forward_flops(moe, work)) % per_pair == 0
    rectangles = sum(stack.query.size * stack.key.shape[1] for stack in shared.plan.stacks)
    assert forward <= forward_flops(moe, Work(5, rectangles, 5))


@given(st.lists(st.integers(0, 50), max_size=6), st.lists(st.integers(0, 50), max_size=6))
def test_parts_add_up(first: list[int], second: list[int]) -> None:  # invariant 2
    hf = HFConfig(
        family="qwen3",
        vocab=11,
        hidden=8,
        layers=3,
        heads=2,
        kv_heads=2,
        head_dim=4,
        intermediate=9,
        max_position_embeddings=64,
        rope_theta=10000.0,
    )
    a, b = (Passes(rows_work(rows), rows_work(rows)) for rows in (first, second))
    both = Passes(rows_work([*first, *second]), rows_work([*first, *second]))
    assert added([a, b]) == both and added([]) == Passes()
    assert total_flops(hf, both) == total_flops(hf, a) + total_flops(hf, b)
    assert total_flops(hf, both) == 3 * forward_flops(hf, both.forward)
    # Rows without a common prefix are a forest, each token at its place.
    assert tree_work([at for rows in first for at in range(rows)]) == rows_work(first)
