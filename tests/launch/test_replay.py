"""Invariants of replays (``megatron_ext/training/replay*.py``, numbers: ``replay.py``): steps of real runs again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import train as command
from launch.prepare import prepare
from launch.replay import replay
from megatron_ext.training.folder import differing
from megatron_ext.training.run import RunResult, train
from megatron_ext.training.step_replay.kept_step import path_of, read_step, write_step

pytestmark = [pytest.mark.slow, pytest.mark.integration]

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def exact_run(walk_recipes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of ``walk``, deterministic, every step kept whole, step 2 traced; no checkpoint of step 1."""
    root = tmp_path_factory.mktemp("runs")
    keys = ["recipe=walk", f"run.root={root}", "run.deterministic=true", "run.steps=3", "samples.every=1"]
    keys += ["samples.groups=0", "profile.steps=[2,2]", "checkpoint.every=2", "evaluation.before=false"]
    keys += ["evaluation.after=false"]
    return train(prepare(keys, walk_recipes)).run_dir


@pytest.fixture
def again(walk_recipes: Path, capfd: pytest.CaptureFixture[str]) -> Replay:
    """``again(run folder, step, kind, *overrides)`` -> status, stdout, stderr."""

    def run(folder: Path, step: int, kind: str, *overrides: str) -> tuple[int, str, str]:
        from launch.errors import status

        capfd.readouterr()
        keys = ["recipe=walk", f"run.root={folder.parent}", f"run.name={folder.name}", "run.steps=3", *overrides]
        try:
            code = replay(keys, step, kind, walk_recipes)
        except Exception as error:
            code = status(error)
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*"))}


EXACT = "run.deterministic=true"


@pytest.mark.parametrize("step", [1, 3])
def test_a_trained_step_repeats_to_the_last_bit(exact_run: Path, again: Replay, step: int) -> None:
    """Invariant 1 and ``replay_training``'s: step 1 starts from the warm start, step 3 from step 2's checkpoint."""
    before = contents(exact_run)
    code, out, err = again(exact_run, step, "train", EXACT)
    assert code == 0, out + err
    assert "agrees to the last bit" in out and "note" not in out and "<-" not in out
    for name in ("train/loss", "train/grad_norm", "offpolicy/logp_diff_mean", "moe/load_cv"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert line.split()[1] == line.split()[2]
    assert {"advantage", "weight", "logp", "entropy"} <= {line.split()[0] for line in out.splitlines() if line}
    assert contents(exact_run) == before


@pytest.mark.parametrize("step", [1, 3])
def test_a_sampled_step_repeats_to_the_last_bit(exact_run: Path, again: Replay, step: int) -> None:  # invariant 1
    before = contents(exact_run)
    code, out, err = again(exact_run, step, "rollout", EXACT)
    assert code == 0, out + err
    assert "agrees to the last bit" in out and "100.0 % of the trajectories are the same" in out
    assert out.count("8/8") == read_step(exact_run, step).batch.num_groups
    assert contents(exact_run) == before


def test_other_weights_and_other_settings_are_told(exact_run: Path, again: Replay) -> None:  # invariant 2
    """Step 2 started from weights that were not kept; the nearest ones give other numbers, and that is said."""
    code, out, _ = again(exact_run, 2, "train", EXACT)
    assert code == 1 and "note: weights of step 0: step 2 started from those of step 1" in out
    assert "there are: 0 (before training), 2, 3" in out and "<-" in out and "does not agree" in out
    code, out, _ = again(exact_run, 3, "train", "optimizer.lr=0.5", "credit.normalize=mean")
    assert code == 1 and "note: configured differently: optimizer.lr (" in out and "credit.normalize" in out
    assert "run.deterministic (True there, False now)" in out and "does not agree within" in out
    lines = [line for line in out.splitlines() if line.startswith("advantage")]
    assert lines and lines[0].endswith("<-")


def test_a_run_without_kept_steps_is_replayed_from_its_store(
    walk_run: RunResult, again: Replay, tmp_path: Path
) -> None:
    """Its last steps are still in the store; metrics are those of ``metrics.jsonl``, within rounding."""
    folder = tmp_path / "walk"
    shutil.copytree(walk_run.run_dir, folder, ignore=shutil.ignore_patterns("samples"))
    code, out, err = again(folder, 2, "train", "run.steps=2")
    assert code == 0, out + err
    assert "no per-token scores were kept" in out and "agrees within" in out
    assert len([line for line in out.splitlines() if "/" in line.split(" ")[0]]) > 15
    code, out, err = again(folder, 2, "rollout", "run.steps=2")
    assert code == 0, out + err
    assert "of the trajectories are the same" in out


def test_what_cannot_be_replayed_is_one_line(exact_run: Path, again: Replay, tmp_path: Path) -> None:  # invariant 3
    def refused(folder: Path, step: int, kind: str = "train") -> str:
        code, out, err = again(folder, step, kind, EXACT)
        lines = err.splitlines()
        assert code == 2 and not out and len(lines) == 1, err
        return lines[0]

    line = refused(exact_run, 9)
    assert "step 9 was not kept; in samples/: 1-3" in line
    assert "no such run" in refused(tmp_path / "nowhere", 1)
    folder = tmp_path / "walk"
    shutil.copytree(exact_run, folder, ignore=shutil.ignore_patterns("profile", "logs"))
    write_step(folder, read_step(exact_run, 3).first(1))
    line = refused(folder, 3)
    assert "step 3 keeps 1 of the " in line and "samples.groups=0" in line and "kept whole: 1, 2;" in line
    assert path_of(folder, 3).is_file()
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "warm_start")
    assert "no checkpoint and no warm start" in refused(folder, 1)


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["--replay-step"], "--replay-step: needs a value"),
        (["--replay-step", "x"], "--replay-step x: must be the number of a step"),
        (["--replay-step=0"], "--replay-step 0: must be"),
        (["--replay", "train"], "--replay-step: must be the number of a step"),
        (["--replay-step", "1", "--replay=all"], "--replay all: must be one of train, rollout"),
    ):
        assert command.main(["recipe=quickstart", *argv]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert command.take_values(["a=1", "--replay-step", "3", "--replay=train", "b=2"], command.VALUED) == {
        "--replay-step": "3",
        "--replay": "train",
    }


def test_a_traced_run_keeps_trace_table_and_speed(exact_run: Path) -> None:
    """The phases of a real step are in its trace's table, and its speed in the metrics."""
    files = {path.name for path in (exact_run / "profile").iterdir()}
    assert files == {"step_2_rank0.json.gz", "step_2_rank0.txt"}
    text = (exact_run / "profile" / "step_2_rank0.txt").read_text()
    for name in ("rollout", "update", "publish", "save", "forward", "backward", "optimizer", "log-prob"):
        assert any(line.strip().startswith(name) for line in text.splitlines()), name
    from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics

    for row in read_metrics(exact_run / FILE_NAME):
        assert row["perf/flops"] > 0 and 0 < row["perf/mfu"] < 1.5 and row["perf/model_tokens_per_s"] > 0


def test_keys_that_differ(walk_recipes: Path) -> None:
    one, two = (prepare(["recipe=walk", f"run.seed={seed}", f"samples.every={seed}"], walk_recipes) for seed in (1, 2))
    assert differing(one, two, ["samples"]) == ["run.seed (1 there, 2 now)"]
    assert len(differing(one, two, [])) == 2
