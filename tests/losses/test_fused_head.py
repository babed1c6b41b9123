"""Invariants 1-4 of ``losses/fused_head.py``; the vocabulary split runs on real gloo process groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from launch.benches._ranks import RankPool
from megatron_ext.losses.candidates import CandidateSets
from megatron_ext.losses.fused_head import fused_logprob_entropy
from megatron_ext.losses.logprob import token_logprob_entropy

SETS = ["none", "all rows", "some rows"]


def case(
    n: int, v: int, h: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(hidden, weight, targets)``."""
    rng = torch.Generator().manual_seed(n * 1000 + v)
    hidden = torch.randn(n, h, generator=rng, dtype=torch.float64)
    weight = torch.randn(v, h, generator=rng, dtype=torch.float64) * scale
    targets = torch.randint(0, v, (n,), generator=rng)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def recorded(targets: torch.Tensor, vocab_size: int, sets: str) -> CandidateSets | None:
    if sets == "none":
        return None
    mask = torch.rand(len(targets), vocab_size, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[:, 0] = False  # no set is the whole vocabulary by chance
    mask[torch.arange(len(targets)), targets] = True
    mask[::3] |= sets == "some rows"
    return CandidateSets.from_mask(mask)


def both(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, fused: bool, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Outputs, and the gradients of ``sum_i i * logp_i + 2 * entropy_i``."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    if fused:
        logp, entropy = fused_logprob_entropy(hidden, weight, targets, **options)
    else:
        logits = hidden.to(torch.promote_types(hidden.dtype, torch.float32)) @ weight.t().to(
            torch.promote_types(hidden.dtype, torch.float32)
        )
        logp, entropy = token_logprob_entropy(logits, targets, **options)
    (logp @ torch.arange(float(len(logp)), dtype=logp.dtype) + 2 * entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [None, 5])
@pytest.mark.parametrize("sets", SETS)
def test_gradients_are_exact(temperature: float, vocab_size: int | None, sets: str) -> None:
    hidden, weight, targets = case(4, 7, 3, torch.float64)
    targets = targets % 5
    options: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab_size, "columns_per_chunk": 3}
    options["candidates"] = recorded(targets, vocab_size or 7, sets)

    def run(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_logprob_entropy(h, w, targets, **options)

    assert torch.autograd.gradcheck(run, (hidden, weight))


@given(
    n=st.integers(0, 70),
    rows=st.integers(1, 80),
    columns=st.integers(1, 60),
    v=st.integers(1, 53),
    sets=st.sampled_from(SETS),
)
def test_every_chunking_is_the_unfused_result(n: int, rows: int, columns: int, v: int, sets: str) -> None:
    hidden, weight, targets = case(n, v, 6, torch.float64)
    options: dict[str, Any] = {"temperature": 0.9}
    if v > 1:
        options["candidates"] = recorded(targets, v, sets)
    got = both(hidden, weight, targets, fused=True, rows_per_chunk=rows, columns_per_chunk=columns, **options)
    torch.testing.assert_close(got, both(hidden, weight, targets, fused=False, **options))


@pytest.mark.parametrize("sets", SETS)
def test_half_precision_is_computed_in_fp32(sets: str) -> None:
    hidden, weight, targets = case(20, 31, 8, torch.bfloat16)
    options: dict[str, Any] = {"temperature": 0.8, "candidates": recorded(targets, 31, sets)}
    got = both(hidden, weight, targets, fused=True, columns_per_chunk=7, **options)
    want = both(hidden, weight, targets, fused=False, **options)
    assert [x.dtype for x in got] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(got[:2], want[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[2:], want[2:], atol=1e-3, rtol=2e-2)


@pytest.mark.gpu
def test_tensor_cores_accumulate_in_fp32() -> None:
    hidden, weight, targets = (x.cuda() for x in case(300, 3000, 64, torch.bfloat16, scale=0.2))
    buffer = torch.zeros(3000, 64, device="cuda")
    h = hidden.detach().requires_grad_()
    logp, entropy = fused_logprob_entropy(h, weight.detach(), targets, temperature=0.8, weight_grad=buffer)
    (logp.sum() + entropy.sum()).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = token_logprob_entropy(exact[0] @ exact[1].t(), targets, temperature=0.8)
    (want[0].sum() + want[1].sum()).backward()
    torch.testing.assert_close((logp, entropy), (want[0].float(), want[1].float()), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(h.grad.double(), exact[0].grad, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(buffer.double(), exact[1].grad, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sets", SETS)
def test_the_weight_gradient_is_added_to_a_buffer(dtype: torch.dtype, sets: str) -> None:
    hidden, weight, targets = case(30, 40, 8, dtype)
    buffer = torch.ones(40, 8)
    ready: list[object] = []
    # What a data-parallel wrapper hangs on a parameter to learn that its gradient is there (Megatron's DDP).
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: ready.append(None))
    for part in (slice(0, 11), slice(11, 30)):  # two micro-batches add up
        candidates = recorded(targets, 40, sets)
        piece = hidden.detach()[part].clone().requires_grad_()
        logp, entropy = fused_logprob_entropy(
            piece,
            weight,
            targets[part],
            temperature=0.9,
            candidates=candidates and candidates.take(torch.arange(30)[part]),
            weight_grad=buffer,
        )
        (logp @ torch.arange(30.0)[part] + 2 * entropy.sum()).backward()
    assert weight.grad is None and len(ready) == 2
    exact = both(hidden.float(), weight.float(), targets, fused=False, temperature=0.9, candidates=candidates)
    torch.testing.assert_close(buffer - 1, exact[3], atol=1e-4, rtol=1e-4)


def test_a_frozen_head_and_a_frozen_trunk() -> None:
    hidden, weight, targets = case(12, 25, 4)
    want = both(hidden, weight, targets, fused=True, temperature=1.0)
    for frozen in (0, 1):
        inputs = [hidden.detach().clone(), weight.detach().clone()]
        inputs[1 - frozen].requires_grad_()
        logp, entropy = fused_logprob_entropy(inputs[0], inputs[1], targets, temperature=1.0)
        (logp @ torch.arange(12.0) + 2 * entropy.sum()).backward()
        assert inputs[frozen].grad is None
        torch.testing.assert_close(inputs[1 - frozen].grad, want[3 - frozen])


def test_entropy_as_a_metric_has_no_gradient() -> None:
    hidden, weight, targets = case(12, 25, 4)
    logp, entropy = fused_logprob_entropy(hidden, weight, targets, temperature=1.0, need_entropy_grad=False)
    assert logp.requires_grad and not entropy.requires_grad
    logp.sum().backward()
    other = hidden.detach().clone().requires_grad_()
    token_logprob_entropy(other @ weight.detach().t(), targets, temperature=1.0)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, other.grad)
    zero = fused_logprob_entropy(hidden, weight, targets, temperature=1.0, need_entropy=False)
    assert torch.allclose(zero[0], logp) and not zero[1].requires_grad and not zero[1].any()


class Largest(TorchDispatchMode):
    """The most elements that a newly made tensor had, views of others left out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += "addmm" in str(func)
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_logits_are_never_there() -> None:
    n, v, h, rows, columns = 96, 2000, 4, 32, 100
    hidden, weight, targets = case(n, v, h)
    buffer = torch.zeros(v, h)
    with Largest() as seen:
        logp, entropy = fused_logprob_entropy(
            hidden, weight, targets, temperature=0.9, weight_grad=buffer, rows_per_chunk=rows, columns_per_chunk=columns
        )
        (logp.sum() + entropy.sum()).backward()
    assert seen.products == 4 * (n // rows) * (v // columns)
    # The largest is the weight's own shape (the buffer, as ``addmm_`` returns it): far from n * v = 192,000.
    assert seen.elements <= max(2 * rows * columns, v * h)


@pytest.mark.slow
@pytest.mark.parametrize("h", [64, 33])
def test_a_row_does_not_depend_on_its_micro_batch(h: int) -> None:
    """verl 2996: log-probs changed with the micro-batch size. A row's bits are its own, on one thread and on two."""
    n, v = 75, 1500
    hidden, weight, targets = (x.detach() for x in case(n, v, h, scale=0.3))
    candidates = recorded(targets, v, "some rows")
    assert candidates is not None
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for sets in (None, candidates):
                options: dict[str, Any] = {"temperature": 0.9, "columns_per_chunk": 600}
                whole = fused_logprob_entropy(hidden, weight, targets, candidates=sets, **options)
                for rows in (torch.arange(n)[k : k + size] for size in (1, 5, 33) for k in (0, n - size)):
                    for chunk in (16, 1024):
                        part = fused_logprob_entropy(
                            hidden[rows],
                            weight,
                            targets[rows],
                            candidates=sets and sets.take(rows),
                            rows_per_chunk=chunk,
                            **options,
                        )
                        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])
    finally:
        torch.set_num_threads(before)


def test_huge_logits_and_rows_of_zero_stay_finite() -> None:
    hidden = torch.tensor([[1e4, 0.0], [0.0, 0.0], [-3e18, 1e18]], requires_grad=True)
    weight = torch.tensor([[1e19, 0.0], [-1.0, 1.0], [0.5, 2.0], [-1e19, 3.0]], requires_grad=True)
    logp, entropy = fused_logprob_entropy(hidden, weight, torch.tensor([0, 1, 3]), temperature=1.0, columns_per_chunk=1)
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all()
    assert float(logp[1].detach()) == pytest.approx(-1.3862944) == -float(entropy[1].detach())
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_no_tokens() -> None:
    hidden, weight, targets = case(0, 9, 4)
    buffer = torch.ones(9, 4)
    logp, entropy = fused_logprob_entropy(hidden, weight, targets, temperature=1.0, weight_grad=buffer)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and hidden.grad is not None and hidden.grad.shape == (0, 4)
    assert bool((buffer == 1).all()) and weight.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3)}, r"hidden \(2, 3\), weight \(5, 4\) and targets \(2,\): expected"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets \(3,\): expected"),
        ({"weight": torch.zeros(5, 4, dtype=torch.float64)}, "hidden is torch.float32 and weight torch.float64"),
        ({"weight_grad": torch.zeros(4, 5)}, r"weight_grad torch.float32 \(4, 5\): expected \(5, 4\)"),
        ({"targets": torch.tensor([0, 5])}, "targets span 0..5, outside the vocabulary of 5"),
        ({"vocab_size": 6}, "vocab_size 6: there are 5 columns"),
        ({"temperature": -1.0}, "temperature -1.0: must be above 0"),
        ({"rows_per_chunk": 0}, "chunks of 0 rows"),
        ({"candidates": CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))}, "row 0: token 0 was sampled"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(5, 4),
        "targets": torch.tensor([0, 2]),
        "temperature": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        fused_logprob_entropy(**{**arguments, **change})


