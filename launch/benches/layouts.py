"""The same training step under every parallel layout, and under every way of cutting the batch, against one rank.

``layout_diff_<layout>`` is the largest relative difference, over three SGD steps, of the loss, the gradient norm and
every tensor's gradient (max |difference| over max |gradient|). Each layout runs the whole step on gloo ranks of this
machine: packing, scoring of policy and reference, credit, loss, update. What else must agree comes as one row each:
parameters after the steps, scores by token, routing, metrics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.benches._layouts_setup import MARGIN, MODEL, STEPS, Case, Outcome, make_batch
from launch.benches._ranks import RankPool
from launch.measurement import About, Measurement, Report

ABOUT = About(
    line="the same training step under every parallel layout",
    takes="about two minutes on two cores, with up to four ranks on them",
    keys={
        "layout_diff_<layout>": "largest relative difference to one rank: loss, gradient norm, gradients; one a case",
        "layout_params_diff_max": "the same of parameters after the steps, over all cases",
        "layout_scores_diff_max": "of the scores by token",
        "layout_metrics_diff_max": "of the metrics",
        "layout_rerouted": "tokens x layers that chose other experts than one rank's",
        "layout_router_margin": "smallest gap between a chosen expert's probability and the next",
    },
)
BAR = 1e-5
RANK_MODULE = "launch.benches._layouts_rank"
ENTRY = f"{RANK_MODULE}:run_case"
_TP = {"tensor": 2, "sequence": True}
_PP, _EP, _CP = {"pipeline": 2}, {"expert": 2}, {"context": 2}
_VPP = {"pipeline": 2, "virtual_pipeline": 2}
_SHARDED = {"distributed_optimizer": True}

# In order of their ranks.
CASES: tuple[Case, ...] = (
    Case("dp1", poison=True),
    Case("small_microbatches", cap=60),
    Case("one_microbatch", cap=4096),
    Case("one_row_each", plan="one"),
    Case("rows_permuted", plan="permuted", cap=120),
    Case("rows_cut", tokens_per_row=12),
    Case("shared_prefixes", share_prefixes=True, cap=4096),
    # Recorded experts replayed, against one rank that replays them.
    Case("replay_small_microbatches", cap=60, replay=True),
    Case("replay_rows_cut", tokens_per_row=12, replay=True),
    Case("replay_shared_prefixes", share_prefixes=True, cap=4096, replay=True),
    Case("replay_recompute", recompute="full", cap=60, replay=True),
    Case("dp2", 2, cap=90, poison=True),
    Case("dp2_distopt", 2, _SHARDED, poison=True),
    Case("dp2_rows_cut_permuted", 2, tokens_per_row=12, plan="permuted", cap=120),
    Case("dp2_shared_prefixes", 2, share_prefixes=True, cap=4096),
    Case("tp2_sp", 2, _TP),
    Case("tp2_sp_shared_prefixes", 2, _TP, share_prefixes=True, cap=4096),
    Case("ep2", 2, _EP),
    Case("ep2_shared_prefixes", 2, _EP, share_prefixes=True, cap=4096),
    Case("ep2_idle_rank", 2, _EP, plan="first"),
    Case("etp2", 2, {**_TP, "expert_tensor": 2}),
    Case("tp2_ep2", 2, {**_TP, **_EP}),
    Case("pp2", 2, _PP, poison=True),
    Case("pp2_shared_prefixes", 2, _PP, share_prefixes=True, cap=4096),
    Case("vpp2", 2, _VPP),
    Case("vpp2_small_microbatches", 2, _VPP, cap=60),
    Case("cp2", 2, _CP, poison=True),
    Case("cp2_small_microbatches", 2, _CP, cap=40),
    Case("replay_dp2", 2, cap=90, replay=True),
    Case("replay_dp2_distopt", 2, _SHARDED, replay=True),
    Case("replay_tp2_sp", 2, _TP, replay=True),
    Case("replay_tp2_sp_recompute", 2, _TP, recompute="moe", cap=60, replay=True),
    Case("replay_tp2_sp_shared_prefixes", 2, _TP, share_prefixes=True, cap=4096, replay=True),
    Case("replay_ep2", 2, _EP, replay=True),
    Case("replay_ep2_idle_rank", 2, _EP, plan="first", replay=True),
    Case("replay_etp2", 2, {**_TP, "expert_tensor": 2}, replay=True),
    Case("replay_tp2_ep2", 2, {**_TP, **_EP}, replay=True),
    Case("replay_pp2", 2, _PP, replay=True),
    Case("replay_pp2_recompute", 2, _PP, recompute="moe", cap=60, replay=True),
    Case("replay_vpp2", 2, _VPP, cap=60, replay=True),
    Case("replay_vpp2_recompute", 2, _VPP, recompute="full", cap=60, replay=True),
    Case("replay_cp2", 2, _CP, replay=True),
    Case("replay_cp2_small_microbatches", 2, _CP, cap=40, replay=True),
    # Other losses and models, against one rank of their own: whole sequences; no experts.
    Case("cp2_sequence_loss", 2, _CP, terms="sequence"),
    Case("tp2_dense", 2, {"tensor": 2}, dense=True),
    # Biased sigmoid routing with groups and a shared expert.
    Case("sigmoid_small_microbatches", cap=60, sigmoid=True),
    Case("sigmoid_tp2_ep2", 2, {**_TP, **_EP}, sigmoid=True),
    Case("sigmoid_pp2", 2, _PP, sigmoid=True),
    Case("sigmoid_cp2", 2, _CP, sigmoid=True),
    Case("sigmoid_dp2_distopt_replay", 2, _SHARDED, sigmoid=True, replay=True),
    Case("sigmoid_tp2_ep2_replay", 2, {**_TP, **_EP}, sigmoid=True, replay=True),
    Case("sigmoid_vpp2_replay", 2, _VPP, cap=60, recompute="full", sigmoid=True, replay=True),
    Case("dp4", 4),
    Case("dp4_distopt", 4, _SHARDED),
    Case("ep4", 4, {"expert": 4}),
    Case("tp2_ep2_dp2", 4, {**_TP, **_EP}),
    Case("pp2_ep2", 4, {**_PP, **_EP}, poison=True),
    Case("pp2_ep2_idle_rank", 4, {**_PP, **_EP}, plan="first"),
    Case("pp2_ep2_distopt", 4, {**_PP, **_EP, **_SHARDED}),
    Case("vpp2_ep2", 4, {**_VPP, **_EP}),
    Case("tp2_pp2", 4, {**_TP, **_PP}),
    Case("cp2_ep2", 4, {**_CP, **_EP}),
    Case("cp2_tp2", 4, {**_CP, **_TP}),
    Case("replay_pp2_ep2", 4, {**_PP, **_EP}, replay=True),
    Case("replay_cp2_tp2", 4, {**_CP, **_TP}, replay=True),
    # A gradient that is clipped, and an embedding that is not tied.
    Case("tp2_pp2_clipped_untied", 4, {**_TP, **_PP}, tied=False, clip=0.5),
    Case("pp2_ep2_distopt_clipped_untied", 4, {**_PP, **_EP, **_SHARDED}, tied=False, clip=0.5),
)


@dataclass(frozen=True)
class Differences:
    """Between a case and one rank. ``step``: loss, gradient norm and gradients, relative; ``params`` after the last
    step, ``scores`` (nats) and ``metrics``; ``where`` names what differs most in ``step``; ``rerouted`` tokens x layers
    with another choice of experts."""

    step: float
    where: str
    params: float
    scores: float
    metrics: float
    rerouted: int


def relative(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """max |a - b| over max |b|; 0 where both are 0 everywhere."""
    gap, size = float(np.abs(a.astype(np.float64) - b).max()), float(np.abs(b).max())
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def compare(outcome: Outcome, one: Outcome) -> Differences:
    """A case's outcome against that of one rank."""
    parts: list[tuple[float, str]] = []
    for step in range(STEPS):
        parts.append((abs(outcome.loss[step] / one.loss[step] - 1), f"loss of step {step}"))
        parts.append((abs(outcome.grad_norm[step] / one.grad_norm[step] - 1), f"gradient norm of step {step}"))
        ours, theirs = outcome.grads[step], one.grads[step]
        if ours.keys() != theirs.keys():
            raise ValueError("gradients of other tensors than one rank has")
        parts += [(relative(ours[name], theirs[name]), f"gradient of {name}, step {step}") for name in theirs]
    step_diff, where = max(parts)
    if outcome.metrics.keys() != one.metrics.keys() or outcome.scores.keys() != one.scores.keys():
        raise ValueError("other metrics or scores than one rank has")
    metrics = [
        abs(a - b) / max(abs(b), 1e-3)
        for name, values in one.metrics.items()
        for a, b in zip(outcome.metrics[name], values, strict=True)
    ]
    experts = [name for name in one.scores if name.endswith("experts")]
    return Differences(
        step=step_diff,
        where=where,
        params=max(relative(outcome.params[name], value) for name, value in one.params.items()),
        scores=max(
            float(np.abs(outcome.scores[name] - values).max())
            for name, values in one.scores.items()
            if name not in experts
        ),
        metrics=max(metrics),
        rerouted=sum(int((outcome.scores[name] != one.scores[name]).any(axis=-1).sum()) for name in experts),
    )


