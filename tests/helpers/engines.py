"""Small models of both families, their ``transformers`` twins as reference, and what a client does in every test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.engine import GenerateRequest, GenerateResult, GenerationClient, SamplingParams

MOE = HFConfig(
    family="qwen3_moe",
    vocab=101,
    hidden=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    intermediate=64,
    max_position_embeddings=256,
    rope_theta=10000.0,
    num_experts=8,
    top_k=2,
    moe_intermediate=24,
    norm_topk_prob=True,
    mlp_only_layers=(1,),
)
DENSE = replace(
    MOE, family="qwen3", num_experts=0, top_k=0, moe_intermediate=0, norm_topk_prob=False, mlp_only_layers=()
)


class Twin:
    """A random ``transformers`` model: the weights an engine is given, and what it must then compute."""

    def __init__(self, config: HFConfig, seed: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        raw = config.to_dict()
        kind = raw.pop("model_type")
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **raw)).float().eval()
        with torch.no_grad():
            for p in self.model.parameters():
                noise = torch.randn(p.shape, generator=generator)
                # Norm weights away from 1, matrices at fan-in scale: distributions neither flat nor one-hot.
                p.copy_(1 + 0.2 * noise if p.dim() == 1 else noise * p.shape[-1] ** -0.5)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF checkpoint name, tensor) pairs; ``transformers`` keeps the experts of a layer as one tensor."""
        for name, tensor in self.model.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name.endswith("experts.gate_up_proj"):
                for e, both in enumerate(tensor):
                    gate, up = both.chunk(2, dim=0)
                    yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate
                    yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), up
            elif name.endswith("experts.down_proj"):
                for e, down in enumerate(tensor):
                    yield name.replace("down_proj", f"{e}.down_proj.weight"), down
            else:
                yield name, tensor

    @torch.no_grad()
    def logp(self, ids: NDArray[np.int32], temperature: float = 1.0) -> NDArray[np.float32]:
        """Log-probs of every next token, float32 [n, V]: row t is log p(. | ids[: t + 1])."""
        logits = self.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float()
        out: NDArray[np.float32] = (logits / (temperature or 1.0)).log_softmax(-1).numpy()
        return out

    @torch.no_grad()
    def routed(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Experts of every token, int64 [n, MoE layers, k], likeliest first."""
        out = self.model(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True)
        per_layer = [layer.float().softmax(-1).topk(self.config.top_k, dim=-1).indices for layer in out.router_logits]
        return torch.stack(per_layer, dim=1).numpy()


def prompt(rng: np.random.Generator, length: int, vocab: int = MOE.vocab) -> NDArray[np.int32]:
    return rng.integers(0, vocab, length).astype(np.int32)


def request(name: str, ids: NDArray[np.int32], session: str | None = None, **settings: Any) -> GenerateRequest:
    """A request of 8 new tokens unless told otherwise; its own session unless one is named."""
    routed = bool(settings.pop("return_routed", False))
    return GenerateRequest(name, session or name, ids, SamplingParams(**({"max_new_tokens": 8} | settings)), routed)


def collect(client: GenerationClient, count: int, timeout: float = 240.0) -> dict[str, GenerateResult]:
    """The next ``count`` results by request id."""
    deadline = time.monotonic() + timeout
    results: dict[str, GenerateResult] = {}
    while len(results) < count:
        assert time.monotonic() < deadline, f"{len(results)} of {count} results after {timeout:g} s"
        for result in client.poll(1.0):
            assert result.request_id not in results, f"{result.request_id} answered twice"
            results[result.request_id] = result
    return results


def ask(client: GenerationClient, requests: Sequence[GenerateRequest]) -> dict[str, GenerateResult]:
    client.submit(requests)
    return collect(client, len(requests))


def joined(request: GenerateRequest, result: GenerateResult) -> NDArray[np.int32]:
    return np.concatenate([request.input_ids, result.ids])


@dataclass(frozen=True)
class Check:
    """Largest distance of a result's log-probs from the reference's."""

    error: float
    sampled: int

    @staticmethod
    def of(twin: Twin, request: GenerateRequest, result: GenerateResult) -> Check:
        whole, first = joined(request, result), len(request.input_ids)
        reference = twin.logp(whole, request.sampling.temperature)
        at = np.arange(first, len(whole))
        wanted = reference[at - 1, whole[at]]
        return Check(float(np.abs(wanted - result.logp).max(initial=0.0)), len(at))
