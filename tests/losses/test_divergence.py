"""Invariants 1-4 of ``losses/divergence.py`` and the specifications' numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.losses.divergence import Divergence, Kind, Tail, log_rest, union_ids

EVERY_KIND = [(Kind.FORWARD, 0.5), (Kind.REVERSE, 0.5), (Kind.JSD, 0.5), (Kind.JSD, 0.1), (Kind.JSD, 0.9)]
kinds = pytest.mark.parametrize(("kind", "beta"), EVERY_KIND)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def log_probs(seed: int, rows: int, vocab: int, sharpness: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(sharpness * torch.randn(rows, vocab, generator=generator, dtype=torch.float64), dim=-1)


def exact(kind: Kind, beta: float, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """From the definition, over complete distributions with mass everywhere."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum(-1)

    s, t = student.exp(), teacher.exp()
    if kind is Kind.FORWARD:
        return kl(t, s)
    if kind is Kind.REVERSE:
        return kl(s, t)
    mixture = beta * t + (1 - beta) * s
    return beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_numbers_of_skill05() -> None:
    teacher, student = logs(0.5, 0.3, 0.15, 0.05), logs(0.25, 0.25, 0.25, 0.25)
    published = Divergence(kind=Kind.JSD, tail=Tail.SKILL05)
    out = published(student[:, :2], teacher[:, :2])
    assert out.value.item() == pytest.approx(0.181246, abs=5e-7)
    assert out.value.item() - 0.5 * math.log(2) * out.student_tail.item() == pytest.approx(0.007959, abs=5e-7)
    assert Divergence(kind=Kind.JSD, tail=Tail.NONE)(student, teacher).value.item() == pytest.approx(0.06508, abs=5e-6)


def test_trap_of_skill05_equal_distributions_are_not_zero() -> None:
    same = logs(0.5, 0.3)  # mass .2 off the ids
    assert Divergence(kind=Kind.JSD, tail=Tail.SKILL05)(same, same).value.item() == pytest.approx(0.069315, abs=5e-7)
    assert Divergence(kind=Kind.JSD, tail=Tail.BUCKET)(same, same).value.item() == 0.0


def test_numbers_of_latent_opsd() -> None:
    teacher, student = logs(0.5, 0.3), logs(0.4, 0.2)
    reverse = Divergence(kind=Kind.REVERSE)
    assert reverse(student, teacher).value.item() == pytest.approx(0.106908, abs=5e-7)
    assert reverse(teacher, teacher).value.item() == 0.0


@kinds
@dtypes
@pytest.mark.parametrize("tail", [Tail.BUCKET, Tail.NONE])
@pytest.mark.parametrize("k", [1, 5, 32])
def test_equal_distributions_have_neither_value_nor_gradient(
    kind: Kind, beta: float, dtype: torch.dtype, tail: Tail, k: int
) -> None:  # invariant 1
    teacher = log_probs(0, 64, 32).topk(k).values.to(dtype)
    student, target = teacher.clone().requires_grad_(), teacher.clone().requires_grad_()
    out = Divergence(kind=kind, beta=beta, tail=tail)(student, target)
    out.value.sum().backward()
    assert student.grad is not None and target.grad is not None
    assert not out.value.any() and not student.grad.any() and not target.grad.any()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(EVERY_KIND),
    st.integers(1, 12),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 1e-4, 0.1, 3.0, 40.0]),
)
def test_never_negative_and_never_above_the_whole(
    seed: int, kind: tuple[Kind, float], k: int, dtype: torch.dtype, apart: float
) -> None:  # invariants 2 and 3
    teacher = log_probs(seed, 8, 12)
    student = torch.log_softmax(teacher + apart * log_probs(seed + 1, 8, 12, 1.0), dim=-1)
    ids = teacher.topk(k).indices
    divergence = Divergence(kind=kind[0], beta=kind[1])
    got = divergence(student.gather(1, ids).to(dtype), teacher.gather(1, ids).to(dtype)).value
    whole = exact(*kind, student, teacher)
    assert torch.all(got >= 0) and torch.isfinite(got).all()
    slack = torch.full_like(whole, 1e-10)
    if dtype is torch.float32:
        # A tail is one minus a sum near one: fp32 is off by two steps of one, which for a tail of that size is much of
        # it, and the divergence holds the log of the tails' ratio.
        tails = [(1 - logp.gather(1, ids).exp().sum(-1)).clamp_min(1e-12) for logp in (student, teacher)]
        off = 2 * torch.finfo(dtype).eps
        slack = 1e-4 + 1e-4 * whole + sum(a * torch.log1p(off / b) for a, b in (tails, tails[::-1]))
    assert torch.all(got <= whole + slack)


