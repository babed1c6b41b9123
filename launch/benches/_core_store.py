"""The store against the bare file system: the same bytes written and synced, and read, in turns with the store.

Writing ends with the data on the device on both sides. Reading is a whole new copy in memory on the raw side
(``read``), from the page cache, which is where a step's data are; the store maps them, checks every byte against its
checksum and validates the record, and then every byte of the arrays is touched. ``store_speed_ratio`` is the worse of
writing and reading. Each side counts with its fastest round: what else runs on the machine only ever adds time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.bench import table
from launch.measurement import Measurement, Report
from megatron_ext.trajectory.record import Role, TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore

BAR = 0.5
ROUNDS = 7
TRAJECTORIES, TURNS, TOKENS = 16, 50, 800  # a turn: half observation, half sampled
LAYERS, TOP_K, EXPERTS = 48, 8, 128


def make_batch() -> TrajectoryBatch:
    """A group of long trajectories with routing recorded, random in everything that compresses."""
    rng = np.random.default_rng(0)
    tokens, turns = TRAJECTORIES * TURNS * TOKENS, TRAJECTORIES * TURNS * 2
    turn = np.repeat(np.arange(turns), TOKENS // 2)
    sampled = turn % 2 == 1
    each = np.arange(TRAJECTORIES + 1)
    bounds = np.arange(turns + 1) * (TOKENS // 2)
    return TrajectoryBatch(
        ids=rng.integers(0, 151_936, tokens),
        loss_mask=sampled,
        turn=turn,
        field=np.zeros(tokens, dtype=np.int8),
        rollout_logp=np.where(sampled, -rng.random(tokens), 0.0),
        version=np.where(sampled, 7, -1),
        weight=np.ones(tokens),
        turn_role=np.where(np.arange(turns) % 2, Role.MODEL, Role.TOOL),
        turn_start=bounds[:-1],
        turn_end=bounds[1:],
        turn_number=np.tile(np.arange(TURNS * 2), TRAJECTORIES),
        turn_state_key=rng.integers(1, 1 << 62, turns),
        turn_action_key=rng.integers(1, 1 << 62, turns),
        turn_reward=np.zeros(turns),
        segment_tokens=each * TURNS * TOKENS,
        segment_turns=each * TURNS * 2,
        session_segments=each,
        trajectory_sessions=each,
        group_trajectories=np.array([0, TRAJECTORIES]),
        session_kind=np.zeros(TRAJECTORIES, dtype=np.int8),
        session_parent=np.full(TRAJECTORIES, -1),
        session_return=np.full((TRAJECTORIES, 2), -1),
        trajectory_id=tuple(f"g/{n}" for n in range(TRAJECTORIES)),
        sample=np.arange(TRAJECTORIES),
        reward=rng.random(TRAJECTORIES),
        success=np.zeros(TRAJECTORIES, dtype=bool),
        status=np.zeros(TRAJECTORIES, dtype=np.int8),
        harness=("bench",) * TRAJECTORIES,
        group_id=("g",),
        task_id=("t",),
        routed=rng.integers(0, EXPERTS, (tokens, LAYERS, TOP_K), dtype=np.uint8),
        routed_valid=sampled,
    )


def arrays(batch: TrajectoryBatch) -> list[NDArray[np.uint8]]:
    """Its arrays as bytes."""
    values = (getattr(batch, item.name) for item in fields(batch))
    return [array.reshape(-1).view(np.uint8) for array in values if isinstance(array, np.ndarray)]


def read_all(store: TrajectoryStore, ref: Ref) -> int:
    """Reads a batch and touches every byte of it."""
    return sum(int(part[: part.size & -8].view(np.uint64).sum()) for part in arrays(store.read(ref)))


def raw_write(path: Path, parts: list[NDArray[np.uint8]]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for part in parts:
            view = part.data
            while view.nbytes:
                view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(report: Report) -> None:
    batch = make_batch()
    parts = arrays(batch)
    size = sum(part.nbytes for part in parts)
    taken: dict[str, list[float]] = {"raw_write": [], "write": [], "raw_read": [], "read": []}
    with tempfile.TemporaryDirectory(prefix="bench-store-") as scratch:
        store, path = TrajectoryStore(Path(scratch) / "store"), Path(scratch) / "raw"
        for turn in range(ROUNDS + 1):  # the first only warms up
            path.unlink(missing_ok=True)
            raw = seconds(lambda: raw_write(path, parts))
            ours = seconds(lambda: store.write(batch))
            (ref,) = store.list()
            raw_again = seconds(path.read_bytes)
            ours_again = seconds(partial(read_all, store, ref))
            store.delete(ref)
            if turn:
                for name, value in zip(taken, (raw, ours, raw_again, ours_again), strict=True):
                    taken[name].append(value)
    write = min(taken["raw_write"]) / min(taken["write"])
    read = min(taken["raw_read"]) / min(taken["read"])
    label = f"{size / 1e6:.0f} MB, {batch.num_tokens} tokens, routing [T, {LAYERS}, {TOP_K}] uint8"
    report(Measurement("store_speed_ratio", min(write, read), "x raw", BAR, "higher", label))
    report(Measurement("store_write_ratio", write, "x raw write + fsync", BAR, "higher", label))
    report(Measurement("store_read_ratio", read, "x raw read", BAR, "higher", label))
    for name, values in taken.items():
        report(Measurement(f"store_{name}_gb_per_s", size / min(values) / 1e9, "GB/s", None, "higher", label))


if __name__ == "__main__":
    measured: list[Measurement] = []
    run(measured.append)
    print(table(measured))
