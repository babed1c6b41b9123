"""Which recorded token sequence does a prompt continue? A radix tree over the sequences of one dialogue.

Every recorded sequence is a prompt followed by the ids sampled after it. An edge of the tree holds a run of tokens, so
that a prompt is compared with runs, not with sequences: each of its tokens is looked at once, however many there are.

Invariants (``tests/trajectory/test_prefix_index.py`` asserts each):

1. Nothing is found by hash: tokens are compared with tokens.
2. ``parent`` is the longest recorded sequence that the prompt starts with. Of equal ones the latest that nothing
   continues yet is taken, and then counts as continued.
3. ``shared`` is the longest run of leading tokens that any recorded sequence has in common with the prompt.
4. Adding a sequence costs time linear in its tokens, with vector operations over the runs.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NONE = -1


@dataclass(frozen=True)
class Found:
    """What a prompt has in common with the sequences before it; sequences are named by the number they were added with.

    ``parent``, ``parent_end``: the longest whole sequence it starts with and its length (-1 and 0: none); ``free``: no
    sequence had continued that one. ``shared``: leading tokens in common with any sequence, ``holder`` one that has
    them. ``against``: a sequence that has ``other_id`` at position ``shared`` where the prompt has another token, the
    one that sampled it if any did (-1 where the prompt ends or nothing stands there).
    """

    parent: int
    parent_end: int
    free: bool
    shared: int
    holder: int
    against: int
    other_id: int


@dataclass
class _Ends:
    """Sequences that end at one place: ``free`` are not continued yet, ``last`` is the latest."""

    free: list[int] = field(default_factory=list)
    last: int = NONE


class _Edge:
    """Tokens from depth ``start`` on. ``writer[i]`` is the last sequence that sampled token i, or else the first whose
    prompt has it. The buffers may be longer than ``size``: a leaf grows in place. ``latest`` is the highest writer of a
    child's first token, with that token; ``sampled`` the highest that sampled it."""

    def __init__(self, start: int, ids: NDArray[np.int32], writer: NDArray[np.int32], size: int) -> None:
        self.start, self.ids, self.writer, self.size = start, ids, writer, size
        self.children: dict[int, _Edge] = {}
        self.depths: list[int] = []
        self.ends: dict[int, _Ends] = {}
        self.latest = self.sampled = (NONE, NONE)

    def note(self, writer: int, token: int, sampled: bool) -> None:
        """Takes up the writer of a child's first token; writers come in rising order."""
        self.latest = (writer, token)
        if sampled:
            self.sampled = self.latest

    def append(self, ids: NDArray[np.int32], writer: int) -> None:
        after = self.size + len(ids)
        if after > len(self.ids):
            room = max(after, 2 * self.size)
            for name in ("ids", "writer"):
                grown = np.empty(room, dtype=np.int32)
                grown[: self.size] = getattr(self, name)[: self.size]
                setattr(self, name, grown)
        self.ids[self.size : after] = ids
        self.writer[self.size : after] = writer
        self.size = after

    def split(self, at: int) -> None:
        """Keeps the first ``at`` tokens and hands the rest to an only child. Views, not copies."""
        rest = _Edge(self.start + at, self.ids[at:], self.writer[at:], self.size - at)
        rest.children, self.children = self.children, {int(self.ids[at]): rest}
        rest.latest, rest.sampled, self.latest, self.sampled = self.latest, self.sampled, (NONE, NONE), (NONE, NONE)
        cut = bisect_right(self.depths, rest.start)
        rest.depths, self.depths = self.depths[cut:], self.depths[:cut]
        rest.ends = {depth: self.ends.pop(depth) for depth in rest.depths}
        self.size = at


@dataclass(frozen=True)
class _Place:
    """``at`` tokens into ``edge``, ``depth`` tokens from the root."""

    edge: _Edge
    at: int
    depth: int


