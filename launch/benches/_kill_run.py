"""One process of the kill bench: the run that is killed, and a tracker that tells the bench where it is.

The run is tiny and has everything that must survive: a byte-level model with fresh weights is rewarded for letters, by
a curriculum that adapts, in two optimizer steps a batch over several micro-batches each, with evaluations.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.benches._e2e_setup import Size, prompts, write_model, write_tokenizer
from megatron_ext.config.compose import build
from megatron_ext.config.schema import Config

SIZE = Size(hidden=32, layers=2, experts=4, top_k=2, expert_hidden=32, prompts=24, samples=4, new_tokens=12, threads=1)
TASKS_PER_STEP = 4


def write_first(folder: Path) -> None:
    """What every run starts from: tokenizer, weights, tasks."""
    write_tokenizer(folder / "tokenizer")
    write_model(folder / "model", folder / "tokenizer", SIZE)
    lines = [
        {"id": str(i), "prompt": text, "split": "dev" if i % 6 == 0 else "train"}
        for i, text in enumerate(prompts(SIZE))
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def configuration(folder: Path, name: str, steps: int, fd: int) -> Config:
    """The run FOLDER/NAME, which tells its phases to the file descriptor ``fd``."""
    return build(
        {
            "recipe": "kill",
            "run": {"name": name, "root": str(folder), "steps": steps, "threads": 1, "deterministic": True},
            "model": {
                "hf_config": str(folder / "model"),
                "weights": str(folder / "model"),
                "tokenizer": str(folder / "tokenizer"),
                "max_context": 64,
            },
            "backend": {"device": "cpu"},
            "environments": {
                "letters": {
                    "_target_": "megatron_ext.environments.task_file.TaskFile",
                    "path": str(folder / "tasks.jsonl"),
                    "reward": "launch.benches._e2e_setup:letters",
                }
            },
            "tasks": {
                "environment": "letters",
                "source": {"_target_": "megatron_ext.rollout.sources.WeightedTasks"},
                "train_tasks": 20,
                "dev_tasks": 4,
                "test_tasks": 0,
            },
            "batch": {
                "tasks_per_step": TASKS_PER_STEP,
                "trajectories_per_task": SIZE.samples,
                "optimizer_steps_per_batch": 2,
                "tokens_per_microbatch": 160,
            },
            "rollout": {"max_turns": 1, "max_new_tokens": SIZE.new_tokens, "record_routing": True},
            "rewards": {"letters": {"_target_": "megatron_ext.rewards.outcome.StepRewardSum", "weight": 1.0}},
            "optimizer": {"lr": 1e-3, "warmup_steps": 0},
            "evaluation": {"every": 3, "before": False, "after": False, "samples": 1},
            "checkpoint": {"every": 2, "keep": 2, "best": "eval/dev/reward_mean"},
            "tracking": {
                "metrics": {"_target_": "megatron_ext.tracking.jsonl.JsonlTracker"},
                "phases": {"_target_": "launch.benches._kill_run.PhaseTracker", "fd": fd},
            },
        }
    )


class PhaseTracker:
    """Writes "phase step" lines to the file descriptor ``fd`` as phases begin. One write a line: a kill tears none."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._step = 0

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        self._step = resumed_from or 0

    def phase(self, name: str, total: int | None = None) -> None:
        os.write(self._fd, f"{name.split()[0]} {self._step}\n".encode())

    def advance(self, done: int, note: str = "") -> None:
        """Progress within a phase is not told."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def finish(self, summary: Mapping[str, Any]) -> None:
        if summary:  # an error leaves none
            os.write(self._fd, b"finished 0\n")


def main() -> None:
    folder, name, steps, fd = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    from megatron_ext.training.run import train

    train(configuration(folder, name, steps, fd))


if __name__ == "__main__":
    main()
