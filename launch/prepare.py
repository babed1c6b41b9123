"""From a command line to a configuration that was checked in every way that needs no device.

Invariants (``tests/launch/test_train.py``, ``tests/launch/test_refused_run.py``):

1. Every problem is reported, one line each, before anything is allocated.
2. What only the environment knows is asked of it where it matters, of a configuration that has no other problem; its
   answer too comes before a run makes its folder.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.paths import MEGATRON_CORE, RECIPES
from megatron_ext.config import needs
from megatron_ext.config.compose import ConfigError, collect
from megatron_ext.config.schema import Config
from megatron_ext.config.validate import problems
from megatron_ext.environments.pool import EnvironmentFailed, EnvironmentPool, PoolError
from megatron_ext.harness.protocol import HarnessError
from megatron_ext.harness.template import TemplateError, load_codec
from megatron_ext.models.backends import BackendError, resolve_backend
from megatron_ext.models.hf_config import HFConfig, HFConfigError, load_hf_config
from megatron_ext.models.hf_io import SafetensorsReader
from megatron_ext.models.hf_tensors import WeightError
from megatron_ext.models.vocab import VocabRows


def prepare(argv: Sequence[str], recipes: Path = RECIPES) -> Config:
    """The checked configuration of ``argv``. Raises ``ConfigError`` with every problem."""
    cfg, found = collect(argv, recipes)
    if cfg is not None:
        hf = _hf_config(cfg, found)
        found += problems(cfg, hf, ranks(found))
        if hf is not None:
            found += _file_problems(cfg, hf)
        try:
            resolve_backend(cfg.backend)
        except BackendError as error:
            found += str(error).splitlines()
        found = found or _environment_problems(cfg)
    if cfg is None or found:
        raise ConfigError(found)
    return cfg


def prepare_elsewhere(argv: Sequence[str], recipes: Path = RECIPES) -> tuple[Config, int]:
    """``prepare`` for a machine that need not be this one: with a GPU and its packages, and as many ranks as the layout
    asks for at least, which are returned too. Weights and tokenizer are not looked for. Raises ``ConfigError``."""
    cfg, found = collect(argv, recipes)
    if cfg is None:
        raise ConfigError(found)
    p = cfg.parallel
    dense, experts = p.tensor * p.pipeline * p.context, p.expert * p.expert_tensor * p.pipeline
    world = math.lcm(max(dense, 1), max(experts, 1))
    hf = _hf_config(cfg, found)
    found += problems(cfg, hf, world)
    try:
        resolve_backend(cfg.backend, cuda_available=lambda: True, installed=lambda package: True)
    except BackendError as error:
        found += str(error).splitlines()
    if found:
        raise ConfigError(found)
    return cfg, world


def ranks(found: list[str]) -> int:
    """Training ranks: ``torchrun`` and ``srun`` wrappers say how many there are; alone, this is the only one."""
    said = os.environ.get("WORLD_SIZE", "1")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    found.append(f"WORLD_SIZE={said!r} in the environment: the number of training ranks, as a launcher sets it")
    return 1


def _hf_config(cfg: Config, found: list[str]) -> HFConfig | None:
    """The model's HF configuration when it can be used; otherwise what is wrong with it is added to ``found``."""
    try:
        return load_hf_config(cfg.model.hf_config)
    except HFConfigError as error:
        found += str(error).splitlines()
        return None


def _file_problems(cfg: Config, hf: HFConfig) -> list[str]:
    """What is wrong with the weights and the tokenizer that the configuration names; of weights, headers are read."""
    found: list[str] = []
    weights, tokenizer = cfg.model.weights, cfg.model.tokenizer
    if weights:
        try:
            SafetensorsReader(weights).check(hf)
        except (WeightError, HFConfigError) as error:
            found.append("; ".join(str(error).splitlines()).replace(":; ", ": "))
        if not tokenizer:
            found.append(f"model.weights={weights}: needs model.tokenizer, the folder of the tokenizer they know")
    if tokenizer:
        try:
            codec = load_codec(Path(tokenizer))
        except TemplateError as error:
            return [*found, " ".join(str(error).split())]
        if weights and hf.vocab < codec.vocab_size:
            found.append(
                f"model.tokenizer={tokenizer}: has {codec.vocab_size} ids, more than the vocabulary of {hf.vocab} of "
                "model.weights; name the folder that belongs to them"
            )
        if not weights and min(cfg.model.vocab_multiple, cfg.parallel.tensor) >= 1:
            why = VocabRows(codec.vocab_size, cfg.model.vocab_multiple).why_not(cfg.parallel.tensor)
            found += [why] if why else []
    return found


def _environment_problems(cfg: Config) -> list[str]:
    """What the environment, once built, says against a sound configuration. Most are not asked: only where something
    reads labels or answers is it built, as a run would, in a process of its own."""
    labels, answers = needs.asks_environment(cfg)
    if not labels and not answers:
        return []
    name, logs = cfg.tasks.environment, Path(tempfile.mkdtemp(prefix="megatron_ext_"))
    only = {name: cfg.environments[name]}
    try:
        with EnvironmentPool(only, workers=1, deadline_s=cfg.rollout.env_deadline_s, log_dir=logs) as pool:
            given, tools = pool.labels(name), pool.tools(name)
            tasks = pool.tasks(name, "train", cfg.tasks.train_tasks) if answers else []
    except (EnvironmentFailed, PoolError) as error:
        text = " ".join(str(error).split())
        if str(logs) not in text:  # else its log is left: the line names it
            shutil.rmtree(logs)
        return [f"environments.{name}: {text}"]
    shutil.rmtree(logs)
    try:
        needs.check_started(cfg, given, tools, tasks)
    except ConfigError as error:
        return list(error.problems)
    except HarnessError as error:
        return str(error).splitlines()
    return []


def half_launched() -> list[str]:
    """An environment that speaks of several ranks and does not say which one this is."""
    if ranks([]) == 1 or all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        return []
    return [
        f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment without RANK, MASTER_ADDR and MASTER_PORT: start "
        "several ranks with torchrun, or unset it"
    ]


def missing_packages() -> list[str]:
    """What must be installed by hand: pip leaves megatron-core out on Python 3.11, whose metadata it does not meet."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return [
            "megatron-core is not installed: pip install --no-deps --ignore-requires-python "
            f"{MEGATRON_CORE} (or run through `bash launch/env`)"
        ]
    return []
