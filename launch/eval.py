"""``python -m launch.eval RUN [--step N] [--split test|dev|train] [--tasks N] [--start N] [--samples K] [--json]``:
plays tasks with a run's checkpoint, through the engine and the driver that training uses.

``--json``: one object on stdout, ``{run, step, split, start, tasks, samples, temperature, untrainable, turns_median,
seconds}`` and, each as ``{mean, low, high}`` with its 95 % interval over tasks, ``greedy_pass1`` and, with samples,
``sampled_pass1`` and ``pass_at_2`` to ``pass_at_K``.

Exit status: 0 measured, 2 the run cannot be used (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from launch.errors import expected, show
from launch.output import json_lines

if TYPE_CHECKING:
    from megatron_ext.training.evaluation import EvalResult, Interval
    from megatron_ext.training.saved_run import SavedRun

TRAIN_TASKS = 200


def play(saved: SavedRun, split: str, start: int, count: int, samples: int, temperature: float) -> EvalResult:
    """Evaluates on ``count`` tasks of ``split`` from number ``start``. Progress goes to stderr; logs to the run's
    ``logs/eval``. Raises ``Interrupted`` after a Ctrl-C."""
    import torch

    from megatron_ext.config.saved import as_tree
    from megatron_ext.rollout.driver_process import DriverProcess
    from megatron_ext.tracking.console import ConsoleTracker
    from megatron_ext.training.evaluate import evaluate
    from megatron_ext.training.interrupt import InterruptFlag
    from megatron_ext.training.publish import publish
    from megatron_ext.training.saved_run import loaded_model
    from megatron_ext.training.session import driver_spec, start_engine

    config, logs = saved.config, saved.path / "logs" / "eval"
    torch.set_num_threads(config.run.threads)
    with ExitStack() as stack:
        flag = stack.enter_context(InterruptFlag())
        nothing_kept = Path(stack.enter_context(TemporaryDirectory()))
        driver = DriverProcess(driver_spec(config, nothing_kept, logs))
        stack.callback(driver.close)
        tasks = driver.tasks(config.tasks.environment, split, count, start)
        engine = start_engine(config, saved.hf, logs)
        stack.callback(engine.close)
        driver.open(engine.connect(), saved.tokenizer)
        with loaded_model(saved) as chunks:
            publish(engine, chunks, saved.hf, 0)
        console = ConsoleTracker()
        console.start(saved.path, as_tree(config), None)
        stack.callback(console.finish, {})
        console.phase("evaluate", len(tasks) * (2 if samples else 1))
        return evaluate(
            driver,
            tasks,
            split,
            samples=samples,
            temperature=temperature,
            progress=console.advance,
            check=flag.check,
        )


def intervals(result: EvalResult) -> dict[str, Interval]:
    """What is reported, each with its interval over tasks."""
    from megatron_ext.training.evaluation import mean_interval, pass_at_k

    shown = {"greedy_pass1": result.greedy_interval()}
    samples = result.sampled.shape[1]
    for k in range(1, samples + 1):
        shown["sampled_pass1" if k == 1 else f"pass_at_{k}"] = mean_interval(pass_at_k(result.sampled, k))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.eval", description="Evaluates a run's checkpoint on tasks.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, such as runs/quickstart")
    parser.add_argument("--step", type=int, help="checkpoint (default: the last; 0: what RL started from)")
    parser.add_argument("--split", choices=("test", "dev", "train"), default="test", help="default: test")
    parser.add_argument(
        "--tasks", type=int, metavar="N", help=f"how many (default: as the run's own; {TRAIN_TASKS} of train)"
    )
    parser.add_argument("--start", type=int, default=0, metavar="N", help="number of the first task (default: 0)")
    parser.add_argument("--samples", type=int, metavar="K", help="sampled episodes a task (default: as the run's own)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of the sampled ones (default: as the run's own)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
    options = parser.parse_args(argv)
    for name, value, least in (
        ("tasks", options.tasks, 1),
        ("start", options.start, 0),
        ("samples", options.samples, 0),
    ):
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    if options.temperature is not None and options.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {options.temperature:g}; greedy episodes are always played")
    with ExitStack() as stack:
        write = stack.enter_context(json_lines()) if options.json else None
        from megatron_ext.training.interrupt import Interrupted
        from megatron_ext.training.saved_run import open_saved

        began = time.monotonic()
        try:
            saved = open_saved(options.run, options.step)
            config = saved.config
            own = {"test": config.tasks.test_tasks, "dev": config.tasks.dev_tasks, "train": TRAIN_TASKS}
            count = own[options.split] if options.tasks is None else options.tasks
            samples = config.evaluation.samples if options.samples is None else options.samples
            temperature = config.evaluation.temperature if options.temperature is None else options.temperature
            result = play(saved, options.split, options.start, count, samples, temperature)
        except Interrupted:
            print("interrupted; nothing was measured", file=sys.stderr)
            return 130
        except expected() as error:
            return show(error)
        report: dict[str, Any] = {
            "run": str(saved.path.resolve()),
            "step": saved.step,
            "split": options.split,
            "start": options.start,
            "tasks": len(result.tasks),
            "samples": samples,
            "temperature": temperature,
            "untrainable": result.lost,
            "turns_median": result.summary()[f"eval/{options.split}/turns_median"],
            "seconds": round(time.monotonic() - began, 1),
        }
        shown = intervals(result)
        if write is None:
            print_table(report, shown)
        else:
            write(report | {name: {k: v for k, v in asdict(i).items() if k != "n"} for name, i in shown.items()})
    return 0


def print_table(report: dict[str, Any], shown: dict[str, Interval]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"step {report['step']}, {report['tasks']} {report['split']} tasks from number {report['start']}",
        title_justify="left",
        caption=f"{report['turns_median']:g} model turns (median), {report['untrainable']} episodes lost to the "
        f"environment, {report['seconds']:.0f} s",
        caption_justify="left",
    )
    table.add_column("success")
    table.add_column("%", justify="right")
    table.add_column("95 % interval over tasks", justify="right")
    for name, interval in shown.items():
        label = {
            "greedy_pass1": "greedy pass@1",
            "sampled_pass1": f"sampled pass@1 (temperature {report['temperature']:g})",
        }.get(name, f"sampled pass@{name.removeprefix('pass_at_')}")
        table.add_row(label, f"{100 * interval.mean:.1f}", f"{100 * interval.low:.1f} to {100 * interval.high:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
