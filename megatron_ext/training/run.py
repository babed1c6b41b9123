"""From a configuration to a finished run: sets everything up, runs the main loop, evaluates, cleans up.

``train(config)`` is the whole job, called on every rank; each does its part.

Invariants (``tests/launch/test_train.py``, ``test_resume.py``, ``test_kill.py``):

1. The same configuration in the same folder continues where the last checkpoint left off.
2. Whatever ends the run, an error or an interrupt, ends what it started; an interrupt saves the last finished step.
3. The policy that RL starts from is evaluated once, before the first step: later weights are never taken for it.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.config.saved import as_tree
from megatron_ext.config.schema import Config
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import ResolvedBackend, resolve_backend
from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.moe.describe import routers_line
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training import deterministic
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.evaluate import load_result, save_result
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.folder import RunFolder, open_folder
from megatron_ext.training.interrupt import Interrupted, InterruptFlag
from megatron_ext.training.loop import train_loop
from megatron_ext.training.measures.idle_steps import IdleSteps
from megatron_ext.training.ranks.ranks import Ranks, joined
from megatron_ext.training.run_state import Run
from megatron_ext.training.set_up import set_up
from megatron_ext.training.warm_start.progress import unfinished_steps


@dataclass(frozen=True)
class RunResult:
    """What ``train`` returns. ``success_*`` is greedy pass@1 on the held-out tasks; None where it was not evaluated.
    ``idle_steps`` is how many of the steps trained nothing, and ``hint`` what helps (empty: nothing is amiss).
    ``kept`` says what the folder holds of an interrupted run. ``report`` is the page that shows the run, on rank 0."""

    success_before: float | None
    success_after: float | None
    steps: int
    seconds: float
    run_dir: Path
    interrupted: bool
    idle_steps: int = 0
    hint: str = ""
    kept: str = ""
    report: Path | None = None


def train(config: Config, recipes: Path | None = None) -> RunResult:
    """Runs the job. Ctrl-C saves a checkpoint of the last finished step and returns ``interrupted=True``.

    ``recipes``: the folder of presets that the run's report compares its configuration with.
    """
    backend = resolve_backend(config.backend)
    with joined(backend.communication) as ranks:
        result = _train(config, backend, ranks)
        # The trackers are done: what a report shows is on disk, and they are not kept waiting by it.
        return dataclasses.replace(result, report=_report(result.run_dir, recipes)) if ranks.leads else result


def _report(run: Path, recipes: Path | None) -> Path | None:
    """The run's ``report.html``; None, and a warning, where it cannot be written: the run has ended well without it."""
    # Imported late: nothing else of a run needs what draws it.
    from megatron_ext.report.render import write_report
    from megatron_ext.report.run_data import ReportError

    try:
        return write_report([run], recipes=recipes)
    except ReportError as error:
        print(f"warning: no report: {error}", file=sys.stderr)
        return None


def _train(config: Config, backend: ResolvedBackend, ranks: Ranks) -> RunResult:
    began = time.monotonic()
    torch.set_num_threads(config.run.threads)
    cpu_platform.tune_allocator()
    # Inside the stack: what ends one rank is told before anything is cleaned up.
    with ExitStack() as stack, ranks.telling():
        folder = _open_folder(config, ranks, stack)
        trackers = ordered(config.tracking, "tracking") if ranks.leads else []
        tracker = TrackerSet({n: instantiate(node, skip=("order",)) for n, node in trackers})
        summary: dict[str, Any] = {}  # filled when there is a result; an error leaves none
        stack.callback(tracker.finish, summary)  # before the start: one that fails leaves others to finish
        found = ranks.led(lambda: checkpoint.list_checkpoints(folder.checkpoints))
        resumed_from = found[-1].step if found else None
        facts = {"provenance": folder.provenance, "routers": _routers(config)}
        tracker.start(folder.path, {**as_tree(config), **facts}, resumed_from)
        stack.enter_context(deterministic.exact(config.run.deterministic, backend))
        flag = InterruptFlag()
        stack.enter_context(flag)
        ranks.listen_to(flag)
        run: Run | None = None
        after: EvalResult | None = None
        interrupted = False
        try:
            run = set_up(config, folder, backend, found, tracker, stack, flag, ranks)
            _evaluate_before(run, folder)
            run.started = time.monotonic()
            # What set-up made stays for the whole run: a full collection that walks it costs a fraction of a second.
            gc.freeze()
            stack.callback(gc.unfreeze)  # the process may go on with another run
            train_loop(run)
            if run.step > 0:
                run.finish_saving()  # out of time ends between two checkpoints
            after = _evaluate_after(run, folder)
        except Interrupted:
            interrupted = True
            if run is not None and run.step > 0:
                run.finish_saving()
        before = ranks.led(lambda: _load_before(folder))
        step = (resumed_from or 0) if run is None else run.step
        idle = IdleSteps(0, 0) if run is None else run.idle_steps()
        result = RunResult(
            success_before=None if before is None else float(before.greedy.mean()),
            success_after=None if after is None else float(after.greedy.mean()),
            steps=step,
            seconds=time.monotonic() - began,
            run_dir=folder.path,
            interrupted=interrupted,
            idle_steps=idle.idle,
            hint=idle.hint(),
            kept=_kept(folder, step) if interrupted else "",
        )
        summary |= {**dataclasses.asdict(result), "run_dir": str(folder.path)}
        del summary["report"]  # not written yet
        if ranks.leads:
            folder.write_json("result.json", summary)
        return result


def _routers(config: Config) -> str:
    """What happens to the routers, in a line; empty for a model without experts."""
    return routers_line(config) if any(load_hf_config(config.model.hf_config).moe_pattern) else ""


def _kept(folder: RunFolder, step: int) -> str:
    """What an interrupted run goes on from."""
    if step:
        return f"saved at step {step}"
    warm = unfinished_steps(folder.path)
    if warm:
        return f"its warm start is saved at step {warm}"
    return "its warm start is kept" if (folder.path / "warm_start.json").exists() else "nothing was trained yet"


def _open_folder(config: Config, ranks: Ranks, stack: ExitStack) -> RunFolder:
    """The run's folder: rank 0 holds it, the others use it once it stands."""
    if ranks.leads:
        folder = open_folder(config)
        stack.callback(folder.close)
        ranks.tell(folder.path)
        return folder
    folder = RunFolder(ranks.tell(Path()), None, {})
    ranks.log = folder.logs / f"rank_{ranks.rank}.log"
    return folder


# -- evaluation ------------------------------------------------------------------------------------------------------
def _load_before(folder: RunFolder) -> EvalResult | None:
    path = folder.evaluations / "before.json"
    return load_result(path) if path.exists() else None


def _evaluate_before(run: Run, folder: RunFolder) -> None:
    """Held-out evaluation of the policy that RL starts from. It is kept in the folder: a resumed run does not repeat
    it, and later weights are never taken for those."""
    if run.step > 0 or not run.config.evaluation.before:
        return
    result = run.ranks.led(lambda: _load_before(folder))
    if result is None:
        result = run.evaluate(lambda lead: lead.test_tasks, "before")
        if run.lead is not None:
            save_result(folder.evaluations / "before.json", result)
    run.tracker.log(0, result.summary())  # also when it was loaded: what a run without a checkpoint logged is dropped


def _evaluate_after(run: Run, folder: RunFolder) -> EvalResult | None:
    if not run.config.evaluation.after:
        return None
    result = run.evaluate(lambda lead: lead.test_tasks, "after")
    if run.lead is not None:
        save_result(folder.evaluations / "after.json", result)
    run.tracker.log(run.step, result.summary())
    return result
