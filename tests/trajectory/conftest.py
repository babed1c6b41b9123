"""A maker of random, valid batches, shared by the tests of the record's users."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatron_ext.trajectory.builder import TrajectoryBuilder, build_group
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import Role, SessionKind, Status, TrajectoryBatch
from megatron_ext.trajectory.version import pack

BatchMaker = Callable[..., TrajectoryBatch]


def _trajectory(rng: np.random.Generator, builder: TrajectoryBuilder, turns: int, routed: bool) -> None:
    sessions = [builder.open_session()]
    builder.add_context(sessions[0], rng.integers(0, 99, 2))
    for _ in range(turns):
        if rng.random() < 0.15:
            sessions.append(builder.open_session(SessionKind.SUBAGENT, sessions[0]))
        session = sessions[int(rng.integers(len(sessions)))]
        if rng.random() < 0.15:
            builder.rewrite(session)
        builder.add_message(session, Role.TOOL, rng.integers(0, 99, int(rng.integers(0, 9))))
        builder.add_context(session, rng.integers(0, 99, 1))
        if rng.random() < 0.2:
            continue
        n, before = int(rng.integers(1, 12)), len(builder.prompt_ids(session))
        rows = rng.integers(0, 8, (before + n - 1, 3, 2)).astype(np.uint8) if routed else None
        turn = builder.add_model_turn(
            session,
            rng.integers(0, 99, n),
            -rng.random(n),
            np.sort(rng.integers(0, 3, n)) + pack(1, 0),
            state_key=int(rng.integers(1, 1 << 62)),
            trained=bool(rng.random() < 0.8),
            routed=rows,
            routed_from=0 if routed else None,
        )
        builder.label_turn(turn, "a/b", int(rng.integers(0, 3)))


@pytest.fixture(scope="session")
def random_batch() -> BatchMaker:
    """``make(seed, groups=2, samples=3, turns=6, routed=False)``."""

    def make(seed: int, groups: int = 2, samples: int = 3, turns: int = 6, routed: bool = False) -> TrajectoryBatch:
        rng = np.random.default_rng(seed)
        batches = []
        for g in range(groups):
            finished = []
            for sample in range(samples):
                builder = TrajectoryBuilder(f"g{g}/{sample}", sample, "h")
                _trajectory(rng, builder, int(rng.integers(0, turns + 1)), routed)
                status = Status(int(rng.choice([0, 0, 0, 1, 2, 3])))
                finished.append(builder.finish(float(rng.random()), {"é part": 0.1}, bool(rng.random() < 0.5), status))
            batches.append(build_group(f"g{g}", f"tasks/ü {g}", finished))
        return concat(batches)

    return make
