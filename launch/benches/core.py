"""The numerical core against its bars: every figure a ratio measured in one run, or seconds with their size.

Each part is a module ``_core_*.py`` that also runs alone (``python -m launch.benches._core_gae``). GAE is timed against
verl, which the peers' environment has: ``bash launch/env --peers python -m launch.bench core``.
"""

from __future__ import annotations

from launch.benches import _core_credit, _core_gae, _core_logprob, _core_merge, _core_packing, _core_store
from launch.measurement import Report

HELP = "log-probs, fused head, GAE, packing, prefix trees, credit, merge and store against their bars"

PARTS = (_core_packing, _core_gae, _core_credit, _core_merge, _core_store, _core_logprob)


def run(report: Report) -> None:
    for part in PARTS:
        part.run(report)
