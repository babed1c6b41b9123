"""HF folders on real process groups: any layout loads the same model, and writes it back bit by bit.

HF and Megatron configurations that were never compared, so that a wrong conversion trained silently: slime 1059;
expert-tensor shards lost on the way to the engine: slime 2280.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from launch.benches._ranks import RankPool
from tests.helpers.hf_ranks import SEGMENTS, some_batch

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HELPERS = "tests.helpers.hf_ranks"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2_distopt": (2, {"distributed_optimizer": True}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "etp2": (2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
    "ep2": (2, {"expert": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "tp2_ep2": (4, {"tensor": 2, "sequence": True, "expert": 2}),
    "pp2_ep2": (4, {"pipeline": 2, "expert": 2}),
    "tp2_pp2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks"), preload=HELPERS) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[np.ndarray]]:
    """A random checkpoint as ``transformers`` writes it, and the log-probs that it gives."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=112,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=request.param,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        initializer_range=0.3,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("hf") / "model"
    model.save_pretrained(folder)
    batch, wanted = some_batch(), []
    for segment in range(SEGMENTS):
        ids = torch.from_numpy(batch.ids[batch.segment_tokens[segment] : batch.segment_tokens[segment + 1]].astype(int))
        with torch.no_grad():
            logp = model(ids[None]).logits[0].double().log_softmax(-1)
        wanted.append(logp[:-1].gather(1, ids[1:, None])[:, 0].numpy())
    return folder, wanted


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layout_loads_what_transformers_wrote_and_writes_it_back(
    pool: RankPool, reference: tuple[Path, list[np.ndarray]], layout: str, tmp_path: Path
) -> None:
    folder, wanted = reference
    world, parallel = LAYOUTS[layout]
    found = pool.call(f"{HELPERS}:load_and_save", parallel, str(folder), str(tmp_path / "again"), world=world)
    for replies in found:
        for own, want in zip(replies, wanted, strict=True):
            np.testing.assert_allclose(own, want, atol=1e-5, rtol=0)
    source, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert source.keys() == written.keys()
    for name, tensor in source.items():
        assert torch.equal(tensor, written[name]), name


def test_the_checkpoint_tells_models_apart(reference: tuple[Path, list[np.ndarray]]) -> None:
    assert all(np.ptp(want) > 0.5 for want in reference[1]), "random weights, not a flat distribution"
