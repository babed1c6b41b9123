"""The numerical core against its bars: every figure a ratio measured in one run, or seconds with their size.

Each part is a module ``_core_*.py`` that also runs alone (``python -m launch.benches._core_gae``). GAE is timed against
verl, which the peers' environment has: ``bash launch/env --peers python -m launch.bench core``.
"""

from __future__ import annotations

from launch.benches import _core_credit, _core_gae, _core_logprob, _core_merge, _core_packing, _core_store
from launch.measurement import About, Report

ABOUT = About(
    line="log-probs, fused head, GAE, packing, prefix trees, credit, merge and store against their bars",
    takes="a minute and a quarter on two idle cores",
    keys={
        "packing_lockstep_<of>": "cost of ranks that wait for each other over the ideal: median of 10 seeds, and worst",
        "packing_ms": "milliseconds of packing one step",
        "packing_microbatches_over_bound": "micro-batches of a rank beyond what is needed",
        "packing_over_cap": "micro-batches over the token cap",
        "packing_verl_lockstep_<of>": "verl's packing of the same",
        "packing_speedup_vs_verl": "times faster than it",
        "prefix_tree_<what>": "tokens that trees save where the sharing is known, milliseconds of building them",
        "gae_speedup_vs_verl": "skip-observation GAE: times faster than verl's",
        "gae_seconds": "seconds of ours",
        "gae_verl_seconds": "seconds of verl's",
        "gae_return_difference_vs_verl": "largest difference of a trained token's return",
        "gae_s_<variant>": "seconds of other chains and lambdas",
        "credit_primitives_seconds": "seconds of group statistics, turn reductions and edits of a large step",
        "credit_primitives_growth": "its time over twice that of half the step; 1 is linear",
        "credit_<part>_seconds": "seconds of each part alone",
        "merge_seconds": "seconds of merging a rollout's calls into segments",
        "merge_seconds_<case>": "the same of fewer calls, and of calls of which nothing merges",
        "merge_linearity": "time a token of all calls over that of half of them",
        "store_<way>_ratio": "the store's speed over raw writing and reading, and the lower of both",
        "store_<way>_gb_per_s": "each of the four speeds",
        "logprob_entropy_peak": "log-prob and entropy with gradients: extra memory over the logits",
        "logprob_entropy_time": "its time over plain PyTorch's",
        "logprob_entropy_small_time": "the same, on a small vocabulary",
        "fused_head_peak": "fused with the output head: extra memory over the logits",
        "fused_head_time": "its time over plain PyTorch's",
        "fused_head_seconds": "seconds of it",
    },
)

PARTS = (_core_packing, _core_gae, _core_credit, _core_merge, _core_store, _core_logprob)


def run(report: Report) -> None:
    for part in PARTS:
        part.run(report)
