"""Traces of whole steps by torch's profiler, with a table of where the time of each went.

A trace is a gzipped Chrome trace, ``profile/step_N_rankR.json.gz`` (open it in ui.perfetto.dev), and its table
``profile/step_N_rankR.txt``. Ranges mark the phases of the step and, inside them, forward, backward, log-prob, loss and
optimizer. What other processes do (engine, driver) is seen as the waiting of the rollout phase.

Invariants (``tests/training/measures/test_profiling.py``):

1. Each step from the first to the last that is asked for has a trace and a table, on every rank, and no other step.
2. Self times of the table's ranges add up to the step: a range's own is its duration without those inside it.
3. While no trace is recorded a range costs one look at a flag, and Megatron is not told of timers.
4. A trace that cannot be written costs a line of warning, not the run.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_ext.models.forward import unwrap
from megatron_ext.training.measures.phases import MARK

FOLDER = "profile"
OUTSIDE = "(outside phases)"
_TOP = 20
_MEGATRON = {"forward-compute": "forward", "backward-compute": "backward", "forward-backward": "schedule"}


# -- Megatron's ranges ----------------------------------------------------------------------------------------------
class _Timer:
    """One of the timers that Megatron's schedule starts and stops where it is told of some."""

    def __init__(self, name: str) -> None:
        self._name = MARK + _MEGATRON.get(name, name)
        self._open: list[record_function] = []

    def start(self, barrier: bool = False) -> None:
        opened = record_function(self._name)
        opened.__enter__()
        self._open.append(opened)

    def stop(self, barrier: bool = False) -> None:
        self._open.pop().__exit__(None, None, None)


class _Timers:
    def __init__(self) -> None:
        self._made: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        return self._made.setdefault(name, _Timer(name))


# -- recording ------------------------------------------------------------------------------------------------------
class StepProfiler:
    """Records steps ``steps[0]`` to ``steps[1]`` (empty: none) of the rank that trains ``chunks``."""

    def __init__(
        self,
        steps: Sequence[int] = (),
        folder: Path | None = None,
        rank: int = 0,
        chunks: Sequence[torch.nn.Module] = (),
    ) -> None:
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._folder, self._rank, self._chunks = folder, rank, chunks
        self._under_way: tuple[int, float, profile] | None = None

    def at(self, step: int | None) -> None:
        """Call between steps: ends the trace under way and begins that of ``step``, where it is wanted."""
        if self._under_way is not None:
            self._end(*self._under_way)
        if step is not None and step in self._steps:
            self._begin(step)

    def close(self) -> None:
        """Drops the trace under way: its step was not finished."""
        if self._under_way is not None:
            self._stop(self._under_way[2])

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if any(p.is_cuda for chunk in self._chunks for p in chunk.parameters()):
            activities.append(ProfilerActivity.CUDA)
        recorder = profile(activities=activities, acc_events=True)
        recorder.start()
        self._tell_megatron(_Timers())
        self._under_way = step, time.perf_counter(), recorder

    def _stop(self, recorder: profile) -> None:
        self._under_way = None
        self._tell_megatron(None)
        recorder.stop()

    def _tell_megatron(self, timers: _Timers | None) -> None:
        for chunk in self._chunks:
            unwrap(chunk).config.timers = timers

    def _end(self, step: int, started: float, recorder: profile) -> None:
        seconds = time.perf_counter() - started
        self._stop(recorder)
        assert self._folder is not None, "a profiler with steps has a folder"
        path = self._folder / f"step_{step}_rank{self._rank}.json.gz"
        table = summarize(recorder, step, self._rank, seconds)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self._folder) as unfinished:
                plain, packed = Path(unfinished) / "trace.json", Path(unfinished) / "trace.json.gz"
                recorder.export_chrome_trace(str(plain))
                with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                    shutil.copyfileobj(source, target)
                packed.replace(path)
            path.with_name(path.name.removesuffix(".json.gz") + ".txt").write_text(table.text() + "\n")
        except OSError as error:
            print(f"warning: no trace of step {step}: {path}: {error.strerror}", file=sys.stderr, flush=True)
            return
        if self._rank == 0:
            print(f"{table.text(operators=5)}\ntrace: {path}", file=sys.stderr, flush=True)


# -- the table ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RangeRow:
    """A range of the step, over all its calls: ``path`` from the phase inwards, seconds of wall time (``own`` without
    the ranges inside), and of operators' own time that fell into it (``device``: on the accelerator)."""

    path: tuple[str, ...]
    calls: int
    total: float
    own: float
    operators: float
    device: float


@dataclass(frozen=True)
class OperatorRow:
    """An operator over all its calls: its own seconds, and the range that most of them fell into."""

    name: str
    calls: int
    own: float
    device: float
    where: tuple[str, ...]


