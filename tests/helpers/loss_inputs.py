"""Inputs for loss terms, and what a term makes of them as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from megatron_ext.losses.protocol import LossInputs, LossOutput, LossTerm


def inputs_of(n: int = 40, seed: int = 0, *, spread: float = 0.3, dtype: torch.dtype = torch.float32) -> LossInputs:
    """Random inputs in rows of 8 and turns of 4 tokens (as far as n goes); 3 of 10 tokens have weight 0."""
    rng = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(n, generator=rng, dtype=dtype)

    def uniform() -> torch.Tensor:
        return torch.rand(n, generator=rng, dtype=dtype)

    base = -uniform() * 3
    return LossInputs(
        cur_logp=(base + spread * normal()).requires_grad_(),
        old_logp=base,
        rollout_logp=base + spread / 2 * normal(),
        advantage=normal(),
        weight=uniform() * (uniform() < 0.7) / n,
        entropy=uniform().requires_grad_(),
        row=torch.arange(n) // 8,
        turn=torch.arange(n) // 4,
        ref_logp=base + 0.2 * normal(),
    )


def take(inputs: LossInputs, index: torch.Tensor) -> LossInputs:
    """The tokens ``index``, in that order."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return LossInputs(**{name: None if value is None else value[index] for name, value in values.items()})


def flat(
    cur: list[float],
    old: list[float] | None = None,
    advantage: list[float] | None = None,
    *,
    weight: list[float] | None = None,
    rollout: list[float] | None = None,
    ref: list[float] | None = None,
    turn: list[int] | None = None,
    row: list[int] | None = None,
) -> LossInputs:
    """Float64 inputs written out; by default old 0, rollout = old, advantage 1, weights that sum to 1, one turn."""
    n = len(cur)

    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    old = [0.0] * n if old is None else old
    return LossInputs(
        cur_logp=tensor(cur),
        old_logp=tensor(old),
        rollout_logp=tensor(old if rollout is None else rollout),
        advantage=tensor([1.0] * n if advantage is None else advantage),
        weight=tensor([1 / n] * n if weight is None else weight),
        entropy=tensor([0.5] * n),
        row=torch.tensor([0] * n if row is None else row),
        turn=torch.tensor([0] * n if turn is None else turn),
        ref_logp=None if ref is None else tensor(ref),
    )


@dataclass(frozen=True, eq=False)
class Result:
    """``grad`` [n] with respect to the current log-probs, ``entropy_grad`` [n]; metrics as (numerator, denominator)."""

    loss: float
    grad: torch.Tensor
    entropy_grad: torch.Tensor
    metrics: dict[str, tuple[float, float]]

    def mean(self, name: str) -> float:
        numerator, denominator = self.metrics[name]
        return numerator / denominator


def run(term: LossTerm, inputs: LossInputs) -> Result:
    """Loss, gradients and metrics of a term, as numbers."""
    cur, entropy = (x.detach().clone().requires_grad_() for x in (inputs.cur_logp, inputs.entropy))
    out: LossOutput = term(replace(inputs, cur_logp=cur, entropy=entropy))
    assert out.loss.ndim == 0
    out.loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (cur, entropy)]
    metrics = {name: (float(a), float(b)) for name, (a, b) in out.metrics.items()}
    return Result(float(out.loss.detach()), grads[0], grads[1], metrics)