@kinds
def test_the_bucket_is_exact_where_the_tails_are_proportional(kind: Kind, beta: float) -> None:  # invariant 3
    head, tail = log_probs(1, 6, 4), log_probs(2, 6, 20)
    shares = torch.tensor([[0.3], [0.6]], dtype=torch.float64).log()
    both = [
        torch.cat([head[order] + share, tail + torch.log1p(-share.exp())], -1)
        for order, share in zip((torch.arange(6), torch.arange(5, -1, -1)), shares, strict=True)
    ]
    got = Divergence(kind=kind, beta=beta)(both[0][:, :4], both[1][:, :4])
    torch.testing.assert_close(got.value, exact(kind, beta, *both), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.student_tail, torch.full((6,), 0.7, dtype=torch.float64))
    torch.testing.assert_close(got.teacher_tail, torch.full((6,), 0.4, dtype=torch.float64))


@kinds
def test_the_whole_vocabulary_is_exact(kind: Kind, beta: float) -> None:
    student, teacher = log_probs(3, 9, 16), log_probs(4, 9, 16)
    expected = exact(kind, beta, student, teacher)
    for tail, tolerance in ((Tail.NONE, 1e-12), (Tail.BUCKET, 1e-9)):  # k = V: a bucket without mass
        got = Divergence(kind=kind, beta=beta, tail=tail)(student, teacher)
        torch.testing.assert_close(got.value, expected, rtol=tolerance, atol=tolerance)
    narrow = Divergence(kind=kind, beta=beta)(student.float(), teacher.float())
    torch.testing.assert_close(narrow.value.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "beta", "tail"),
    [*((*kind, tail) for kind in EVERY_KIND for tail in (Tail.BUCKET, Tail.NONE)), (Kind.JSD, 0.5, Tail.SKILL05)],
)
def test_gradients_of_both_sides(kind: Kind, beta: float, tail: Tail) -> None:  # invariant 4
    divergence = Divergence(kind=kind, beta=beta, tail=tail)
    # A vocabulary of 9 behind the chosen 4, so that the gradient reaches the ids that were not chosen too.
    logits = [log_probs(seed, 5, 9, 1.5).requires_grad_() for seed in (5, 6)]
    ids = logits[1].topk(4).indices

    def value(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        chosen = (torch.log_softmax(x, dim=-1).gather(1, ids) for x in (student, teacher))
        return divergence(*chosen).value

    assert torch.autograd.gradcheck(value, tuple(logits))


@kinds
def test_gradient_of_the_whole_vocabulary_is_that_of_the_definition(kind: Kind, beta: float) -> None:
    teacher, logits = log_probs(7, 5, 11), log_probs(8, 5, 11).requires_grad_()
    ours = Divergence(kind=kind, beta=beta, tail=Tail.NONE)(torch.log_softmax(logits, -1), teacher).value.sum()
    plain = exact(kind, beta, torch.log_softmax(logits, -1), teacher).sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (ours, plain)), rtol=1e-9, atol=1e-12)


@kinds
@dtypes
def test_impossible_tokens_are_finite_and_counted(kind: Kind, beta: float, dtype: torch.dtype) -> None:  # invariant 4
    never = -math.inf
    student = torch.tensor([[-0.5, never, -3], [-0.5, -2, never], [never] * 3, [0, never, never]], dtype=dtype)
    teacher = torch.tensor([[-0.5, -2, never], [-0.5, -2, never], [-1, -2, -3], [never, 0, never]], dtype=dtype)
    student.requires_grad_()
    teacher.requires_grad_()
    out = Divergence(kind=kind, beta=beta)(student, teacher)
    out.value.sum().backward()
    assert student.grad is not None and teacher.grad is not None
    for x in (out.value, student.grad, teacher.grad):
        assert torch.isfinite(x).all()
    assert not student.grad[student.isinf()].any() and not teacher.grad[teacher.isinf()].any()
    assert out.floored.tolist() == [2, 0, 3, 2]
    assert out.value[1] == 0 and torch.all(out.value[[0, 2, 3]] > 0)
    if kind is Kind.JSD and beta == 0.5:
        assert out.value[3].item() == pytest.approx(math.log(2), abs=1e-5)  # disjoint: as far apart as can be


@kinds
@dtypes
def test_a_tail_without_mass(kind: Kind, beta: float, dtype: torch.dtype) -> None:  # the teacher is sure
    sure = torch.tensor([[0.0, -30.0], [-1e-9, -25.0]], dtype=dtype)
    student = torch.tensor([[-0.1, -4.0], [-0.1, -4.0]], dtype=dtype, requires_grad=True)
    out = Divergence(kind=kind, beta=beta)(student, sure)
    out.value.sum().backward()
    assert student.grad is not None and torch.isfinite(student.grad).all() and torch.all(out.value > 0)
    if kind is Kind.FORWARD:
        torch.testing.assert_close(out.value, torch.full((2,), 0.1, dtype=dtype), rtol=1e-4, atol=1e-5)
    same = Divergence(kind=kind, beta=beta)(sure, sure)
    assert not same.value.any() and not same.teacher_tail[0]


