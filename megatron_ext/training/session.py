"""The parts that training, evaluation and export start alike, from a configuration and a run's folder."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.config.schema import Config, OptimizerConfig
from megatron_ext.credit.base import Baseline
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.backends import ResolvedBackend
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.rollout.driver_process import DriverSpec
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.episode import EpisodeLimits
from megatron_ext.training.warm_start.key import warm_start_key, warm_start_parts, warm_start_router

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_ext.training.trainer import Trainer


def driver_spec(config: Config, store: Path, logs: Path) -> DriverSpec:
    """What the rollout driver needs to play the configuration's episodes."""
    rollout = config.rollout
    return DriverSpec(
        environments=config.environments,
        harness=config.harness,
        rewards=config.rewards,
        limits=EpisodeLimits(rollout.max_turns, config.model.max_context, rollout.max_new_tokens),
        concurrency=rollout.concurrency,
        env_workers=rollout.env_workers,
        env_deadline_s=rollout.env_deadline_s,
        engine_deadline_s=rollout.lease_deadline_s,
        run_seed=config.run.seed,
        store=store.resolve(),
        logs=logs.resolve(),
    )


def start_engine(config: Config, hf: HFConfig, logs: Path) -> EngineControl:
    """The configured engine, without weights yet; close it."""
    exact: dict[str, Any] = {"batch_invariant": True} if config.run.deterministic else {}
    engine: EngineControl = instantiate(
        config.rollout.engine,
        hf_config=hf.to_dict(),
        max_context=config.model.max_context,
        threads=config.run.threads,
        log_path=logs / "engine.log",
        **exact,
    )
    return engine


def build_chunks(
    config: Config, hf: HFConfig, backend: ResolvedBackend, aux_loss_coefficient: float | None = None
) -> tuple[list[GPTModel], RouterPolicy]:
    """This rank's model chunks under the router policy, with fresh weights or ``model.weights``.

    Process groups must be up. ``aux_loss_coefficient`` replaces the model's (a warm start has its own).
    """
    # Megatron takes seconds to import, and what only wants a driver does not need it.
    from megatron_ext.models.build import build_model
    from megatron_ext.moe.policies import check_auxiliary_losses

    node, model = config.model.router, config.model
    if aux_loss_coefficient is not None:
        node = warm_start_router(config)
        model = dataclasses.replace(model, aux_loss_coefficient=aux_loss_coefficient)
    router: RouterPolicy = instantiate(node or {"_target_": "megatron_ext.moe.policies.TrainedRouter"})
    chunks = build_model(hf, model, config.parallel, backend, router.config_overrides(), seed=config.run.seed)
    router.apply(chunks)
    check_auxiliary_losses(chunks, model.aux_loss_coefficient)
    return chunks, router


def credit_pipeline(config: Config) -> Pipeline:
    """The credit edits behind the configured baseline."""
    credit = config.credit
    return Pipeline(
        [(n, instantiate(node, skip=("order",))) for n, node in ordered(credit.edits, "credit.edits")],
        baseline=Baseline(
            normalize=credit.normalize,
            std_ddof=credit.std_ddof,
            eps=credit.eps,
            tolerance=credit.filter.tolerance,
        ),
    )


def loss_terms(config: Config) -> dict[str, LossTerm]:
    """The loss terms by name, in their order."""
    return {name: instantiate(node, skip=("order",)) for name, node in ordered(config.loss.terms, "loss.terms")}


class TrainerBuilder:
    """Builds the trainer, for the warm start and for RL alike: same layout, other optimizer settings."""

    def __init__(self, config: Config, hf: HFConfig, backend: ResolvedBackend, stack: ExitStack) -> None:
        from megatron_ext.models.parallel import initialize, shutdown

        self._config, self._hf, self._backend = config, hf, backend
        self.context = initialize(config.parallel, backend, config.run.seed)
        stack.callback(shutdown, self.context)

    def build(
        self, optimizer: OptimizerConfig, aux_loss_coefficient: float | None = None, *, seed: int | None = None
    ) -> Trainer:
        """``seed`` of fresh weights, where it is not ``run.seed``."""
        import torch

        from megatron_ext.training.optimizer import wrap
        from megatron_ext.training.trainer import Trainer

        config = self._config
        if seed is not None:
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=seed))
        torch.manual_seed(config.run.seed)
        chunks, router = build_chunks(config, self._hf, self._backend, aux_loss_coefficient)
        wrapped, megatron_optimizer = wrap(chunks, optimizer, config.parallel, self._backend)
        return Trainer(wrapped, megatron_optimizer, self.context, temperature=config.rollout.temperature, router=router)


def warm_start_folder(config: Config, run: Path, hf: HFConfig) -> Path:
    """Where the warm start of the run in folder ``run`` is kept: there, or in the cache under its key."""
    warm = config.warm_start
    if not warm.cache:
        return run / "warm_start"
    tokenizer = (run / "tokenizer" / "tokenizer.json").read_text()
    key = warm_start_key({"hf": hf.to_dict(), "tokenizer": tokenizer, **warm_start_parts(config)})
    return Path(warm.cache) / key
