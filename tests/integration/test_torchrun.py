"""The whole job on several ranks under ``torchrun``: real processes, gloo, a real engine; kills and signals.

A run on one rank is what the others are compared with: sampling is keyed by (seed, group, sample), so that the first
step plays the same trajectories in any layout.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.rollout.coordinator import Coordinator, State
from megatron_ext.rollout.journal import read
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.training.ranks.link import Timing
from megatron_ext.training.step_replay import kept_step
from tests.helpers.walk_recipe import write_recipes

pytestmark = [pytest.mark.slow, pytest.mark.integration]

VOCAB = 291
LAYOUTS = {
    "data": (4, ()),
    "tensor and sequence": (2, ("parallel.tensor=2", "parallel.sequence=true")),
    "expert": (2, ("parallel.expert=2",)),
    "tensor, expert and data": (4, ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2")),
}
# What must be taken over all ranks: scoring forwards for credit, whitening, two optimizer steps a batch, a mean of
# means, a reference policy and samples; three groups, so that of four data-parallel ranks one is home to none; and a
# vocabulary that tensor-parallel ranks cannot share out without padding.
JOB = (
    f"tokenizer.vocab_size={VOCAB}",
    "batch.tasks_per_step=3",
    "batch.optimizer_steps_per_batch=2",
    "credit.edits.surprise={_target_: tests.helpers.asking_edit.Surprise, reference: reference, order: 1}",
    "credit.edits.whiten={_target_: megatron_ext.credit.edits.whiten.Whiten, center: true, order: 2}",
    "loss.aggregation=trajectory_mean",
    "loss.terms.kl={_target_: megatron_ext.losses.kl.KLToReference, coefficient: 0.01}",
    "samples.every=1",
)
OF_THE_MACHINE = re.compile(r"time/.*|progress/.*|.*_per_s|memory/.*|profile/.*|perf/.*")


@dataclass
class Jobs:
    """Runs jobs in processes of their own."""

    recipes: Path
    folder: Path
    root: Path

    def __call__(self, name: str, ranks: int, *argv: str, timeout: float = 1800.0) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of the job of ``ranks`` ranks in run folder ``name``."""
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        if ranks > 1:
            launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port
        job = [
            "-m",
            "tests.helpers.walk_job",
            str(self.recipes),
            f"run.root={self.folder}",
            f"run.name={name}",
            *JOB,
            *argv,
        ]
        done = subprocess.run(
            [sys.executable, *launcher, *job],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def metrics(self, name: str) -> list[dict[str, float]]:
        return read_metrics(self.folder / name / "metrics.jsonl")

    def journal(self, name: str) -> Coordinator:
        return Coordinator.replay(read(self.folder / name / "journal.jsonl")[0])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Jobs:
    recipes = write_recipes(tmp_path_factory.mktemp("recipes"), root)
    return Jobs(recipes, tmp_path_factory.mktemp("runs"), root)


@pytest.fixture(scope="module")
def alone(jobs: Jobs) -> list[dict[str, float]]:
    """Metrics of the job on one rank."""
    status, out, err = jobs("alone", 1)
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 2
    assert load_hf_config(jobs.folder / "alone" / "model_config.json").vocab == VOCAB
    return jobs.metrics("alone")


def same(found: dict[str, float], wanted: dict[str, float]) -> None:
    """Equal to 1e-4 in everything but durations and speeds."""
    names = {name for name in found.keys() | wanted.keys() if not OF_THE_MACHINE.fullmatch(name)}
    assert names <= found.keys() and names <= wanted.keys()
    pairs = {name: (found[name], wanted[name]) for name in names}
    differ = {name: pair for name, pair in pairs.items() if not math.isclose(*pair, rel_tol=1e-4, abs_tol=1e-5)}
    assert not differ


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_job_in_every_layout(jobs: Jobs, alone: list[dict[str, float]], name: str) -> None:
    """Warm start, evaluation and the first step, to 1e-4; and it goes on to the end."""
    ranks, argv = LAYOUTS[name]
    folder = name.replace(" ", "-").replace(",", "")
    status, out, err = jobs(folder, ranks, *argv)
    assert status == 0, err
    assert [json.loads(line)["steps"] for line in out.splitlines()] == [2], "rank 0 alone speaks"
    assert err.count("warm start: ") == 1 and err.count("finished: ") == 1
    found = jobs.metrics(folder)
    assert [row["step"] for row in found] == [row["step"] for row in alone] == [0, 1, 2]
    for number in (0, 1):
        same(found[number], alone[number])
    assert found[1]["train/trained_tokens"] > 0 and found[1]["train/grad_norm"] > 0
    own, other = (kept_step.read_step(jobs.folder / run, 1) for run in ("alone", folder))
    assert own.batch.trajectory_id == other.batch.trajectory_id and own.scores is not None and other.scores is not None
    np.testing.assert_array_equal(own.batch.ids, other.batch.ids)
    np.testing.assert_allclose(own.scores.advantage, other.scores.advantage, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(own.scores.weight, other.scores.weight, rtol=1e-12)
    np.testing.assert_allclose(own.scores.logp, other.scores.logp, atol=1e-4)


def test_a_killed_rank_ends_the_job_with_one_line_and_the_job_goes_on(
    jobs: Jobs, alone: list[dict[str, float]]
) -> None:
    """Hangs with no message (slime 1487, verl 3873). Killed in an update, stopped by a signal in the next, then ended
    on one rank: checkpoints do not depend on how many ranks wrote them."""
    stop = "tracking.stop={_target_: tests.helpers.stopping.StopRank, rank: 1, "
    status, _, err = jobs("killed", 2, "run.steps=4", f"{stop}phase: update, step: 1}}")
    ended = time.time()
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status != 0
    assert re.fullmatch(
        r"error: rank 1 of 2 \(\S+, pid \d+\) is gone: it was killed, or its machine is lost \(in update\); "
        r"the same command goes on from the last checkpoint",
        line,
    )
    # By its closed sockets, not by two minutes of silence.
    assert ended - (jobs.folder / "killed" / "stopped").stat().st_mtime < Timing().silence_s
    assert [row["step"] for row in jobs.metrics("killed")] == [0, 1]
    same(jobs.metrics("killed")[1], alone[1])

    interrupt = f"{stop}phase: update, step: 1, number: {int(signal.SIGTERM)}}}"
    status, out, err = jobs("killed", 2, "run.steps=4", interrupt)
    assert status == 0, err
    assert json.loads(out) == {"interrupted": True, "steps": 2, "after": None}

    status, out, err = jobs("killed", 1, "run.steps=4")
    assert status == 0, err
    end, last = jobs.journal("killed"), json.loads(out.splitlines()[-1])
    assert last["steps"] == 4 and last["after"] is not None
    taken = [end.consumed_at(step) for step in range(1, 5)]
    groups = [name for event in taken for name in (*event.groups, *(name for name, _ in event.filtered))]
    assert len(groups) == len(set(groups)) and len(groups) + end.counts().finished == end.draws
    assert all(end.groups[name].state in (State.CONSUMED, State.FILTERED) for name in groups)
    assert [row["step"] for row in jobs.metrics("killed")] == [0, 1, 2, 3, 4]


def test_a_lost_rank_0_is_told_by_another(jobs: Jobs) -> None:
    status, _, err = jobs(
        "headless", 2, "tracking.stop={_target_: tests.helpers.stopping.StopAt, phase: rollout, step: 0}"
    )
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status != 0 and len(lines) == 1 and lines[0].startswith("error: rank 0 of 2 (")


def test_a_layout_that_does_not_fit_is_one_line(jobs: Jobs) -> None:
    status, out, err = jobs("misfit", 2, "parallel.tensor=4", "parallel.sequence=true")
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status != 0 and out == "" and not (jobs.folder / "misfit").exists()
    assert any("does not divide the 2 training ranks" in line for line in lines)
    assert len(lines) == len(set(lines)), "told once"
