"""``run.deterministic``: the same configuration gives the same metrics to the last bit, also when the run was killed in
between and went on.

What it takes, and where it is done:

- decoding that does not depend on what else is in the batch: ``rollout.embedded.arithmetic``;
- random numbers keyed by (seed, group, sample, position): ``rollout.episode``, ``rollout.embedded.sampler``;
- a step plays exactly the groups that it would have played without the kill, all from their first token, under the
  weights it starts from: ``Collector.play_again`` and ``keeps``;
- one CPU thread and torch's deterministic kernels in training: ``exact``.

Invariants (``tests/launch/test_kill.py``): the metrics of a run that was killed equal those of one that was
not, all but times, speeds and memory (``comparable``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ext.models.backends import BackendError, ResolvedBackend
from megatron_ext.rollout.coordinator import Group

# Metrics that measure the machine, not the run.
_MACHINE = ("time/", "progress/", "memory/", "perf/")


@contextmanager
def exact(wanted: bool, backend: ResolvedBackend) -> Iterator[None]:
    """Training in one thread with deterministic kernels while the context is open, where it is ``wanted``."""
    if not wanted:
        yield
        return
    if backend.device != "cpu":
        raise BackendError(
            f"run.deterministic=true repeats exactly on backend.device=cpu only, not on {backend.device}"
        )
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)


def keeps(group: Group, step: int) -> bool:
    """Whether a resume at ``step`` keeps a group's tokens: those that were sampled for a later step are sampled again,
    by the weights which that step starts from."""
    return group.finished_in < step


def comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a step's metrics must repeat."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(_MACHINE) and not name.endswith(("tokens_per_s", "/time")) and "/time_" not in name
    }
