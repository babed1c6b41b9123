"""Audit of a journal: what the surviving history lost, trained twice, or trained without a result.

It reads the events alone and shares no code with the coordinator that wrote them, so that a mistake of one is not
repeated by the other.

Invariants (``tests/rollout/test_journal_audit.py``):

1. The surviving history is what is left when every resume undoes the steps after its checkpoint.
2. A journal of which nothing is amiss audits clean, however often its run was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ext.rollout.events import Added, Consumed, Event, Finished, Opened


@dataclass(frozen=True)
class Audit:
    """Group ids. ``lost``: never trained nor filtered, though a group added later was; ``doubled``: trained or filtered
    more than once; ``unfounded``: trained or filtered without a result that came after it was last lost.
    ``steps``, ``taken``: steps and groups of the surviving history; ``resumes``: openings but the first."""

    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    unfounded: tuple[str, ...]
    steps: int
    taken: int
    resumes: int

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.unfounded)


def journal_audit(events: Iterable[Event]) -> Audit:
    """Audits the events of a run whose groups are trained in the order in which they were added (sync mode). Raises
    ``ValueError`` when a step is missing from the surviving history."""
    added: list[str] = []
    results: set[str] = set()
    steps: dict[int, list[tuple[str, bool]]] = {}  # step -> (group, whether it had a result)
    repeated: list[str] = []
    openings = 0
    for event in events:
        match event:
            case Opened():
                openings += 1
                results -= set(event.lost)
                for step in [step for step in steps if step > event.step]:
                    del steps[step]
            case Added():
                added += event.groups
            case Finished():
                results.add(event.group)
            case Consumed():
                names = [*event.groups, *(name for name, _ in event.filtered)]
                if event.step in steps:  # a step that was not undone is taken again
                    repeated += names
                steps.setdefault(event.step, []).extend((name, name in results) for name in names)
    if sorted(steps) != list(range(1, len(steps) + 1)):
        raise ValueError(f"the surviving history holds the steps {sorted(steps)}: some are missing")
    taken = [pair for pairs in steps.values() for pair in pairs]
    counts = Counter(name for name, _ in taken)
    last = max((number for number, name in enumerate(added) if name in counts), default=0)
    return Audit(
        lost=tuple(name for name in added[:last] if name not in counts),
        doubled=tuple(sorted({*repeated, *(name for name, count in counts.items() if count > 1)})),
        unfounded=tuple(sorted({name for name, founded in taken if not founded} | (counts.keys() - set(added)))),
        steps=len(steps),
        taken=len(counts),
        resumes=max(openings - 1, 0),
    )
