"""The invariants of ``megatron_ext/training/step_replay/kept_step.py``."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config.schema import SamplesConfig
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.journal import open_coordinator
from megatron_ext.training.step_replay import kept_step as kept_steps
from megatron_ext.training.step_replay.kept_step import KeptStep, KeptStepError, StepScores, due, read_step, write_step
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import equal
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers.records import build, described_batches, random_batch
from tests.helpers.run_folders import kept_step


def same(a: KeptStep, b: KeptStep) -> bool:
    plain = ("step", "trained", "filtered", "opened", "resumed")
    if any(getattr(a, name) != getattr(b, name) for name in plain) or not equal(a.batch, b.batch):
        return False
    if a.metrics.keys() != b.metrics.keys() or (a.scores is None) != (b.scores is None):
        return False
    if not all(math.isnan(v) and math.isnan(b.metrics[n]) or v == b.metrics[n] for n, v in a.metrics.items()):
        return False
    if a.scores is None or b.scores is None:
        return True
    for field in dataclasses.fields(StepScores):
        left, right = getattr(a.scores, field.name), getattr(b.scores, field.name)
        if isinstance(left, np.ndarray):
            if not isinstance(right, np.ndarray) or left.dtype != right.dtype or not np.array_equal(left, right):
                return False
        elif left != right:
            return False
    return True


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("routed", [None, (3, 2)])
def test_what_is_written_is_read(tmp_path: Path, reference: bool, routed: tuple[int, int] | None) -> None:
    kept = kept_step(12, random_batch(4, routed=routed), reference=reference)
    assert write_step(tmp_path, kept) == tmp_path / "samples" / "step_12.arrow"
    assert same(read_step(tmp_path, 12), kept) and read_step(tmp_path, 12).whole
    assert not same(read_step(tmp_path, 12), kept_step(12, random_batch(4, routed=routed), seed=1, reference=reference))


@given(described_batches(), st.integers(0, 5), st.booleans())
def test_first_groups_of_any_batch(
    tmp_path_factory: pytest.TempPathFactory, described: list, count: int, ref: bool
) -> None:
    run = tmp_path_factory.mktemp("run")
    kept = kept_step(3, build(described), reference=ref).first(count)
    write_step(run, kept)
    again = read_step(run, 3)
    assert same(again, kept)
    groups = len(described) if count == 0 else min(count, len(described))
    assert again.batch.num_groups == groups and again.whole == (groups == len(described))
    assert equal(again.batch, select_groups(build(described), range(groups)))


def test_a_step_with_no_group_left_and_no_scores(tmp_path: Path) -> None:
    empty = KeptStep(1, select_groups(random_batch(1), []), trained=())
    write_step(tmp_path, empty)
    assert same(read_step(tmp_path, 1), empty)


def test_written_again_replaces_and_undone_goes(tmp_path: Path) -> None:
    for step in (1, 5, 10, 15):
        write_step(tmp_path, kept_step(step))
    write_step(tmp_path, kept_step(5, seed=3))
    (tmp_path / "samples" / "step_20.tmp").write_bytes(b"half")
    assert kept_steps.drop_after(tmp_path, 5) == [10, 15]
    assert kept_steps.sampled_steps(tmp_path) == [1, 5]
    assert same(read_step(tmp_path, 5), kept_step(5, seed=3))
    assert [p.name for p in sorted((tmp_path / "samples").iterdir())] == ["step_1.arrow", "step_5.arrow"]
    assert kept_steps.drop_after(tmp_path / "none", 5) == []


def test_a_failed_write_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, kept_step(2))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeptStepError, match=r"step_2.arrow: not written: No space left.*samples.every=0"):
        write_step(tmp_path, kept_step(2, seed=5))
    assert same(read_step(tmp_path, 2), kept_step(2))
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_scores_of_another_batch_are_refused(tmp_path: Path) -> None:
    kept = dataclasses.replace(kept_step(1), batch=random_batch(9, groups=5))
    with pytest.raises(KeptStepError, match="advantage has shape"):
        write_step(tmp_path, kept)


def test_what_was_not_kept_says_what_was(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write_step(tmp_path, kept_step(step))
    with pytest.raises(KeptStepError, match=r"step 7 was not kept; in samples/: 1-3, 10; still in the store: none"):
        read_step(tmp_path, 7)
    (tmp_path / "samples" / "step_7.arrow").write_bytes(b"no arrow file")
    with pytest.raises(KeptStepError, match=r"step_7.arrow: cannot be read"):
        read_step(tmp_path, 7)


def test_from_the_store_while_it_is_there(tmp_path: Path) -> None:
    """Two steps of two groups; the second is undone by a resume, and a group of the first leaves the store."""
    batches = [random_batch(seed, groups=1, samples=(2, 2)) for seed in range(6)]
    store = TrajectoryStore(tmp_path / "store")
    coordinator = open_coordinator(tmp_path / "journal.jsonl")
    coordinator.resume(0, lambda meta: True)
    ids = coordinator.add([Task(f"t/{i}", "t", i, "train") for i in range(6)], 2)
    refs = []
    for leased, batch in zip(coordinator.lease("d", 6, 0.0, 1.0), batches, strict=True):
        batch = dataclasses.replace(batch, group_id=(leased.group_id,))
        refs.append(store.write(batch))
        coordinator.finish(leased.lease_id, GroupMeta.from_batch(batch, refs[-1]))
    coordinator.consume(1, ids[:2])
    coordinator.consume(2, ids[2:4], [(ids[4], "constant reward")])
    assert kept_steps.stored_steps(tmp_path) == [1, 2]
    found = read_step(tmp_path, 2)
    assert found.scores is None and found.opened is None and found.whole
    assert found.batch.group_id == ids[2:4] and found.filtered == ((ids[4], "constant reward"),)

    write_step(tmp_path, KeptStep(2, found.batch, found.trained, opened=3))
    assert read_step(tmp_path, 2).opened == 3  # samples/ is looked at first
    coordinator.resume(1, lambda meta: True)
    assert kept_steps.stored_steps(tmp_path) == [1]
    store.delete(Ref(refs[0]))
    assert kept_steps.stored_steps(tmp_path) == []
    coordinator.close()


def test_when_a_step_is_kept() -> None:
    assert [s for s in range(1, 13) if due(SamplesConfig(every=5), s, 12)] == [1, 5, 10, 12]
    assert not any(due(SamplesConfig(every=0), s, 12) for s in range(1, 13))
