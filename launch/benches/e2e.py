"""Whole RL steps (generate, score, train, publish) against TRL's ``GRPOTrainer`` on the same model and machine.

Both sides are processes of their own that start from the same exported weights and take turns, so that a machine that
slows down slows both; each turn's warm-up steps are left out. What each side runs, and how it is set, stands in
``_e2e_ours.py`` and ``_e2e_trl.py``. Tokens per second: sampled tokens of a step over the seconds of the whole step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from launch.benches._e2e_setup import Side, Size, write_model, write_task_file, write_tokenizer
from launch.measurement import About, Measurement, Report
from launch.paths import ROOT

ABOUT = About(
    line="whole RL steps (generate, score, train) against TRL's GRPOTrainer",
    takes="about two minutes on two idle cores; needs the peers' environment (bash launch/env --peers python ...)",
    keys={
        "e2e_speedup_vs_trl": "our tokens per second over TRL's",
        "e2e_trl_tokens_per_s": "sampled tokens of a step over the seconds of the whole step, TRL",
        "e2e_tokens_per_s": "the same, ours",
        "e2e_share_<phase>": "part of our step: generation, scoring, training, publish",
    },
)
BAR = 1.5
OURS = (sys.executable, "-m", "launch.benches._e2e_ours")
TRL = ("bash", str(ROOT / "launch" / "env"), "--peers", "python", "-m", "launch.benches._e2e_trl")


def prepare(folder: Path, size: Size) -> None:
    """Tokenizer, task file and first weights in ``folder``."""
    write_tokenizer(folder / "tokenizer")
    write_task_file(folder / "tasks.jsonl", size)
    write_model(folder / "model", folder / "tokenizer", size)


def turn(command: Sequence[str], folder: Path, name: str, size: Size) -> Side:
    """One turn of a side. Raises ``RuntimeError`` with the end of its log when it fails."""
    log = folder / f"{name}.log"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(size.threads)}
    with log.open("wb") as out:
        done = subprocess.run(
            [*command, str(folder), name, size.to_json()],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
            timeout=1800,
        )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit status {done.returncode}:\n{log.read_text()[-3000:]}")
    return Side.read(folder / f"{name}.json").check(size, name)


def tokens_per_s(sides: Sequence[Side], size: Size) -> float:
    return size.tokens / median(seconds for side in sides for seconds in side.seconds)


def share(sides: Sequence[Side], phase: str) -> float:
    """Median over steps of a phase's part of its step."""
    return median(
        step[phase] / seconds for side in sides for step, seconds in zip(side.phases, side.seconds, strict=True)
    )


def report_ours(report: Report, ours: Sequence[Side], size: Size) -> None:
    label = str(size)
    report(Measurement("e2e_tokens_per_s", tokens_per_s(ours, size), "tokens/s", None, "higher", label))
    for name, phase in (
        ("generation", "rollout"),
        ("scoring", "scoring"),
        ("training", "update"),
        ("publish", "publish"),
    ):
        report(Measurement(f"e2e_share_{name}", share(ours, phase), "of a step", None, "lower", label))


def run(report: Report) -> None:
    size = Size()
    with tempfile.TemporaryDirectory(prefix="bench-e2e-") as scratch:
        folder = Path(scratch)
        prepare(folder, size)
        ours: list[Side] = []
        peer: list[Side] = []
        for number in range(size.rounds):
            peer.append(turn(TRL, folder, f"trl-{number}", size))
            ours.append(turn(OURS, folder, f"ours-{number}", size))
    ratio = tokens_per_s(ours, size) / tokens_per_s(peer, size)
    report(Measurement("e2e_speedup_vs_trl", ratio, "x", BAR, "higher", str(size)))
    report(Measurement("e2e_trl_tokens_per_s", tokens_per_s(peer, size), "tokens/s", None, "higher", str(size)))
    report_ours(report, ours, size)
