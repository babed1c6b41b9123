"""Rows, intervals and files of the learning table; a table of real runs that fail, are resumed and get longer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from launch import table
from launch.table_report import markdown, plot, read_arm, running_mean
from launch.table_report import table as make_table
from megatron_ext.config.compose import ConfigError
from megatron_ext.training.evaluate import save_result
from megatron_ext.training.evaluation import EvalResult

TINY = [
    "recipe=quickstart",
    "environments.game={_target_:tests.helpers.worlds.Walk,length:2}",
    *("run.steps=2", "run.threads=1", "tasks.train_tasks=16", "tasks.dev_tasks=8", "tasks.test_tasks=12"),
    *("tokenizer.corpus_tasks=4", "tokenizer.vocab_size=300", "tokenizer.phrases=[]", "batch.tasks_per_step=4"),
    *("rollout.max_turns=4", "rollout.max_new_tokens=4", "warm_start.demonstrations=64", "warm_start.max_epochs=3"),
    *("warm_start.min_epochs=0", "warm_start.target_success=0", "warm_start.gate_tasks=8"),
    *("warm_start.trajectories_per_step=8", "tracking.wandb=null"),
]


def evaluation(name: str, solved: int, tasks: int = 100, start: int = 0) -> EvalResult:
    """``solved`` of ``tasks`` greedily, and one of two samples of each."""
    greedy = np.arange(tasks) < solved
    sampled = np.stack([np.ones(tasks, dtype=bool), np.zeros(tasks, dtype=bool)], axis=1)
    ids = tuple(f"t/{start + i}" for i in range(tasks))
    return EvalResult(name, ids, greedy, sampled, np.full(tasks, 4.0), greedy.astype(float))


def finished_run(folder: Path, before: int, after: int, start: int = 0, steps: int = 40) -> Path:
    """What a run leaves behind that the table reads."""
    folder.mkdir(parents=True)
    for name, solved in (("before", before), ("after", after)):
        save_result(folder / "evaluations" / f"{name}.json", evaluation(name, solved, start=start))
    (folder / "result.json").write_text(json.dumps({"steps": steps}))
    rng = np.random.default_rng(before + after)
    curve = np.clip(np.linspace(before, after, steps) / 100 + rng.normal(0, 0.05, steps), 0, 1)
    lines = [{"step": 0, "eval/before/tasks": 100.0}]
    lines += [{"step": i + 1, "reward/success": float(v)} for i, v in enumerate(curve)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_rows_means_and_files(tmp_path: Path) -> None:
    gains = {1: (25, 70), 2: (30, 64), 3: (22, 58)}
    arms = [read_arm(finished_run(tmp_path / f"{s}", *gains[s]), s, False, 10.0 + s) for s in gains]
    arms += [read_arm(finished_run(tmp_path / f"{s}c", gains[s][0], gains[s][0] + 2), s, True, 9.0) for s in gains]
    made = make_table("quickstart", ["recipe=quickstart", "run.steps=40"], arms)
    assert [(r.seed, r.before, r.after, r.steps, r.minutes) for r in made.rows] == [
        (1, 0.25, 0.70, 40, 11.0),
        (2, 0.30, 0.64, 40, 12.0),
        (3, 0.22, 0.58, 40, 13.0),
    ]
    first = made.rows[0]
    # Paired: 45 tasks rose and none fell, so the interval is that of a share of 0.45 over 100 tasks.
    half = 1.96 * (0.45 * 0.55 / 100) ** 0.5
    assert first.gain == pytest.approx(0.45)
    assert first.gain_low == pytest.approx(0.45 - half, abs=0.015)
    assert first.gain_high == pytest.approx(0.45 + half, abs=0.015)
    assert made.mean("gain") == pytest.approx((0.45 + 0.34 + 0.36) / 3)
    assert made.mean("control_gain") == pytest.approx(0.02)
    assert made.as_json()["mean"]["after"] == pytest.approx(0.64)

    text = markdown(made)
    lines = text.splitlines()
    assert "100 of them" in lines[0] and "`run.steps=40`" in lines[0]
    assert len({line.count("|") for line in lines[2:]}) == 1 and len(lines) == 2 + 2 + 3 + 1
    assert "+0.450 [" in lines[4] and lines[-1].split("|")[1].strip() == "mean"
    plot(made, arms, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")

    alone = make_table("quickstart", [], arms[:1])
    assert alone.rows[0].control_gain is None and "control" not in markdown(alone)
    assert alone.mean("control_gain") is None


def test_runs_on_different_tasks_make_no_table(tmp_path: Path) -> None:
    arms = [read_arm(finished_run(tmp_path / str(s), 20, 60, start=s), s, False, None) for s in (1, 2)]
    with pytest.raises(ConfigError, match="different tasks"):
        make_table("quickstart", [], arms)


def test_running_mean_looks_back() -> None:
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seeds", "1"], "recipe="),
        (["recipe=quickstart"], "--seeds"),
        (["recipe=quickstart", "--seeds", "1", "1"], "differ"),
        (["recipe=quickstart", "--seeds", "1", "--jobs", "0"], "--jobs"),
        (["recipe=quickstart", "--seeds", "1", "run.stepss=3"], "run.steps"),
        (["recipe=quickstart", "--seeds", "1", "run.seed=3"], "run.seed=3: the table sets this key"),
        (["recipe=quickstart", "--seeds", "1", "evaluation.before=false"], "evaluation.before"),
    ],
)
def test_bad_input_before_anything_starts(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = table.main([*argv, "--root", str(tmp_path / "root")])
    except SystemExit as stopped:  # argparse's way out
        code = int(stopped.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err
    assert not (tmp_path / "root").exists()


def test_a_control_waits_for_its_seeds_warm_start(tmp_path: Path) -> None:
    jobs = table.plan(TINY, [1, 2], True, tmp_path)
    assert [(job.name, job.after) for job in jobs] == [
        ("seed_1", None),
        ("seed_2", None),
        ("seed_1_control", "seed_1"),
        ("seed_2_control", "seed_2"),
    ]
    assert {job.config.warm_start.cache for job in jobs} == {str(tmp_path / "warm_starts")}
    assert [job.config.control.permute_rewards for job in jobs] == [False, False, True, True]


@pytest.mark.slow
def test_real_runs_fail_resume_and_are_tabled(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    argv = [*TINY, "--seeds", "1", "--control", "--root", str(tmp_path)]
    folder = tmp_path / "quickstart"
    (folder / "seed_1_control").mkdir(parents=True)
    (folder / "seed_1_control" / "note.txt").write_text("somebody's own file")
    assert table.main(argv) == 1
    captured = capfd.readouterr()
    log = folder / "logs" / "seed_1_control.log"
    said = rf"error: seed_1_control failed with exit status [12], see {re.escape(str(log))}"
    assert re.search(said, captured.err)
    assert captured.out == "" and log.read_text()
    assert not (folder / "table.md").exists()

    (folder / "seed_1_control" / "note.txt").unlink()
    kept = (folder / "seed_1" / "result.json").stat().st_mtime_ns
    assert table.main(argv) == 0
    captured = capfd.readouterr()
    assert "seed_1: finished before, kept" in captured.err
    assert (folder / "seed_1" / "result.json").stat().st_mtime_ns == kept
    row = json.loads((folder / "table.json").read_text())["rows"][0]
    assert row["steps"] == 2 and row["minutes"] > 0 and row["control_gain"] is not None
    assert (folder / "table.md").read_text().strip() in captured.out
    one, other = (
        json.loads((folder / n / "evaluations/before.json").read_text()) for n in ("seed_1", "seed_1_control")
    )
    assert one == other, "the control starts from its seed's warm start"
    assert len(list((folder / "warm_starts").iterdir())) == 1

    # More steps: the same runs go on from their checkpoints.
    assert table.main([a.replace("run.steps=2", "run.steps=3") for a in argv if a != "--control"]) == 0
    assert json.loads((folder / "table.json").read_text())["rows"][0]["steps"] == 3
    assert "resumed from step 2" in (folder / "logs" / "seed_1.log").read_text()
