"""Masked skip-observation GAE on 64 trajectories of 32,768 tokens, half of them observations, against verl's.

Both take the same float32 arrays and take turns, so that a machine that slows down slows both. No row is shorter than
the others, so verl pads nothing, which is its best case. ``python -m launch.benches._core_gae`` runs this part alone.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.bench import table
from launch.measurement import Measurement, Report
from megatron_ext.credit.gae import GAEInput, GAEOutput, Unit, gae

ROWS, LENGTH = 64, 32_768
TURNS = 256  # a row; each is a run of action tokens and a run of observations
GAMMA, LAM = 1.0, 0.95
ROUNDS, OURS_A_ROUND = 2, 5
PEER = "verl.trainer.ppo.core_algos"
SIZE = f"{ROWS} x {LENGTH:,} tokens, half observations, {TURNS} turns a row, float32"
Array = NDArray[Any]


def cuts(rng: np.random.Generator) -> Array:
    """Lengths of the runs of one kind in one row: TURNS numbers of at least 1 that fill half of it."""
    inner = np.sort(rng.choice(LENGTH // 2 - 1, TURNS - 1, replace=False)) + 1
    return np.diff(inner, prepend=0, append=LENGTH // 2)


def arrays(seed: int = 0) -> dict[str, Array]:
    """``mask`` bool, ``turn`` (its run) int64, ``values`` and ``rewards`` float32, all [ROWS * LENGTH]. A row's reward
    stands on its last action token."""
    rng = np.random.default_rng(seed)
    runs = [np.stack([cuts(rng), cuts(rng)], axis=1).reshape(-1) for _ in range(ROWS)]
    kind = np.tile([True, False], TURNS)
    mask = np.concatenate([np.repeat(kind, run) for run in runs])
    turn = np.concatenate([np.repeat(np.arange(2 * TURNS), run) for run in runs])
    rewards = np.zeros(ROWS * LENGTH, dtype=np.float32)
    last = np.arange(1, ROWS + 1) * LENGTH - 1 - np.array([run[-1] for run in runs])
    rewards[last] = rng.integers(0, 2, ROWS)
    return {
        "mask": mask,
        "turn": turn,
        "values": rng.normal(0.5, 0.2, ROWS * LENGTH).astype(np.float32),
        "rewards": rewards,
    }


def peer() -> ModuleType:
    """verl's advantage functions. Raises ``RuntimeError`` where verl is not installed."""
    try:
        return importlib.import_module(PEER)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error}: this bench compares with verl; run it as `bash launch/env --peers python -m launch.bench core`"
        ) from error


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(report: Report) -> None:
    import torch

    verl, data = peer(), arrays()
    offsets = np.arange(ROWS + 1) * LENGTH
    inputs = GAEInput(data["values"], data["rewards"], data["mask"], offsets)
    theirs = [torch.from_numpy(data[k].astype(np.float32)).view(ROWS, LENGTH) for k in ("rewards", "values", "mask")]
    gamma, lam = torch.tensor(GAMMA), torch.tensor(LAM)

    def ours_once() -> GAEOutput:
        return gae(inputs, gamma=GAMMA, lam=LAM)

    def theirs_once() -> object:
        return verl.compute_gae_advantage_return(*theirs, gamma, lam)

    short = [x[:, :256] for x in theirs]
    verl.compute_gae_advantage_return(*short, gamma, lam)
    ours_once()
    ours: list[float] = []
    peers: list[float] = []
    for _ in range(ROUNDS):
        ours += [seconds(ours_once) for _ in range(OURS_A_ROUND)]
        peers.append(seconds(theirs_once))
    ours += [seconds(ours_once) for _ in range(OURS_A_ROUND)]
    report(Measurement("gae_speedup_vs_verl", median(peers) / median(ours), "x", 10, "higher", SIZE))
    report(Measurement("gae_seconds", median(ours), "s", 0.35, "lower", SIZE))
    report(Measurement("gae_verl_seconds", median(peers), "s", None, "lower", SIZE))

    trained = data["mask"]
    apart = np.abs(verl.compute_gae_advantage_return(*theirs, gamma, lam)[1].numpy().reshape(-1) - ours_once().returns)
    report(Measurement("gae_return_difference_vs_verl", float(apart[trained].max()), "", None, "lower", SIZE))

    # What a chain links instead, and what lambda may be. Named apart from the figures with a bar.
    turn, everything = data["turn"], np.ones_like(trained)
    arms: dict[str, tuple[GAEInput, float | Array, float | None]] = {
        "unmasked": (replace(inputs, mask=everything), LAM, None),
        "token": (replace(inputs, unit=Unit.TOKEN), LAM, None),
        "step": (replace(inputs, unit=Unit.STEP, key=turn), LAM, None),
        "segment": (replace(inputs, unit=Unit.SEGMENT, key=turn // 16), LAM, None),
        "lambda_a_row_and_critic_1": (inputs, np.linspace(0.9, 1.0, ROWS), 1.0),
    }
    for name, (arm, share, critic) in arms.items():
        work = partial(gae, arm, gamma=GAMMA, lam=share, return_lam=critic)
        report(Measurement(f"gae_s_{name}", median(seconds(work) for _ in range(3)), "s", None, "lower", SIZE))


if __name__ == "__main__":
    rows: list[Measurement] = []
    run(rows.append)
    print(table(rows))