def outcomes(pool: RankPool, cases: Sequence[Case] = CASES) -> Iterator[tuple[Case, Outcome, Outcome]]:
    """Each case with its outcome and that of one rank, fewest ranks first."""
    alone: dict[str, Outcome] = {}
    for case in cases:
        key = repr(case.alone)
        if key not in alone:
            alone[key] = pool.call(ENTRY, case.alone, world=1)[0]
    for case in sorted(cases, key=lambda case: case.world):
        yield case, pool.call(ENTRY, case, world=case.world)[0], alone[repr(case.alone)]


def run(report: Report) -> None:
    batch = make_batch()
    model = f"{MODEL.layers} layers, {MODEL.num_experts} experts top-{MODEL.top_k}, fp32"
    size = f"{batch.num_trajectories} trajectories, {batch.num_tokens} tokens, {model}, {STEPS} steps"
    found: list[Differences] = []
    margins: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-layouts-") as scratch,
        RankPool(4, Path(scratch), preload=RANK_MODULE) as pool,
    ):
        for case, outcome, one in outcomes(pool):
            differences = compare(outcome, one)
            found.append(differences)
            margins.append(one.margin)
            cut = f"{outcome.microbatches} micro-batches, {outcome.tokens} tokens on the first rank"
            detail = f"{case.world} ranks; {cut}; most: {differences.where}"
            report(Measurement(f"layout_diff_{case.name}", differences.step, "relative", BAR, "lower", detail))
    report(Measurement("layout_params_diff_max", max(d.params for d in found), "relative", BAR, "lower", size))
    report(Measurement("layout_scores_diff_max", max(d.scores for d in found), "nats", BAR, "lower", size))
    report(Measurement("layout_metrics_diff_max", max(d.metrics for d in found), "relative", BAR, "lower", size))
    report(Measurement("layout_rerouted", sum(d.rerouted for d in found), "tokens x layers", 0.0, "lower", size))
    report(Measurement("layout_router_margin", min(margins), "probability", MARGIN, "higher", size))