class PrefixIndex:
    """The recorded sequences of one dialogue. Not thread-safe."""

    def __init__(self) -> None:
        empty = np.empty(0, dtype=np.int32)
        self._root = _Edge(0, empty, empty, 0)
        self._prompt_sizes: dict[int, int] = {}

    def add(self, sequence: int, prompt: NDArray[np.int32], ids: NDArray[np.int32]) -> Found:
        """Looks the prompt up, then records prompt + ids as ``sequence``, a number larger than any before."""
        place, last, ends = self._walk(prompt)
        found = self._found(prompt, place, last, ends)
        self._prompt_sizes[sequence] = len(prompt)
        place = self._grow(place, prompt[place.depth :], sequence)
        place = self._record_answer(place, ids, sequence)
        edge, depth = place.edge, place.depth
        if depth not in edge.ends:
            edge.ends[depth] = _Ends()
            insort(edge.depths, depth)
        edge.ends[depth].free.append(sequence)
        edge.ends[depth].last = sequence
        return found

    def _walk(self, prompt: NDArray[np.int32]) -> tuple[_Place, int, tuple[_Edge, int] | None]:
        """As far down as the prompt agrees; a sequence that has the last agreed token; the deepest end on the way."""
        edge, at, depth = self._root, 0, 0
        holder, deepest = NONE, None
        while True:
            child = edge.children.get(int(prompt[depth])) if depth < len(prompt) else None
            if child is None:
                break
            edge = child
            span = min(edge.size, len(prompt) - depth)
            at = _agreement(edge.ids[:span], prompt[depth : depth + span])
            depth += at
            holder = int(edge.writer[at - 1])
            reached = bisect_right(edge.depths, depth)
            if reached:
                deepest = (edge, edge.depths[reached - 1])
            if at < edge.size:
                break
        return _Place(edge, at, depth), holder, deepest

    def _found(self, prompt: NDArray[np.int32], place: _Place, holder: int, deepest: tuple[_Edge, int] | None) -> Found:
        parent, end, free = NONE, 0, False
        if deepest is not None:
            edge, end = deepest
            ends = edge.ends[end]
            free = bool(ends.free)
            parent = ends.free.pop() if free else ends.last
        against, other = NONE, NONE
        if place.depth < len(prompt):
            if place.at < place.edge.size:
                against, other = int(place.edge.writer[place.at]), int(place.edge.ids[place.at])
            else:
                against, other = place.edge.latest if place.edge.sampled[0] == NONE else place.edge.sampled
        return Found(parent, end, free, place.depth, holder, against, other)

    def _grow(self, place: _Place, rest: NDArray[np.int32], sequence: int) -> _Place:
        """Adds tokens that do not stand at ``place`` yet."""
        if not len(rest):
            return place
        edge = place.edge
        if place.at < edge.size:
            edge.split(place.at)
            writer = int(edge.writer[place.at])
            edge.note(writer, int(edge.ids[place.at]), place.depth >= self._prompt_sizes[writer])
        if edge is self._root or edge.children:
            child = _Edge(place.depth, rest.copy(), np.full(len(rest), sequence, dtype=np.int32), len(rest))
            edge.note(sequence, int(rest[0]), place.depth >= self._prompt_sizes[sequence])
            edge.children[int(rest[0])] = edge = child
        else:
            edge.append(rest, sequence)
        return _Place(edge, edge.size, place.depth + len(rest))

    def _record_answer(self, place: _Place, ids: NDArray[np.int32], sequence: int) -> _Place:
        """Follows sampled tokens that stand there already, claiming them, and adds the others."""
        done = 0
        while done < len(ids):
            edge, at = place.edge, place.at
            if at == edge.size:
                child = edge.children.get(int(ids[done]))
                if child is None:
                    break
                edge.note(sequence, int(ids[done]), sampled=True)
                edge, at = child, 0
            span = min(edge.size - at, len(ids) - done)
            run = _agreement(edge.ids[at : at + span], ids[done : done + span])
            edge.writer[at : at + run] = sequence
            done += run
            place = _Place(edge, at + run, place.depth + run)
            if run < span:
                break
        return self._grow(place, ids[done:], sequence)


def _agreement(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Leading tokens that two runs of one length have in common."""
    differs = a != b
    first = int(differs.argmax()) if len(differs) else 0
    return first if len(differs) and differs[first] else len(a)
