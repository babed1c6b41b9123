"""``losses/divergence.py`` against TRL and PyTorch on random distributions: values and gradients to 1e-6."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from megatron_ext.losses.divergence import Divergence, Kind, Tail

# TRL's beta: 0 is the forward KL, 1 the reverse, between them the weight of the teacher in the mixture.
ARMS = [(Kind.FORWARD, 0.5, 0.0), (Kind.REVERSE, 0.5, 1.0), (Kind.JSD, 0.5, 0.5), (Kind.JSD, 0.2, 0.2)]
arms = pytest.mark.parametrize(("kind", "beta", "trl_beta"), ARMS)


@pytest.fixture(scope="module")
def server_distillation() -> ModuleType:
    pytest.importorskip("trl")
    return pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")


@pytest.fixture(scope="module")
def gkd() -> ModuleType:
    pytest.importorskip("trl")
    return pytest.importorskip("trl.experimental.gkd.gkd_trainer")


def logits(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(40, 30, generator=generator, dtype=torch.float64)).requires_grad_()


def gradients(value: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value.sum(), student)[0]


@arms
@pytest.mark.parametrize("k", [1, 8])
def test_bucket_is_that_of_trl(
    server_distillation: ModuleType, kind: Kind, beta: float, trl_beta: float, k: int
) -> None:
    student, teacher = logits(0), torch.log_softmax(logits(1).detach(), -1)
    ids = teacher.topk(k).indices
    ours_s, theirs_s = (torch.log_softmax(student, -1).gather(1, ids) for _ in range(2))
    ours = Divergence(kind=kind, beta=beta)(ours_s, teacher.gather(1, ids)).value
    on = torch.ones_like(ids, dtype=torch.bool)
    full_s, support = server_distillation._add_tail_bucket(theirs_s, on)
    full_t, _ = server_distillation._add_tail_bucket(teacher.gather(1, ids), on)
    theirs = server_distillation._jsd_divergence(full_s, full_t, trl_beta, support).sum(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(ours, student), gradients(theirs, student), rtol=1e-6, atol=1e-6)


@arms
def test_whole_vocabulary_is_that_of_trl(gkd: ModuleType, kind: Kind, beta: float, trl_beta: float) -> None:
    student, teacher = logits(2), logits(3).detach()
    ours = Divergence(kind=kind, beta=beta, tail=Tail.NONE)(
        torch.log_softmax(student, -1), teacher.log_softmax(-1)
    ).value
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, beta=trl_beta, reduction="none").sum(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(ours, student), gradients(theirs, student), rtol=1e-6, atol=1e-6)


def test_whole_vocabulary_is_that_of_pytorch() -> None:
    student, teacher = logits(4), torch.log_softmax(logits(5).detach(), -1)
    log_s = torch.log_softmax(student, -1)
    for kind, pair in ((Kind.FORWARD, (log_s, teacher)), (Kind.REVERSE, (teacher, log_s))):
        ours = Divergence(kind=kind, tail=Tail.NONE)(log_s, teacher).value
        theirs = torch.nn.functional.kl_div(*pair, reduction="none", log_target=True).sum(-1)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(
            *(torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (ours, theirs)), rtol=1e-6, atol=1e-9
        )
