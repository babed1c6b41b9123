"""Credit of a step over all data-parallel ranks: the edits' scoring forwards, then the pipeline.

Invariants (``tests/training/test_credit_step.py``, ``tests/integration/test_torchrun.py``):

1. Each rank scores the requests about its own groups; how many ranks share the step changes no reply.
2. All edits' requests are one plan: what two of them ask is run once.
3. What fails on one rank alone fails on all of them, with that rank's message: no rank waits for one that has given up.
4. Nothing is asked and nothing is run when no edit asks.
5. A step of which no turn has a state key is refused where an edit compares states, before anything is trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.pipeline import Pipeline, Reduction, by_edit, combine, flat, open_view
from megatron_ext.credit.protocol import CreditError, CreditView, Stat
from megatron_ext.credit.score_plan import CURRENT, ScorePlan, ScoreWeights, plan_scores
from megatron_ext.credit.scoring import ScoreReply
from megatron_ext.training.ranks.ranks import Gather, alone
from megatron_ext.trajectory.record import TrajectoryBatch

T = TypeVar("T")
REFERENCE = "reference"
RunPlan = Callable[[ScorePlan], Sequence[ScoreReply]]


class RankError(CreditError):
    """Another data-parallel rank could not assign credit; the message is that rank's."""


@dataclass(frozen=True)
class _Failed:
    """What a rank that gives up tells the others in place of what they wait for."""

    message: str


def _told(values: Sequence[Any]) -> list[Any]:
    for rank, value in enumerate(values):
        if isinstance(value, _Failed):
            raise RankError(f"data-parallel rank {rank}: {value.message}")
    return list(values)


def reduction(gather: Gather) -> Reduction:
    """How credit statistics of data-parallel ranks become those of the step."""

    def reduce(stats: Mapping[str, Stat]) -> Mapping[str, NDArray[Any]]:
        return combine(_told(gather(dict(stats))))

    return reduce


def together(work: Callable[[Gather], T], gather: Gather) -> T:
    """``work`` of every data-parallel rank, which may gather as often as that of the others does.

    One that raises tells the others at their next gather, or at the one that ends all work: they raise ``RankError``.
    """
    if gather is alone:
        return work(gather)

    def checked(value: Any) -> list[Any]:
        return _told(gather(value))

    try:
        result = work(checked)
    except RankError:
        raise
    except Exception as error:
        gather(_Failed(f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)))
        raise
    checked(None)
    return result


def assign_credit(
    pipeline: Pipeline,
    batch: TrajectoryBatch,
    *,
    step: int,
    gather: Gather,
    weights: Mapping[str, ScoreWeights],
    run: RunPlan,
) -> tuple[NDArray[np.float64], dict[str, float]]:
    """Advantages of this rank's tokens, float64 [T], and the metrics of the whole step.

    Args:
        weights: what requests may name: ``current``, and ``reference`` where there is one.
        run: does this rank's plan; every rank of the layout calls it together, a rank without requests included.

    Raises:
        ScoreError, CreditError: a request or an edit that is wrong; on all ranks.
    """

    def work(gather: Gather) -> tuple[NDArray[np.float64], dict[str, float]]:
        view = open_view(batch, step=step)
        requests = pipeline.requests(view)
        asked = flat(requests)
        plan = plan_scores(asked, batch, weights) if asked else None
        own = (len(asked), plan.asked_tokens, plan.num_tokens) if plan else (0, 0, 0)
        *counts, turns, keyed = np.sum(gather((*own, *keyed_turns(view))), axis=0).tolist()
        if turns and not keyed and pipeline.reads_states:
            raise CreditError(
                f"credit.edits.{', '.join(pipeline.reads_states)}: compares turns by their state, and none of the "
                f"step's {turns} turns has one; set tasks.environment to an environment whose state_hash() is not empty"
            )
        metrics: dict[str, float] = {}
        replies: Sequence[ScoreReply] = ()
        if counts[0]:  # of all ranks: the forwards are collective
            replies = run(plan if plan is not None else plan_scores((), batch, weights))
            metrics |= dict(zip(SCORING_METRICS, (float(count) for count in counts), strict=True))
        view, reports = pipeline.run(view, reduction(gather), by_edit(requests, replies))
        for report in reports:
            metrics |= report.metrics()
        return view.advantage, metrics

    return together(work, gather)


def keyed_turns(view: CreditView) -> tuple[int, int]:
    """Model turns of this rank's trainable trajectories, and how many of them have a state key."""
    turns = view.turns
    keys = turns.pick(view.batch.turn_state_key)[turns.trainable]
    return len(keys), int(np.count_nonzero(keys))


SCORING_METRICS = ("scoring/requests", "scoring/asked_tokens", "scoring/forward_tokens")


def weights_table(
    version: int, *, vocab_size: int, layers: int, max_tokens: int, temperature: float, reference: bool
) -> dict[str, ScoreWeights]:
    """What the loop's requests may name. ``version`` is the policy version of the trained weights; the reference
    policy has their vocabulary."""
    names = {CURRENT: ("policy", version)} | ({REFERENCE: ("reference", 0)} if reference else {})
    return {
        name: ScoreWeights(
            model=model,
            version=number,
            vocabulary="policy",
            vocab_size=vocab_size,
            layers=layers,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        for name, (model, number) in names.items()
    }
