"""The embedded decoder on every family's random checkpoint, against ``transformers``: log-probs and chosen experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.rollout.embedded.cache import Decode, KvCache, Prefill
from megatron_ext.rollout.embedded.model import Decoder
from megatron_ext.rollout.embedded.weights import WeightStage
from tests.helpers.hf_models import KINDS, saved_hf

CPU = torch.device("cpu")


def experts_of(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of every next token, [n, V], and the experts that each MoE layer chose, sorted, [n, layers, k]."""
    chosen: list[torch.Tensor] = []

    def record(module: torch.nn.Module, args: Any, output: Any) -> None:
        chosen.append(output[2].sort(-1).values)

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    handles = [router.register_forward_hook(record) for router in routers]
    with torch.no_grad():
        logp = model(ids[None]).logits[0].float().log_softmax(-1)
    for handle in handles:
        handle.remove()
    return logp, torch.stack(chosen, dim=1)


@pytest.mark.parametrize("kind", list(KINDS))
def test_prefill_in_chunks_and_steps_equals_transformers(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = saved_hf(kind, tmp_path / "model")
    hf = load_hf_config(tmp_path / "model")
    stage = WeightStage(hf, CPU)
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        stage.add(name, tensor)
    decoder, cache = Decoder(hf, stage.finish(), 64, CPU, threads=1), KvCache(hf, 1, 64, CPU)
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, hf.vocab, 40))
    logp, experts = experts_of(model, ids)
    at = 0
    with torch.inference_mode():
        for count in (17, 1, 1, 12, 1, 8):
            cache.ensure(at + count)
            one = Decode(cache, torch.tensor([at]), at + 1)
            attention = one if count == 1 else Prefill(cache, 0, [at], [count])
            logits, chosen = decoder.forward(ids[at : at + count], attention, None, record=True)
            np.testing.assert_allclose(logits.log_softmax(-1), logp[at : at + count], atol=1e-5)
            assert chosen is not None
            np.testing.assert_array_equal(chosen.sort(-1).values, experts[at : at + count])
            at += count
