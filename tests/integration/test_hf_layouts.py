"""HF folders on real process groups: any layout loads the same model, and writes it back bit by bit. Their vocabularies
are no multiple of anything, so that Megatron's rows are padded (``models/vocab.py``).

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
from megatron_ext.models.vocab import VocabRows
from tests.helpers.hf_models import KINDS, saved_hf, token_logp
from tests.helpers.hf_ranks import SEGMENTS, some_batch
from tests.helpers.vocab_ranks import VOCAB, Found, Order, assert_same

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


@pytest.fixture(scope="module", params=list(KINDS))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[np.ndarray]]:
    """A random checkpoint as ``transformers`` writes it, and the log-probs that it gives."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    model, batch = saved_hf(request.param, folder), some_batch()
    ends = [batch.segment_tokens[segment : segment + 2] for segment in range(SEGMENTS)]
    return folder, [token_logp(model, torch.from_numpy(batch.ids[a:b].astype(int))).numpy() for a, b in ends]


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_norm_over_all_heads_is_that_of_one_tensor(pool: RankPool, ranks: int) -> None:
    heads, dim = 4, 6
    generator = torch.Generator().manual_seed(2)
    x, weight, back = (torch.randn(5, 1, heads, dim, generator=generator) for _ in range(3))
    flat = x.flatten(2).requires_grad_()
    norm = torch.nn.RMSNorm(heads * dim, eps=1e-6)
    norm.weight.data.copy_(weight[0, 0].flatten())
    out = norm(flat)
    out.backward(back.flatten(2))
    assert flat.grad is not None and norm.weight.grad is not None
    layout = {"tensor": ranks, "sequence": ranks > 1}
    found = pool.call(f"{HELPERS}:wide_norm", layout, heads, dim, world=ranks)
    for name, want in (("out", out.detach()), ("dx", flat.grad)):
        joined = np.concatenate([part[name] for part in found], axis=2)
        np.testing.assert_allclose(joined.reshape(want.shape), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sum(part["dw"] for part in found), norm.weight.grad, rtol=1e-5, atol=1e-6)


def test_the_checkpoint_tells_models_apart(reference: tuple[Path, list[np.ndarray]]) -> None:
    assert all(np.ptp(want) > 0.5 for want in reference[1]), "random weights, not a flat distribution"


PADDED = "tests.helpers.vocab_ranks:over_ranks"
TENSOR: dict[str, Any] = {"tensor": 2, "sequence": True}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def unpadded(request: pytest.FixtureRequest, pool: RankPool) -> tuple[bool, Found]:
    """One rank without padding."""
    (found,) = pool.call(PADDED, {}, Order(request.param, 1), world=1)
    return request.param, found


@pytest.mark.parametrize(
    ("multiple", "parallel"),
    [
        (8, TENSOR),
        (114, TENSOR | {"expert": 2}),
        (226, TENSOR),  # all that the second rank holds is padding
        (8, TENSOR | {"distributed_optimizer": True}),
    ],
)
def test_padding_over_tensor_parallel_ranks_is_no_padding_on_one(
    pool: RankPool, unpadded: tuple[bool, Found], multiple: int, parallel: dict[str, Any]
) -> None:
    """``models/vocab.py``, invariants 1 and 2."""
    tied, one = unpadded
    found = pool.call(PADDED, parallel, Order(tied, multiple), world=2)
    assert_same(found, one)
    for part in found:
        assert part.rows == VocabRows(VOCAB, multiple).padded and part.padding == 0.0


def test_padding_without_sequence_parallelism(pool: RankPool) -> None:
    (one,) = pool.call(PADDED, {}, Order(False, 1, moe=False), world=1)
    found = pool.call(PADDED, {"tensor": 2}, Order(False, 8, moe=False), world=2)
    assert_same(found, one)
    assert all(part.padding == 0.0 for part in found)


def test_a_checkpoint_is_read_under_any_layout_and_padding(
    pool: RankPool, unpadded: tuple[bool, Found], tmp_path: Path
) -> None:
    tied, _ = unpadded
    pairs = [((8, {}), (8, TENSOR)), ((8, TENSOR), (8, {})), ((1, {}), (8, TENSOR)), ((226, TENSOR), (64, {}))]
    for number, ((multiple, parallel), (other, into)) in enumerate(pairs):
        folder = tmp_path / str(number)
        sizes = [2 if layout else 1 for layout in (parallel, into)]
        written = pool.call(PADDED, parallel, Order(tied, multiple, steps=1, save=folder), world=sizes[0])
        read = pool.call(PADDED, into, Order(tied, other, steps=1, load=folder), world=sizes[1])
        for key, values in written[0].after.items():
            assert np.array_equal(read[0].before[key], values), f"{pairs[number]}: {key}"
        assert all(part.padding == 0.0 for part in read)
    (line,) = pool.call(PADDED, {}, Order(tied, 8, vocab=VOCAB + 1, load=tmp_path / "0"), world=1)
    assert line.endswith("word_embeddings.weight has shape (113, 32), the model (114, 32)")
