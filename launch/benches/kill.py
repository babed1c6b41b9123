"""``kill -9`` at random moments of a tiny deterministic run, and the same command again, until it is done.

Each kill aims at a phase, all phases alike, and strikes at a random moment within its usual length: in the middle of a
rollout, of an update, of writing a checkpoint. The run it is compared with was never killed: the journal must show
nothing lost and nothing trained twice, and every line of the metrics must be equal to the last bit. A run that reaches
its end before all kills were dealt is checked, and the rest goes to a fresh one.
"""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from launch.benches._kill_run import SIZE, TASKS_PER_STEP, write_first
from launch.measurement import About, Measurement, Report
from launch.paths import ROOT
from megatron_ext.rollout.journal import read
from megatron_ext.rollout.journal_audit import journal_audit
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.training.deterministic import comparable

PHASES = ("start", "rollout", "scoring", "update", "publish", "evaluate", "save")
KILLS, MINUTES, STEPS, SEED = 50, 15.0, 40, 1


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help=f"kills to deal (default: {KILLS})")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M", help=f"deal no more after so many (default: {MINUTES:g})"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of a run (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"of the moments (default: {SEED})")


ABOUT = About(
    line="kill -9 at random moments of a deterministic run: what is lost, trained twice, or differs (minutes)",
    takes=f"at most {MINUTES:g} minutes, or less by --minutes; --kills 3 --steps 8 is the smallest that says something",
    keys={
        "kill_lost": "groups that were generated and neither trained nor filtered",
        "kill_doubled": "groups that were trained twice on the history that survived",
        "kill_curve_differs": "steps whose metrics are not those of the run that was never killed",
        "kill_count": "kills that were dealt",
        "kill_in_<phase>": "of them in each phase",
        "kill_while_writing_a_checkpoint": "of them while a checkpoint was being written",
    },
    options=add_options,
)
SILENCE_S = 300.0


@dataclass
class Life:
    """One process: the phases it went through, (name, step, seconds it lasted), and whether it was killed or ended."""

    phases: list[tuple[str, int, float]] = field(default_factory=list)
    killed_in: str = ""
    while_writing: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Aim:
    """Kill in the ``skip``-th occurrence of ``phase`` from now on, ``share`` of its usual length after it began."""

    phase: str
    skip: int
    share: float


def live(folder: Path, name: str, steps: int, aim: Aim | None, usual: dict[str, float]) -> Life:
    """Runs the command to its end, or until it is killed. Raises ``RuntimeError`` when it ends otherwise."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "launch.benches._kill_run", str(folder), name, str(steps), str(writing)]
    log = folder / f"{name}.log"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, pass_fds=(writing,), cwd=ROOT)
    os.close(writing)
    life = Life()
    try:
        _follow(process, reading, life, aim, usual, folder / name)
    finally:
        process.kill()
        process.wait()
        os.close(reading)
    if not (life.finished or life.killed_in):
        raise RuntimeError(f"{name} ended with exit status {process.returncode}:\n{log.read_text()[-3000:]}")
    return life


def _follow(
    process: subprocess.Popen[bytes], reading: int, life: Life, aim: Aim | None, usual: dict[str, float], run: Path
) -> None:
    """Reads where the process is, and kills it when and where it is to be killed."""
    left = -1 if aim is None else aim.skip
    strike_at = float("inf")
    began, rest, heard = time.monotonic(), b"", time.monotonic()
    phase, step = "", 0
    while True:
        wait = min(strike_at - time.monotonic(), 1.0)
        if wait <= 0 and not life.killed_in:
            life.while_writing = any((run / "checkpoints").glob("*.tmp"))
            process.kill()
            life.killed_in = phase  # unless a line in the pipe says that it had gone further
            strike_at = float("inf")
            continue
        if not select.select([reading], [], [], max(wait, 0.0))[0]:
            if time.monotonic() - heard > SILENCE_S:
                raise RuntimeError(f"{run}: no new phase for {SILENCE_S:.0f} s in {phase!r}")
            continue
        data = os.read(reading, 65536)
        if not data:
            return
        heard = now = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if phase:
                life.phases.append((phase, step, now - began))
            name, number = line.decode().split()
            phase, step, began = name, int(number), now
            if life.killed_in:
                life.killed_in = phase
            if phase == "finished":
                life.finished = True
                strike_at = float("inf")
            elif aim is not None and phase == aim.phase and strike_at == float("inf") and not life.killed_in:
                if left == 0:
                    strike_at = now + aim.share * usual.get(phase, 0.1)
                left -= 1


def differing(whole: Path, other: Path) -> int:
    """Steps whose metrics are not the same, or that one of the two lacks."""
    ours, theirs = ({row["step"]: comparable(row) for row in read_metrics(p / "metrics.jsonl")} for p in (whole, other))
    return sum(ours.get(step) != theirs.get(step) for step in ours.keys() | theirs.keys())


def usual_lengths(life: Life) -> dict[str, float]:
    """Median seconds of each phase."""
    names = {name for name, _, _ in life.phases}
    return {name: median(s for n, _, s in life.phases if n == name) for name in names}


def run(report: Report, kills: int = KILLS, minutes: float = MINUTES, steps: int = STEPS, seed: int = SEED) -> None:
    """Deals ``kills`` kills, or as many as fit in ``minutes``, to runs of ``steps`` steps."""
    rng = random.Random(seed)
    ends = time.monotonic() + 60 * minutes
    dealt: Counter[str] = Counter()
    writing = lost = doubled = differs = folders = 0
    with tempfile.TemporaryDirectory(prefix="bench-kill-") as scratch:
        folder = Path(scratch)
        write_first(folder)
        whole = live(folder, "whole", steps, None, {})
        usual = usual_lengths(whole)
        length = sum(seconds for _, _, seconds in whole.phases)
        while dealt.total() < kills and time.monotonic() < ends - 2 * length:
            name = f"killed-{folders}"
            folders += 1
            life = Life()
            while not life.finished:
                aim = None
                if dealt.total() < kills and time.monotonic() < ends - 2 * length:
                    # The phase that was hit least so far, so that rare and short ones get their share.
                    fewest = min(dealt[phase] for phase in PHASES)
                    phase = rng.choice([phase for phase in PHASES if dealt[phase] == fewest])
                    aim = Aim(phase, 0 if phase == "start" else rng.randrange(3), rng.random())
                life = live(folder, name, steps, aim, usual)
                if life.killed_in:
                    dealt[life.killed_in] += 1
                    writing += life.while_writing
            audit = journal_audit(read(folder / name / "journal.jsonl")[0])
            lost += len(audit.lost) + len(audit.unfounded)
            doubled += len(audit.doubled)
            differs += differing(folder / "whole", folder / name)
    size = f"{dealt.total()} kills, {folders} run(s) of {steps} steps, {TASKS_PER_STEP} x {SIZE.samples} trajectories"
    report(Measurement("kill_lost", lost, "groups", 0, "lower", size))
    report(Measurement("kill_doubled", doubled, "groups", 0, "lower", size))
    report(Measurement("kill_curve_differs", differs, "steps", 0, "lower", size))
    report(Measurement("kill_count", dealt.total(), "kills", None, "higher", size))
    for phase in _order(dealt):
        report(Measurement(f"kill_in_{phase}", dealt[phase], "kills", None, "higher", size))
    report(Measurement("kill_while_writing_a_checkpoint", writing, "kills", None, "higher", size))


def _order(dealt: Counter[str]) -> Sequence[str]:
    return [*PHASES, *sorted(dealt.keys() - set(PHASES))]
