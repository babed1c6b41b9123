"""Our side of the end-to-end bench, a process of its own: steps of ``megatron_ext.training`` as any run does them.

``python -m launch.benches._e2e_ours FOLDER NAME SIZE`` trains the run FOLDER/NAME from FOLDER/model and writes
FOLDER/NAME.json. Everything is the real thing: driver process, one environment worker that plays FOLDER/tasks.jsonl
with the user's reward function, engine replicas, coordinator with its journal, store, credit, update, publish. The
only optimizer step of a batch takes its old log-probs from its own forward: there is no scoring pass, as in TRL.
A step's seconds run from one line of metrics to the next, so that no work escapes them.

What is set: no group is filtered, so that all completions are trained; no token ends a turn; one optimizer step and one
micro-batch a batch; Adam; metrics go to ``metrics.jsonl`` alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.benches._e2e_setup import Side, Size, differences, prompts
from megatron_ext.config.compose import build
from megatron_ext.config.schema import Config
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics

PHASES = ("rollout", "scoring", "update", "publish")


def configuration(folder: Path, name: str, size: Size) -> Config:
    """The run FOLDER/NAME."""
    longest = len(prompts(size)[0]) + size.new_tokens + 1  # the end token that closes a turn
    return build(
        {
            "recipe": "bench",
            "run": {
                "name": name,
                "root": str(folder),
                "steps": size.warmup + size.steps,
                "threads": size.threads,
            },
            "model": {
                "hf_config": str(folder / "model"),
                "weights": str(folder / "model"),
                "tokenizer": str(folder / "tokenizer"),
                "max_context": longest + 7 & ~7,
            },
            "backend": {"device": "cpu"},
            "environments": {
                "letters": {
                    "_target_": "megatron_ext.environments.task_file.TaskFile",
                    "path": str(folder / "tasks.jsonl"),
                    "reward": "launch.benches._e2e_setup:letters",
                }
            },
            "tasks": {"environment": "letters", "train_tasks": size.prompts, "dev_tasks": 0, "test_tasks": 0},
            "batch": {
                "tasks_per_step": size.prompts,
                "trajectories_per_task": size.samples,
                "tokens_per_microbatch": size.completions * (longest + 8),
                "share_prefixes": True,
            },
            "rollout": {
                "max_turns": 1,
                "max_new_tokens": size.new_tokens,
                "ignore_stop": True,
                "concurrency": size.completions,
                # Decoding a small model leaves a second thread idle: as many one-threaded replicas as threads.
                "engine": {
                    "_target_": "megatron_ext.rollout.replicas.ReplicatedEngine",
                    "replicas": size.threads,
                    "engine": {"_target_": "megatron_ext.rollout.embedded.engine.EmbeddedEngine"},
                },
            },
            "rewards": {"letters": {"_target_": "megatron_ext.rewards.outcome.StepRewardSum", "weight": 1.0}},
            "credit": {"filter": {"constant_groups": False}},
            "optimizer": {"lr": 1e-4, "warmup_steps": 0},
            "evaluation": {"before": False, "after": False, "samples": 0},
            "checkpoint": {"every": 0, "keep": 1},
            "tracking": {"metrics": {"_target_": "megatron_ext.tracking.jsonl.JsonlTracker"}},
        }
    )


def measured(metrics: Path, size: Size) -> Side:
    """The steps after the warm-up in a run's metrics."""
    rows = read_metrics(metrics)
    seconds = differences([row["progress/minutes"] * 60 for row in rows])[-size.steps :]
    rows = rows[-size.steps :]
    return Side(
        seconds=seconds,
        phases=tuple({phase: row[f"time/{phase}"] for phase in PHASES} for row in rows),
        tokens=tuple(int(row["rollout/tokens"]) for row in rows),
    )


def main() -> None:
    folder, name, size = Path(sys.argv[1]), sys.argv[2], Size.from_json(sys.argv[3])
    from megatron_ext.training.run import train

    result = train(configuration(folder, name, size))
    measured(result.run_dir / FILE_NAME, size).write(folder / f"{name}.json")


if __name__ == "__main__":
    main()
