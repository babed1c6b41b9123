"""Divergence between two next-token distributions known on a few ids: top-k log-probs and one bucket for the rest.

Invariants (``tests/losses/test_divergence.py`` asserts each):

1. Equal distributions give exactly 0 and a gradient of exactly 0 (``tail='skill05'`` apart, by its own formula).
2. No value is negative; each outcome's own contribution is already >= 0.
3. With the bucket the value never exceeds the divergence of the whole vocabulary, and equals it where the distributions
   are proportional outside the chosen ids.
4. Values and gradients are those of the formula (checked in fp64), finite for log-probs of -inf and for a tail without
   mass.

Log-probs come normalised over the whole vocabulary and gathered at the chosen ids; a vocabulary that is split over
tensor-parallel ranks is therefore done with before this file. Gradients flow to whichever side requires them: detach
the one that is the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch


class Kind(StrEnum):
    FORWARD = "forward"  # KL(teacher || student): covers what the teacher does
    REVERSE = "reverse"  # KL(student || teacher): keeps to what the teacher does
    JSD = "jsd"


class Tail(StrEnum):
    BUCKET = "bucket"  # all ids that were not chosen are one more outcome
    NONE = "none"  # the chosen ids are the whole vocabulary
    SKILL05 = "skill05"  # both renormalised on the ids, and a charge for the student's mass elsewhere


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One divergence per position, in nats.

    ``kind``: ``forward`` KL(T || S), ``reverse`` KL(S || T), or ``jsd``: ``beta KL(T || M) + (1 - beta) KL(S || M)``
    with ``M = beta T + (1 - beta) S`` (GKD, Agarwal et al. 2024, eq. 1). ``beta``: weight of the teacher, inside 0..1.

    ``tail``: ``bucket`` compares k + 1 outcomes. ``skill05`` reproduces the published code of Skill0.5, for ``jsd`` at
    ``beta`` 0.5: JSD of the two renormalised to the ids, plus ``ln 2 / 2`` times the student's mass off them. Its value
    for equal distributions is that charge, not 0.

    ``floor``: log-probs below it count as it, and get no gradient. It keeps a token that one side excludes altogether
    (-inf) from making a KL infinite.
    """

    kind: Kind = Kind.REVERSE
    tail: Tail = Tail.BUCKET
    beta: float = 0.5
    floor: float = -80.0

    def __post_init__(self) -> None:
        for name, choices in (("kind", Kind), ("tail", Tail)):
            value = getattr(self, name)
            if value not in list(choices):
                raise ValueError(f"{name} {value!r}: must be one of {', '.join(choices)}")
            object.__setattr__(self, name, choices(value))
        if not 0 < self.beta < 1:
            raise ValueError(f"beta {self.beta}: must lie inside 0..1 (at the ends use kind forward or reverse)")
        if not -87.0 <= self.floor < 0:
            raise ValueError(f"floor {self.floor}: must lie in -87..0, where its exponent is a normal float32")
        if self.tail is Tail.SKILL05 and (self.kind is not Kind.JSD or self.beta != 0.5):
            raise ValueError(f"tail skill05 is defined for kind jsd at beta 0.5, not for {self.kind} at {self.beta}")

    def __call__(
        self, student_logp: torch.Tensor, teacher_logp: torch.Tensor, present: torch.Tensor | None = None
    ) -> DivergenceOutput:
        """Args:
            student_logp, teacher_logp: [n, k], log-probs of the same k ids, normalised over the whole vocabulary. The
                ids are the teacher's top k, the student's own, or both (``union_ids``).
            present: bool [n, k]; an entry that is not present is left out, its mass is in the tail. None = all.

        Raises:
            ValueError: shapes that disagree, or log-probs that are not floating point.
        """
        if student_logp.ndim != 2 or student_logp.shape != teacher_logp.shape:
            shapes = f"student {tuple(student_logp.shape)}, teacher {tuple(teacher_logp.shape)}"
            raise ValueError(f"{shapes}: both must be [n, k], at the same ids")
        if present is not None and (present.shape != student_logp.shape or present.dtype != torch.bool):
            raise ValueError(
                f"present {present.dtype} {tuple(present.shape)}: bool {tuple(student_logp.shape)} expected"
            )
        if not (student_logp.is_floating_point() and teacher_logp.is_floating_point()):
            raise ValueError(f"log-probs are {student_logp.dtype} and {teacher_logp.dtype}: must be floating point")
        dtype = torch.promote_types(torch.promote_types(student_logp.dtype, teacher_logp.dtype), torch.float32)
        student, teacher = student_logp.to(dtype), teacher_logp.to(dtype)
        on = torch.ones_like(student, dtype=torch.bool) if present is None else present
        # An entry that neither side can produce is as good as absent.
        floored = ((student < self.floor) != (teacher < self.floor)) & on
        student, teacher = (torch.where(on, x.clamp_min(self.floor), self.floor) for x in (student, teacher))
        student_mass, teacher_mass = (torch.logsumexp(x, dim=-1, keepdim=True) for x in (student, teacher))
        if self.tail is Tail.BUCKET:
            student = torch.cat([student, log_rest(student_mass)], dim=-1)
            teacher = torch.cat([teacher, log_rest(teacher_mass)], dim=-1)
        elif self.tail is Tail.SKILL05:
            student, teacher = student - student_mass, teacher - teacher_mass
        value: torch.Tensor = _Outcomes.apply(student, teacher, self.kind, self.beta).sum(dim=-1)
        rest = (1 - mass.exp().squeeze(-1) for mass in (student_mass, teacher_mass))
        student_rest, teacher_rest = (x.clamp_min(0.0) for x in rest)
        if self.tail is Tail.SKILL05:
            value = value + 0.5 * math.log(2) * student_rest
        return DivergenceOutput(value, student_rest.detach(), teacher_rest.detach(), floored.sum(dim=-1))