@dtypes
def test_log_rest(dtype: torch.dtype) -> None:
    mass = torch.tensor([-1e-3, -0.5, -0.7, -3.0, -50.0, -math.inf], dtype=dtype)
    expected = torch.tensor([math.log(-math.expm1(x)) if x > -9 else -math.exp(x) for x in mass.tolist()], dtype=dtype)
    torch.testing.assert_close(log_rest(mass), expected, rtol=1e-5, atol=0)
    full = torch.tensor([0.0, 1e-7], dtype=dtype, requires_grad=True)
    log_rest(full).sum().backward()
    assert full.grad is not None and not full.grad.any()
    assert log_rest(full).exp().tolist() == pytest.approx([torch.finfo(dtype).eps] * 2)


def test_union_of_two_supports() -> None:
    student, teacher = log_probs(9, 7, 20), log_probs(10, 7, 20)
    theirs, ours = teacher.topk(4).indices, student.topk(3).indices
    ids, present = union_ids(theirs, ours)
    for row, here in zip(ids, present, strict=True):
        chosen = row[here].tolist()
        assert len(set(chosen)) == len(chosen) and set(chosen) == set(row.tolist())
    chosen_student, chosen_teacher = student.gather(1, ids).requires_grad_(), teacher.gather(1, ids)
    for kind in Kind:
        divergence = Divergence(kind=kind)
        out = divergence(chosen_student, chosen_teacher, present)
        for i, here in enumerate(present):
            alone = divergence(chosen_student[i : i + 1, here], chosen_teacher[i : i + 1, here])
            torch.testing.assert_close(out.value[i : i + 1], alone.value)
        grad = torch.autograd.grad(out.value.sum(), chosen_student)[0]
        assert not grad[~present].any() and grad[present].all()


def test_absent_entries_may_hold_anything() -> None:
    student = torch.tensor([[-1.0, math.nan], [-1.0, math.inf]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-2.0, math.nan], [-2.0, 7.0]], dtype=torch.float64)
    present = torch.tensor([[True, False], [True, False]])
    for kind in Kind:
        out = Divergence(kind=kind)(student, teacher, present)
        torch.testing.assert_close(out.value, Divergence(kind=kind)(student[:, :1], teacher[:, :1]).value)
        grad = torch.autograd.grad(out.value.sum(), student)[0]
        assert torch.isfinite(grad).all() and not grad[:, 1].any()


def test_kinds_are_each_other_s_mirror() -> None:
    a, b = log_probs(11, 5, 6)[:, :4], log_probs(12, 5, 6)[:, :4]
    pairs = [
        (Divergence(kind=Kind.FORWARD)(a, b), Divergence(kind=Kind.REVERSE)(b, a)),
        (Divergence(kind=Kind.JSD, beta=0.3)(a, b), Divergence(kind=Kind.JSD, beta=0.7)(b, a)),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one.value, other.value)


def test_narrow_and_mixed_precision_are_widened() -> None:
    a, b = log_probs(13, 4, 8)[:, :3].bfloat16(), log_probs(14, 4, 8)[:, :3].float()
    assert Divergence()(a, a).value.dtype == torch.float32
    assert Divergence()(a, b).value.dtype == torch.float32


def test_no_rows() -> None:
    empty = torch.zeros(0, 4, requires_grad=True)
    out = Divergence()(empty, empty)
    out.value.sum().backward()
    assert out.value.shape == (0,) and out.floored.shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "k1"}, "kind 'k1': must be one of forward, reverse, jsd"),
        ({"tail": "cut"}, "tail 'cut'"),
        ({"beta": 0.0}, "beta 0.0"),
        ({"floor": -100.0}, "floor -100.0"),
        ({"tail": "skill05"}, "tail skill05 is defined for kind jsd"),
        ({"tail": "skill05", "kind": "jsd", "beta": 0.4}, "not for jsd at 0.4"),
    ],
)
def test_settings_that_cannot_be_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Divergence(**values)


def test_tensors_that_cannot_be_are_named() -> None:
    x = torch.zeros(2, 3)
    for bad, message in (
        ((x, x[:, :2]), r"student \(2, 3\), teacher \(2, 2\)"),
        ((x[0], x[0]), r"must be \[n, k\]"),
        ((x, x, torch.ones(2, 3)), "present torch.float32"),
        ((x.long(), x), "floating point"),
    ):
        with pytest.raises(ValueError, match=message):
            Divergence()(*bad)


def test_every_combination_is_one_number_a_position() -> None:
    a, b = log_probs(15, 3, 8).float()[:, :5], log_probs(16, 3, 8).float()[:, :5]
    for kind, tail in itertools.product(Kind, Tail):
        if tail is not Tail.SKILL05 or kind is Kind.JSD:
            out = Divergence(kind=kind, tail=tail)(a, b)
            assert out.value.shape == out.student_tail.shape == out.teacher_tail.shape == out.floored.shape == (3,)
