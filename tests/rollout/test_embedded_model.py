"""Weights, cache and decoder of the embedded engine against ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded.cache import Decode, KvCache, Prefill
from megatron_ext.rollout.embedded.engine import EmbeddedEngine
from megatron_ext.rollout.embedded.model import Decoder, mixture
from megatron_ext.rollout.embedded.served import read_config
from megatron_ext.rollout.embedded.weights import WeightStage
from megatron_ext.rollout.engine import EngineError
from tests.helpers.engines import DENSE, MOE, Twin

CPU = torch.device("cpu")
CONFIGS = {
    "moe": MOE,
    "dense": DENSE,
    "tied": replace(MOE, tie_word_embeddings=True, mlp_only_layers=()),
    "raw-top-k": replace(MOE, norm_topk_prob=False, top_k=3, decoder_sparse_step=2),
    "top-1": replace(MOE, top_k=1),
    "many-experts": replace(MOE, num_experts=40, top_k=5, moe_intermediate=8),
    "one-kv-head": replace(MOE, kv_heads=1, heads=3),
    "own-head-dim": replace(DENSE, heads=4, kv_heads=4, head_dim=32, tie_word_embeddings=True),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def decoder(twin: Twin, context: int = 64) -> Decoder:
    stage = WeightStage(twin.config, CPU)
    for name, tensor in twin.tensors():
        stage.add(name, tensor)
    return Decoder(twin.config, stage.finish(), context, CPU, threads=1)


def packed(rows: list[np.ndarray], starts: list[int], counts: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([r[s : s + c] for r, s, c in zip(rows, starts, counts, strict=True)]))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_any_cut_into_chunks_and_steps_equals_transformers(name: str) -> None:
    config = CONFIGS[name]
    twin, rng = Twin(config, 3), np.random.default_rng(0)
    model, cache = decoder(twin), KvCache(config, 6, 64, CPU)
    rows = [rng.integers(0, config.vocab, 30).astype(np.int32) for _ in range(3)]
    logp = [twin.logp(r) for r in rows]
    routed = [twin.routed(r) for r in rows] if any(config.moe_pattern) else None
    at = [0, 0, 0]

    def compare(counts: list[int], logits: torch.Tensor, experts: torch.Tensor | None) -> None:
        got, offset = logits.log_softmax(-1).numpy(), 0
        for i, count in enumerate(counts):
            span = slice(at[i], at[i] + count)
            assert np.abs(got[offset : offset + count] - logp[i][span]).max() < 1e-5
            if routed is not None:
                assert experts is not None
                mine = experts[offset : offset + count].numpy()
                assert np.array_equal(np.sort(mine, -1), np.sort(routed[i][span], -1))
            offset += count
            at[i] += count

    for counts in ([7, 7, 7], [1, 9, 4], [3, 3, 3]):  # all fresh; uneven behind a cache; even behind uneven caches
        cache.ensure(max(at) + max(counts))
        plan = Prefill(cache, 0, list(at), counts)
        compare(counts, *model.forward(packed(rows, at, counts), plan, None, routed is not None))
    for _ in range(5):
        cache.ensure(max(at) + 1)
        plan_one = Decode(cache, torch.tensor(at), max(at) + 1)
        compare([1, 1, 1], *model.forward(packed(rows, at, [1, 1, 1]), plan_one, None, routed is not None))
    assert at == [16, 24, 19]


def test_logits_of_the_last_tokens_alone() -> None:
    twin, rng = Twin(MOE, 3), np.random.default_rng(1)
    model, cache = decoder(twin), KvCache(MOE, 4, 64, CPU)
    rows = [rng.integers(0, MOE.vocab, 12).astype(np.int32) for _ in range(2)]
    cache.ensure(12)
    ids = packed(rows, [0, 0], [12, 5])
    for record in (False, True):
        logits, experts = model.forward(ids, Prefill(cache, 1, [0, 0], [12, 5]), torch.tensor([11, 16]), record)
        wanted = np.stack([twin.logp(rows[0])[11], twin.logp(rows[1])[4]])
        assert np.abs(logits.log_softmax(-1).numpy() - wanted).max() < 1e-5
        assert (experts is None) == (not record)


def test_mixture_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    h, up, down = (torch.randn(shape, generator=generator) for shape in ((9, 6), (5, 6, 8), (5, 4, 6)))
    expert = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])  # expert 4 gets nothing
    weight = torch.rand(9, 2, generator=generator)
    wanted = torch.zeros(9, 6)
    for token in range(9):
        for slot in range(2):
            e = int(expert[token, slot])
            gate, linear = (h[token] @ up[e]).chunk(2)
            wanted[token] += weight[token, slot] * ((torch.nn.functional.silu(gate) * linear) @ down[e])
    torch.testing.assert_close(mixture(h, weight, expert, up, down), wanted)


def test_growing_and_moving_keep_what_is_in_use() -> None:
    cache = KvCache(MOE, 4, 1000, CPU)
    cache.ensure(3)
    first = cache.length
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    cache.ensure(first + 1)
    assert cache.length == 2 * first
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor[:, :first], old) and not tensor[:, first:].any()
    cache.move(torch.tensor([0, 2, 3]), torch.tensor([2, 3, 0]), 5)  # a cycle: all sources are read before any write
    heads = MOE.kv_heads
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        now, was = tensor.unflatten(0, (4, heads)), old.unflatten(0, (4, heads))
        for source, target in ((0, 2), (2, 3), (3, 0)):
            assert torch.equal(now[target, :, :5], was[source, :, :5])
        assert torch.equal(now[:, :, 5:first], was[:, :, 5:])
        assert torch.equal(now[1, :, :first], was[1])
    cache.ensure(400)
    assert cache.length == 4 * first
    cache.ensure(513)
    assert cache.length == 1000, "doubling stops at the limit"


# -- weights -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [MOE, DENSE, CONFIGS["tied"]], ids=["moe", "dense", "tied"])
def test_a_stage_takes_every_weight_once(config: HFConfig) -> None:
    good = list(Twin(config, 1).tensors())
    for skipped in range(0, len(good), 7):
        stage = WeightStage(config, CPU)
        for i, (name, tensor) in enumerate(good):
            if i != skipped:
                stage.add(name, tensor)
        with pytest.raises(EngineError, match=good[skipped][0].replace(".", r"\.")):
            stage.finish()
        stage.add(*good[skipped])
        stage.finish()
    with pytest.raises(EngineError, match=r"'model\.norm\.weight' came twice"):
        stage.add("model.norm.weight", torch.ones(config.hidden))
    stage = WeightStage(config, CPU)
    with pytest.raises(EngineError, match=r"unknown weight 'model\.layers\.9\.mlp\.gate\.weight'"):
        stage.add("model.layers.9.mlp.gate.weight", torch.ones(3))
    with pytest.raises(EngineError, match=r"'model\.norm\.weight' has shape \(7,\), the model needs \(48,\)"):
        stage.add("model.norm.weight", torch.ones(7))
    with pytest.raises(EngineError, match="float type"):
        stage.add("model.norm.weight", torch.ones(config.hidden, dtype=torch.int64))


def test_a_tied_model_refuses_a_head_of_its_own() -> None:
    with pytest.raises(EngineError, match=r"unknown weight 'lm_head\.weight'"):
        WeightStage(CONFIGS["tied"], CPU).add("lm_head.weight", torch.ones(MOE.vocab, MOE.hidden))


def test_bf16_weights_are_taken_as_they_are() -> None:
    stage, tensor = WeightStage(MOE, CPU), torch.randn(MOE.vocab, MOE.hidden).bfloat16()
    for name, other in Twin(MOE, 1).tensors():
        stage.add(name, tensor if name == "lm_head.weight" else other)
    assert torch.equal(stage.finish().head.t(), tensor.float())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("model_type", "llama"),
        ("rope_scaling", {"rope_type": "yarn"}),
    ],
)
def test_a_configuration_computed_differently_is_refused(key: str, value: object) -> None:
    with pytest.raises(EngineError, match=key.split("_")[0]):
        read_config(MOE.to_dict() | {key: value}, 64)


def test_a_context_beyond_the_model_is_refused() -> None:
    assert read_config(MOE.to_dict(), 256) == MOE
    with pytest.raises(EngineError, match="max_context 257 must lie in 2..256"):
        read_config(MOE.to_dict(), 257)


@pytest.mark.parametrize("name", ["moe", "dense", "tied"])
def test_bf16_layers_compute_near_fp32_ones(name: str) -> None:
    """Invariant 4, and weights' invariant 3: off by bf16's rounding and by no more, with fp32 logits and routers."""
    config = CONFIGS[name]
    twin, rng = Twin(config, 3), np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, config.vocab, 40))
    logp = {}
    for dtype in (torch.float32, torch.bfloat16):
        stage = WeightStage(config, CPU, dtype)
        for key, tensor in twin.tensors():
            stage.add(key, tensor)
        weights = stage.finish()
        layer = weights.layers[-1]
        assert layer.qkv.dtype == layer.out.dtype == layer.up.dtype == layer.down.dtype == weights.dtype == dtype
        for kept in (weights.embed, weights.head, weights.norm, layer.norm, layer.ffn_norm):
            assert kept.dtype == torch.float32 and torch.equal(kept, kept.to(dtype).float())
        assert layer.router is None or layer.router.dtype == torch.float32
        cache = KvCache(config, 1, 64, CPU)
        cache.ensure(64)
        logits, _ = Decoder(config, weights, 64, CPU, threads=1).forward(ids, Prefill(cache, 0, [0], [40]), None, False)
        assert logits.dtype == torch.float32
        assert torch.equal(cache.values[0], cache.values[0].to(dtype).float())
        logp[dtype] = logits.log_softmax(-1)
    gap = (logp[torch.bfloat16] - logp[torch.float32]).abs()
    assert 1e-3 < float(gap.median()) < 0.1


def test_an_unknown_dtype_is_refused() -> None:
    for options, words in (
        ({"dtype": "float16"}, "dtype=float16"),
        ({"dtype": "bfloat16", "batch_invariant": True}, "dtype=float32"),
    ):
        with pytest.raises(EngineError, match=words):
            EmbeddedEngine(hf_config=MOE.to_dict(), max_context=64, threads=1, **options)
