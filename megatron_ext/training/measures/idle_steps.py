"""Steps of a run that trained nothing, because no group was kept: how many, why, and what helps. Pure.

Told from the journal, so that a resumed run counts those of its earlier incarnations, and none that was undone.

Invariants (``tests/training/measures/test_idle_steps.py``):

1. A step counts when it consumed no group; one that kept any does not.
2. The hint follows from how the dropped groups came out, and names keys that exist; without such a step there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.rollout.agreement import UNTRAINABLE
from megatron_ext.rollout.coordinator import Coordinator


@dataclass(frozen=True)
class IdleSteps:
    """``idle`` of ``steps`` steps trained nothing; the groups that they dropped ``failed`` always, were ``solved``
    always, were ``untrainable`` (fewer than two trajectories to train on), or none of these (``rest``)."""

    steps: int
    idle: int
    failed: int = 0
    solved: int = 0
    untrainable: int = 0
    rest: int = 0

    def hint(self) -> str:
        """What happened and what to do, one line; empty when every step trained."""
        if not self.idle:
            return ""
        why = {
            "always failed": self.failed,
            "always succeeded": self.solved,
            "had fewer than two trajectories to train on": self.untrainable,
            "had equal rewards": self.rest,
        }
        said = ", ".join(f"{count} {words}" for words, count in why.items() if count) or "none was generated"
        what = f"{self.idle} of {self.steps} steps trained nothing, as none of their groups was kept"
        return f"{what} ({said}). {self._advice()}"

    def _advice(self) -> str:
        if self.untrainable > self.failed + self.solved + self.rest:
            return "What ended their episodes is in logs/driver.log."
        if self.solved > self.failed + self.rest:
            return "Harder tasks, or a higher rollout.temperature, make groups whose rewards differ."
        return (
            "Easier tasks, a longer warm start (warm_start.max_epochs, warm_start.target_success) or more groups and "
            "trajectories a step (batch.tasks_per_step, batch.trajectories_per_task) make groups whose rewards differ."
        )


def idle_steps(state: Coordinator, last: int) -> IdleSteps:
    """Those of the steps 1 to ``last`` that the run has made."""
    events = [event for event in map(state.consumed_at, range(1, last + 1)) if not event.groups]
    dropped = [(state.groups[group], reason) for event in events for group, reason in event.filtered]
    untrainable = sum(reason == UNTRAINABLE for _, reason in dropped)
    outcomes = [group.meta.success for group, reason in dropped if reason != UNTRAINABLE and group.meta is not None]
    failed, solved = sum(not any(outcome) for outcome in outcomes), sum(all(outcome) for outcome in outcomes)
    rest = len(dropped) - untrainable - failed - solved
    return IdleSteps(last, len(events), failed, solved, untrainable, rest)
