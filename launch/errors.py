"""What a user can cause and mend: these exceptions are shown as lines, without a traceback."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.config.compose import ConfigError
from megatron_ext.training.ranks.link import RankLost


def expected() -> tuple[type[Exception], ...]:
    """The exceptions of every part. A function, because importing them all loads the training stack."""
    from megatron_ext.config.instantiate import InstantiateError
    from megatron_ext.credit.protocol import CreditError
    from megatron_ext.environments.splits import NotEnoughTasks
    from megatron_ext.environments.task_file import TaskFileError
    from megatron_ext.harness.protocol import HarnessError
    from megatron_ext.harness.template import TemplateError
    from megatron_ext.harness.tokenizer import TokenizerError
    from megatron_ext.models.backends import BackendError
    from megatron_ext.models.build import BuildError
    from megatron_ext.models.hf_config import HFConfigError
    from megatron_ext.models.hf_tensors import WeightError
    from megatron_ext.models.parallel import ParallelError
    from megatron_ext.report.run_data import ReportError
    from megatron_ext.rollout.demonstrations import DemonstrationError
    from megatron_ext.rollout.driver import DriverError
    from megatron_ext.rollout.engine import EngineError
    from megatron_ext.rollout.journal import JournalError
    from megatron_ext.rollout.sources import TaskSetError
    from megatron_ext.tracking.jsonl import MetricsFileError
    from megatron_ext.training.checkpoints.checkpoint import CheckpointError
    from megatron_ext.training.folder import FolderError
    from megatron_ext.training.step_replay.kept_step import KeptStepError
    from megatron_ext.trajectory.packing import PackingError
    from megatron_ext.trajectory.store import StoreError

    return (
        *(ConfigError, InstantiateError, BackendError, HFConfigError, WeightError, BuildError, ParallelError),
        *(FolderError, CheckpointError, DriverError, EngineError, TemplateError, TokenizerError, NotEnoughTasks),
        *(TaskFileError, TaskSetError, JournalError, StoreError, MetricsFileError, PackingError, HarnessError),
        *(DemonstrationError, ReportError, KeptStepError, CreditError),
    )


def is_first() -> bool:
    """Whether this process speaks for its job: the only one, or rank 0 of those a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def show(error: Exception) -> int:
    """Prints ``error`` on stderr, one line a problem, and returns the exit status for bad input."""
    problems = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
    if is_first():  # each rank finds the same
        for line in problems:
            print(f"error: {line}", file=sys.stderr)
    _tell_launcher(problems)
    return 2


def _tell_launcher(problems: Sequence[str]) -> None:
    """Under ``torchrun``, whose own summary comes after everything else: what ended this rank, where it looks for it
    (the format of ``torch.distributed.elastic.multiprocessing.errors``)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = {"message": "\n".join(problems), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


def status(error: BaseException) -> int:
    """Tells the user what ended a command, and returns its exit status; what nobody expected is raised again."""
    if isinstance(error, KeyboardInterrupt):
        if is_first():
            print("stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    if isinstance(error, RankLost):  # told already, by one of the ranks
        return 1
    if isinstance(error, ConfigError):  # answered before the training stack is loaded for the other kinds
        return show(error)
    if isinstance(error, expected()):
        return show(error)
    raise error
