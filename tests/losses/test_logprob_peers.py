"""Log-prob and entropy, from logits and fused with the head, against verl, TRL and Megatron-Core on random inputs.

Values agree to 1e-6, gradients to 1e-6 of their norm; peers that compute in the inputs' precision get fp64.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from launch.benches._ranks import RankPool
from megatron_ext.losses.fused_head import fused_logprob_entropy
from megatron_ext.losses.logprob import token_logprob_entropy

Outputs = tuple[torch.Tensor, torch.Tensor]
N, V, H = 24, 130, 12


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    module: ModuleType = pytest.importorskip("verl.utils.torch_functional")
    return module


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    module: ModuleType = pytest.importorskip("trl.trainer.utils")
    return module


def head(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(hidden, weight, targets)``."""
    rng = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, H, generator=rng, dtype=dtype) * 0.8 for rows in (N, V))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (N,), generator=rng)


def gradients(outputs: Outputs, inputs: list[torch.Tensor], entropy: bool = True) -> list[torch.Tensor]:
    """Of a random mixture of both outputs."""
    rng = torch.Generator().manual_seed(2)
    upstream = [torch.randn(N, generator=rng).to(output.dtype) for output in outputs]
    kept = 2 if entropy else 1
    return list(torch.autograd.grad(outputs[:kept], inputs, upstream[:kept]))


def agree(got: Outputs | torch.Tensor, want: Outputs | torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def gradients_agree(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert float((mine - theirs).norm()) <= tolerance * float(theirs.norm())


def test_verl_from_logits(verl: ModuleType) -> None:
    hidden, weight, targets = head()
    logits = (hidden @ weight.t()).detach().requires_grad_()
    ours = token_logprob_entropy(logits, targets, temperature=1.0)
    theirs = verl.logprobs_from_logits_v2(logits, targets), verl.entropy_from_logits(logits)
    agree(ours, theirs)
    agree(verl.logprobs_from_logits_naive(logits, targets), ours[0])
    chunked = verl.entropy_from_logits_with_chunking(logits, chunk_size=7)  # in fp32, with what it cancels lost
    torch.testing.assert_close(chunked.double(), ours[1], atol=1e-5, rtol=1e-5)
    gradients_agree(gradients(ours, [logits]), gradients(theirs, [logits]))


def test_verl_fused_with_the_head(verl: ModuleType) -> None:
    peer = pytest.importorskip("verl.utils.experimental.torch_functional")
    hidden, weight, targets = head(torch.float32)
    ours = fused_logprob_entropy(hidden, weight, targets, temperature=0.7, columns_per_chunk=50)
    logp, entropy = peer.FusedLinearForPPOFunction.apply(hidden, weight, targets, 0.7, 10)
    agree(ours[0], logp)
    # Theirs subtracts two large numbers in fp32; ours is the one that fp64 confirms.
    torch.testing.assert_close(ours[1], entropy, atol=1e-5, rtol=1e-5)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = fused_logprob_entropy(wide[0], wide[1], targets, temperature=0.7)
    agree(ours, (exact[0].float(), exact[1].float()))
    mine = gradients(ours, [hidden, weight])
    gradients_agree(mine, gradients((logp, entropy), [hidden, weight]), 1e-5)
    gradients_agree(mine, gradients(exact, wide))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_trl(trl: ModuleType, temperature: float, entropy: bool, fused: bool) -> None:
    hidden, weight, targets = head()
    theirs = trl.selective_log_softmax_and_entropy(hidden @ weight.t(), targets, entropy, temperature=temperature)
    if fused:
        ours = fused_logprob_entropy(
            hidden, weight, targets, temperature=temperature, need_entropy_grad=entropy, columns_per_chunk=50
        )
    else:
        ours = token_logprob_entropy(hidden @ weight.t(), targets, temperature=temperature, need_entropy_grad=entropy)
    agree(ours, theirs)
    gradients_agree(gradients(ours, [hidden, weight], entropy), gradients(theirs, [hidden, weight], entropy))


def on_this_rank() -> None:
    """The comparison on one of two ranks; a disagreement is an error there."""
    from megatron_ext.models import cpu_platform

    cpu_platform.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from verl.utils.megatron import tensor_parallel as peer

    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, targets = head()
    piece = weight.detach().chunk(2)[rank].clone().requires_grad_()
    logits = (hidden @ piece.t()).detach().requires_grad_()
    ours = token_logprob_entropy(logits, targets, temperature=1.0, group=group)
    mine = gradients(ours, [logits])
    # The peers write into what they are given, so they get logits of their own.
    other = logits.detach().clone().requires_grad_()
    agree(-vocab_parallel_cross_entropy(other.clone(), targets, tp_group=group).double(), ours[0])
    logp = peer.vocab_parallel_log_probs_from_logits(other.clone(), targets).double()  # fp32 whatever it is given
    theirs = logp, peer.vocab_parallel_entropy(other)
    agree(ours, theirs)
    wanted = gradients(theirs, [other])
    gradients_agree(mine, wanted)

    fused = fused_logprob_entropy(hidden, piece, targets, temperature=1.0, group=group, columns_per_chunk=50)
    agree(fused, theirs)
    of_hidden = wanted[0] @ piece.detach()
    dist.all_reduce(of_hidden, group=group)
    gradients_agree(gradients(fused, [hidden, piece]), [of_hidden, wanted[0].t() @ hidden.detach()])
    parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_vocabulary_parallel_peers(tmp_path: Path, verl: ModuleType) -> None:
    """Megatron-Core's vocabulary-parallel cross entropy and verl's entropy beside it, on two ranks."""
    with RankPool(2, tmp_path, preload="megatron_ext.losses.fused_head") as pool:
        pool.call("tests.losses.test_logprob_peers:on_this_rank", world=2)