@dataclass(frozen=True)
class StepTable:
    """Where a step's wall time ``seconds`` went: ``ranges`` in the order of the step, ``operators`` by own time."""

    step: int
    rank: int
    seconds: float
    ranges: tuple[RangeRow, ...]
    operators: tuple[OperatorRow, ...]

    def text(self, operators: int = _TOP) -> str:
        """The table as plain text, with the ``operators`` largest."""
        gpu = any(row.device for row in self.ranges)
        lines = [
            f"step {self.step}, rank {self.rank}: {self.seconds:.3f} s",
            f"{'range':<40}{'calls':>7}{'total s':>10}{'self s':>10}{'self %':>8}{'in operators s':>16}"
            + (f"{'on device s':>13}" if gpu else ""),
        ]
        for row in self.ranges:
            name = "  " * (len(row.path) - 1) + row.path[-1]
            share = 100 * row.own / self.seconds
            lines.append(
                f"{name:<40}{row.calls:>7}{row.total:>10.4f}{row.own:>10.4f}{share:>8.1f}{row.operators:>16.4f}"
                + (f"{row.device:>13.4f}" if gpu else "")
            )
        lines.append("")
        lines.append(
            f"{'operator (largest self time)':<44}{'calls':>8}{'self s':>10}"
            + (f"{'on device s':>13}" if gpu else "")
            + "  mostly in"
        )
        for op in self.operators[:operators]:
            lines.append(
                f"{op.name[:43]:<44}{op.calls:>8}{op.own:>10.4f}"
                + (f"{op.device:>13.4f}" if gpu else "")
                + f"  {' > '.join(op.where)}"
            )
        return "\n".join(lines)


@dataclass
class _Sum:
    calls: int = 0
    total: float = 0.0
    inside: float = 0.0
    operators: float = 0.0
    device: float = 0.0


@dataclass
class _OperatorSum:
    calls: int = 0
    own: float = 0.0
    device: float = 0.0
    where: dict[tuple[str, ...], float] = field(default_factory=dict)


def summarize(recorder: profile, step: int, rank: int, seconds: float) -> StepTable:
    """The table of a stopped recorder over a step of ``seconds``."""
    events = [event for event in recorder.events() if event.device_type == DeviceType.CPU]
    marked = sorted(
        (event for event in events if event.name.startswith(MARK)),
        key=lambda event: (event.time_range.start, -event.time_range.end),
    )
    sums: dict[tuple[str, ...], _Sum] = {}
    times = [float("-inf")]  # from times[i] on the innermost range is paths[i]
    paths: list[tuple[str, ...]] = [(OUTSIDE,)]
    open_ranges: list[tuple[float, tuple[str, ...]]] = []

    def close(until: float) -> None:
        while open_ranges and open_ranges[-1][0] <= until:
            end, _ = open_ranges.pop()
            times.append(end)
            paths.append(open_ranges[-1][1] if open_ranges else (OUTSIDE,))

    covered = 0.0
    for event in marked:
        start, end = event.time_range.start, event.time_range.end
        close(start)
        above = open_ranges[-1][1] if open_ranges else ()
        path = (*above, event.name.removeprefix(MARK))
        own = sums.setdefault(path, _Sum())
        own.calls += 1
        own.total += (end - start) * 1e-6
        if above:
            sums[above].inside += (end - start) * 1e-6
        else:
            covered += (end - start) * 1e-6
        open_ranges.append((end, path))
        times.append(start)
        paths.append(path)
    close(float("inf"))
    outside = sums.setdefault((OUTSIDE,), _Sum(calls=1, total=max(seconds - covered, 0.0)))

    operators: dict[str, _OperatorSum] = {}
    for event in events:
        own_s, device_s = event.self_cpu_time_total * 1e-6, event.self_device_time_total * 1e-6
        if event.name.startswith(MARK) or (own_s <= 0 and device_s <= 0):
            continue
        path = paths[bisect_right(times, event.time_range.start) - 1]
        place = sums.get(path, outside)
        place.operators += own_s
        place.device += device_s
        found = operators.setdefault(event.name, _OperatorSum())
        found.calls += 1
        found.own += own_s
        found.device += device_s
        found.where[path] = found.where.get(path, 0.0) + own_s + device_s
    return StepTable(
        step=step,
        rank=rank,
        seconds=seconds,
        ranges=tuple(
            RangeRow(path, s.calls, s.total, s.total - s.inside, s.operators, s.device) for path, s in _in_order(sums)
        ),
        operators=tuple(
            OperatorRow(name, s.calls, s.own, s.device, max(s.where, key=lambda path: s.where[path]))
            for name, s in sorted(operators.items(), key=lambda item: -(item[1].own + item[1].device))
        ),
    )


def _in_order(sums: dict[tuple[str, ...], _Sum]) -> list[tuple[tuple[str, ...], _Sum]]:
    """Ranges behind the one that they are in, otherwise as they first came."""
    first = {path: number for number, path in enumerate(sums)}
    return sorted(sums.items(), key=lambda item: [first[item[0][: n + 1]] for n in range(len(item[0]))])