@dataclass(frozen=True)
class DivergenceOutput:
    """``value`` [n], nats, with gradient. For metrics, without: ``student_tail`` and ``teacher_tail`` [n], mass off the
    chosen ids; ``floored`` int64 [n], ids that one side alone holds to be impossible (below the floor)."""

    value: torch.Tensor
    student_tail: torch.Tensor
    teacher_tail: torch.Tensor
    floored: torch.Tensor


def log_rest(log_mass: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(log_mass))`` without cancellation, for ``log_mass`` <= 0 up to rounding.

    A rest below the resolution of 1 - p cannot be told from 0 and counts as that resolution, without gradient.
    """
    smallest = torch.finfo(log_mass.dtype).eps
    # Near 0 the difference is formed by expm1, far from it by log1p; each branch sees only arguments that it can take.
    near = log_mass > -math.log(2)
    rest = -torch.expm1(torch.where(near, log_mass, -math.log(2)))
    far = torch.log1p(-torch.exp(torch.where(near, -math.log(2), log_mass)))
    return torch.where(near, torch.log(rest.clamp_min(smallest)), far)


def union_ids(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, k] and [n, m] side by side, [n, k + m], and bool [n, k + m]: False where ``second`` repeats ``first``."""
    again = (second.unsqueeze(-1) == first.unsqueeze(-2)).any(dim=-1)
    return torch.cat([first, second], dim=-1), torch.cat([torch.ones_like(first, dtype=torch.bool), ~again], dim=-1)


class _Outcomes(torch.autograd.Function):
    """Contribution of each outcome, [n, m], of log-probs s and t.

    The KLs carry ``S - T`` (or ``T - S``) along, which adds up to 0 over a complete set of outcomes and makes each
    contribution >= 0 by itself: with u = s - t these are ``T (e^u - 1 - u)`` and ``S (e^-u - 1 + u)``. Their derivative
    by s, and that of JSD, is S times a factor that is exactly 0 at u = 0:

        forward  1 - T / S        reverse  log(S / T)        jsd  (1 - beta) log(S / M)

    and by t the same with the two exchanged.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        student: torch.Tensor,
        teacher: torch.Tensor,
        kind: Kind,
        beta: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(student, teacher)
        ctx.kind, ctx.beta = kind, beta
        u = student - teacher
        if kind is Kind.FORWARD:
            value = teacher.exp() * (torch.expm1(u) - u)
        elif kind is Kind.REVERSE:
            value = student.exp() * (torch.expm1(-u) + u)
        else:
            over_student, over_teacher = _log_mixture(u, beta)
            value = -beta * teacher.exp() * over_teacher - (1 - beta) * student.exp() * over_student
        return value.clamp_min(0.0)  # rounding around u = 0

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        student, teacher = ctx.saved_tensors
        kind, beta = ctx.kind, ctx.beta
        u = student - teacher
        to_student = to_teacher = None
        if kind is Kind.JSD:
            over_student, over_teacher = _log_mixture(u, beta)
            by_student, by_teacher = -(1 - beta) * over_student, -beta * over_teacher
        elif kind is Kind.FORWARD:
            by_student, by_teacher = -torch.expm1(-u), -u
        else:
            by_student, by_teacher = u, -torch.expm1(u)
        if ctx.needs_input_grad[0]:
            to_student = grad * student.exp() * by_student
        if ctx.needs_input_grad[1]:
            to_teacher = grad * teacher.exp() * by_teacher
        return to_student, to_teacher, None, None


def _log_mixture(u: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``log(M / S)`` and ``log(M / T)`` for u = log(S / T)."""
    return torch.log1p(beta * torch.expm1(-u)), torch.log1p((1 - beta) * torch.expm1(u))