CASES = [(sets, vocab_size, n) for sets in SETS for vocab_size, n in ((16, 7), (9, 7), (16, 0))]


def _split_case(sets: str, vocab_size: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A vocabulary of 9: the last rank of two (columns 8..) keeps one token, of four the last two keep none."""
    hidden, weight, targets = case(n, 16, 5)
    targets = targets % vocab_size
    candidates = recorded(targets, vocab_size, sets)
    options = {"temperature": 0.8, "vocab_size": vocab_size, "candidates": candidates, "columns_per_chunk": 3}
    return hidden, weight, targets, options


def on_this_rank() -> list[list[Any]]:
    """What a rank of the process group makes of its piece of each case; last the hidden gradient of its piece alone."""
    rank, world, results = dist.get_rank(), dist.get_world_size(), []
    for sets, vocab_size, n in CASES:
        hidden, weight, targets, options = _split_case(sets, vocab_size, n)
        options["group"] = dist.group.WORLD
        piece = weight.chunk(world)[rank]
        found = both(hidden, piece, targets, fused=True, **options)
        alone = both(hidden, piece, targets, fused=True, reduce_hidden_grad=False, **options)[2]
        results.append([tensor.detach().numpy() for tensor in (*found, alone)])
    return results


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks"), preload="megatron_ext.losses.fused_head") as ranks:
        yield ranks


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_split_over_ranks(world: int, pool: RankPool) -> None:
    ranks = pool.call("tests.losses.test_fused_head:on_this_rank", world=world)
    ranks = [[tuple(map(torch.from_numpy, found)) for found in rank] for rank in ranks]
    for index, (sets, vocab_size, n) in enumerate(CASES):
        hidden, weight, targets, options = _split_case(sets, vocab_size, n)
        want = both(hidden, weight, targets, fused=True, **options)
        close = {"atol": 1e-5, "rtol": 1e-5}
        for rank in ranks:
            torch.testing.assert_close(rank[index][:3], want[:3], **close)
        torch.testing.assert_close(torch.cat([rank[index][3] for rank in ranks]), want[3], **close)
        torch.testing.assert_close(sum(rank[index][4] for rank in ranks), want[2], **close)
        assert not want[3][vocab_size:].any()
