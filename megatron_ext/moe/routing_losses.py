"""Losses on router probabilities: experts that tell operations apart, and experts that last from token to token. Pure.

Source: arXiv 2610.07332 as summarised by third parties; the paper's exact forms are not published, those here are ours.

For one layer and one field (thinking, tool use) the mean probabilities ``P_u`` of the field's tokens in turn u describe
the turn. With ``P_o`` the mean of ``P_u`` over the n_o turns of operation o and ``P`` that over all n turns,

    I = sum_o n_o/n KL(P_o || P) = H(P) - sum_o n_o/n H(P_o)

is the mutual information of experts and operations, and the loss is -I. It is no sum over turns: a part of the batch
knows neither ``P_o`` nor ``P``. But ``dI/dP_u = log(P_o/P) / n``, so that the loss linearised around known statistics
is a sum over tokens, and since I is homogeneous of degree 1 its value there is I itself.

The token loss of a token whose experts are nearly those of the token before it is ``-log`` of its probability on them.

Invariants (``tests/moe/test_routing_losses.py``):

1. ``0 <= I <= min(H(O), log E)``; 0 where all operations share one distribution or only one occurs; the order of
   experts, turns and operations does not matter.
2. At the statistics the linearised loss has the value and the gradient of the exact one.
3. What an expert never got (probability 0) gives finite values and gradients.
4. The experts of the token before carry no gradient.
"""

from __future__ import annotations

from enum import StrEnum

import torch


class Pull(StrEnum):
    """Which tokens are drawn to the experts of the token before.

    ``selective``: where the two sets of experts are nearly the same (Jaccard distance below a threshold), so that real
    switches are left alone. ``all``: everywhere. ``off``: nowhere.
    """

    SELECTIVE = "selective"
    ALL = "all"
    OFF = "off"


def log_probabilities(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Log of the router's distribution over all experts, fp32 [n, E], from its ``logits`` [n, E].

    ``score_function`` softmax, or sigmoid, whose scores are divided by their sum (ours; the paper has softmax routers).
    Neither the choice of k experts nor an expert bias changes it.
    """
    if score_function == "softmax":
        return logits.float().log_softmax(dim=-1)
    if score_function == "sigmoid":
        scores = torch.nn.functional.logsigmoid(logits.float())
        return scores - scores.logsumexp(dim=-1, keepdim=True)
    raise ValueError(f"router score function {score_function!r}: routing losses know softmax and sigmoid")


def _log(values: torch.Tensor) -> torch.Tensor:
    """A logarithm that is finite at 0, where it is always multiplied by 0."""
    return values.clamp_min(torch.finfo(torch.float32).tiny).log()


def direction(sums: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """``log(P_o/P)`` [..., O, E]: n times the gradient of I with respect to ``P_u`` of a turn with operation o.

    ``sums`` [..., O, E] are the sums of ``P_u`` over the turns of each operation, ``turns`` [..., O] their numbers.
    0 for operations that do not occur.
    """
    turns = turns.to(sums.dtype)
    each = sums / turns.clamp_min(1).unsqueeze(-1)
    whole = sums.sum(-2, keepdim=True) / turns.sum(-1).clamp_min(1)[..., None, None]
    return torch.where(turns.unsqueeze(-1) > 0, _log(each) - _log(whole), torch.zeros_like(each))


def mutual_information(sums: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """I in nats [...], exactly, with its gradient; ``sums`` and ``turns`` as in ``direction``. 0 without turns."""
    total = turns.sum(-1).clamp_min(1).to(sums.dtype)
    return (direction(sums, turns) * sums).sum((-1, -2)) / total


def linearised(sums: torch.Tensor, turns: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """I [...] of ``sums`` in the linearisation around the statistics ``at`` of the same turns."""
    total = turns.sum(-1).clamp_min(1).to(sums.dtype)
    return (direction(at, turns) * sums).sum((-1, -2)) / total


def jaccard(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Jaccard index [n] of two sets of experts a token, bool [n, E]; 1 for two empty sets."""
    union = (a | b).sum(-1)
    return torch.where(union > 0, (a & b).sum(-1) / union.clamp_min(1), 1.0)


def pulled(before: torch.Tensor, now: torch.Tensor, pull: Pull | str, threshold: float) -> torch.Tensor:
    """bool [n]: the pairs of adjacent tokens with a token loss, from their experts, bool [n, E] each."""
    if pull == Pull.OFF:
        return torch.zeros(len(now), dtype=torch.bool, device=now.device)
    if pull == Pull.ALL:
        return torch.ones(len(now), dtype=torch.bool, device=now.device)
    # One correctly rounded fp64 quotient: a distance of 2/5 is the 0.4 of a threshold's text, and so not below it.
    union = (before | now).sum(-1).double()
    apart = union - (before & now).sum(-1)
    return apart / union.clamp_min(1) < threshold


def consistency(log_p: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Token loss [n]: ``-log`` of the probability (``log_p`` [n, E]) on the experts ``before``, bool [n, E]."""
    return -log_p.masked_fill(~before, -torch.inf).logsumexp(dim=-1)
