"""Refuses impossible configurations before anything is allocated: a pure function from a configuration to lines.

Here is what keys say together. ``ranges.py`` judges each key by itself, ``plug_points.py`` what only the plug points
know, ``models.backends.resolve_backend`` the back ends and ``models.hf_config`` the model's own fields.

Invariants (``tests/config/test_validate.py``):

1. Complete, and nothing is started or written: every problem is returned, not the first.
2. A line names the keys and their values, what is impossible about them, and so what to change.
3. A configuration with no problem gives the empty list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from pathlib import PurePath
from typing import Any

from megatron_ext.config import plug_points, ranges
from megatron_ext.config.instantiate import InstantiateError, import_target
from megatron_ext.config.schema import Config
from megatron_ext.config.signature import Signature
from megatron_ext.models.families import FAMILIES
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.vocab import VocabRows
from megatron_ext.tracking.names import NEITHER, MetricNameError, lookup


def problems(cfg: Config, hf: HFConfig | None, world_size: int = 1) -> list[str]:
    """One line a problem. ``hf`` is the model's HF configuration (None: not readable, its checks are left out);
    ``world_size`` the number of training ranks."""
    return [
        *_run(cfg),
        *ranges.problems(cfg),
        *_parallel(cfg, world_size),
        *(_model(cfg, hf) if hf is not None else ()),
        *_batch(cfg, world_size),
        *_rollout(cfg, hf),
        *plug_points.problems(cfg, hf),
    ]


def _run(cfg: Config) -> Iterator[str]:
    name = cfg.run.name
    if name in ("", ".", "..") or PurePath(name).name != name:
        yield f"run.name={name!r}: names a folder inside run.root, so it holds no slash; run.root says where that is"
    if cfg.run.deterministic and cfg.backend.device == "cuda":
        yield "run.deterministic=true: repeats exactly on backend.device=cpu only, not on cuda"
    if cfg.run.deterministic and not _takes(cfg.rollout.engine, "batch_invariant"):
        yield (
            f"run.deterministic=true: rollout.engine={cfg.rollout.engine.get('_target_')} cannot decode independently "
            "of its batch (it takes no batch_invariant)"
        )
    if cfg.checkpoint.best:
        yield from _best(cfg.checkpoint.best)
    yield from _profile(cfg)


def _profile(cfg: Config) -> Iterator[str]:
    steps = cfg.profile.steps
    if not steps:
        return
    shown = f"profile.steps=[{','.join(map(str, steps))}]"
    if len(steps) != 2:
        yield f"{shown}: needs the first and the last step to record, such as [2,3] (or [] for none)"
    elif not 1 <= steps[0] <= steps[1]:
        yield f"{shown}: steps count from 1, and the first must not come after the last"
    elif steps[1] > cfg.run.steps:
        yield f"{shown}: the run ends with step {cfg.run.steps} (run.steps)"


def _takes(entry: Mapping[str, Any], argument: str) -> bool:
    """Whether a plug point takes an argument; one that cannot be read has its own problem."""
    try:
        accepts = Signature.of(import_target(str(entry.get("_target_")), ""))
    except (InstantiateError, ValueError, TypeError):
        return True
    return accepts.anything or argument in accepts.names


def _best(name: str) -> Iterator[str]:
    try:
        better = lookup(name).better
    except MetricNameError as error:
        yield f"checkpoint.best={name}: {error}"
        return
    if better == NEITHER:
        yield f"checkpoint.best={name}: more of it is neither better nor worse; name a metric that is, or leave it out"


def _parallel(cfg: Config, world: int) -> Iterator[str]:
    p = cfg.parallel
    if min(p.tensor, p.pipeline, p.virtual_pipeline, p.expert, p.expert_tensor, p.context) < 1:
        return  # ranges has said so
    ranks = p.tensor * p.pipeline * p.context
    if world % ranks:
        yield (
            f"parallel.tensor x pipeline x context = {p.tensor} x {p.pipeline} x {p.context} = {ranks}: "
            f"does not divide the {world} training ranks"
        )
    experts = p.expert_tensor * p.expert * p.pipeline
    if world % experts:
        yield (
            f"parallel.expert_tensor x expert x pipeline = {p.expert_tensor} x {p.expert} x {p.pipeline} = {experts}: "
            f"does not divide the {world} training ranks"
        )
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        yield f"parallel.virtual_pipeline={p.virtual_pipeline}: needs parallel.pipeline above 1"
    if p.sequence and p.tensor == 1:
        yield "parallel.sequence=true: needs parallel.tensor above 1"
    if p.context > 1 and cfg.model.max_context % (2 * p.context):
        yield (
            f"model.max_context={cfg.model.max_context}: must be a multiple of 2 x parallel.context = {2 * p.context} "
            "(each rank holds two chunks of a row)"
        )


def _model(cfg: Config, hf: HFConfig) -> Iterator[str]:
    p = cfg.parallel

    def divides(key: str, size: int, count: int, what: str, field: str) -> Iterator[str]:
        if size >= 1 and count % size:
            yield f"{key}={size}: does not divide the model's {count} {what} ({hf.traits.entry(field)})"

    yield from divides("parallel.tensor", p.tensor, hf.heads, "attention heads", "heads")
    yield from divides("parallel.tensor", p.tensor, hf.kv_heads, "key-value groups", "kv_heads")
    if not all(hf.moe_pattern):
        yield from divides("parallel.tensor", p.tensor, hf.intermediate, "columns of the MLP", "intermediate")
    if any(hf.moe_pattern):
        columns, shared = hf.moe_intermediate, hf.shared_intermediate
        yield from divides("parallel.expert", p.expert, hf.num_experts, "experts", "num_experts")
        yield from divides(
            "parallel.expert_tensor", p.expert_tensor, columns, "columns of an expert", "moe_intermediate"
        )
        yield from divides("parallel.tensor", p.tensor, shared, "columns of the shared experts", "shared_experts")
        if p.tensor > 1 and not p.sequence:
            yield (
                f"parallel.tensor={p.tensor}: training a Mixture-of-Experts model with tensor parallelism needs "
                "parallel.sequence=true"
            )
    else:
        yield from _without_experts(cfg, hf)
    chunks = p.pipeline * p.virtual_pipeline
    if chunks >= 1 and hf.layers % chunks:
        factors = f"{p.pipeline} x {p.virtual_pipeline} = {chunks}"
        yield f"parallel.pipeline x virtual_pipeline = {factors}: does not divide the model's {hf.layers} layers"
    yield from _vocabulary(cfg, hf)
    longest = hf.max_position_embeddings
    if cfg.model.max_context > longest:
        yield f"model.max_context={cfg.model.max_context}: the model has {longest} positions (max_position_embeddings)"


def _vocabulary(cfg: Config, hf: HFConfig) -> Iterator[str]:
    """Rows that tensor-parallel ranks cannot share out. A tokenizer that is still to be learned may have any size."""
    multiple, tensor = cfg.model.vocab_multiple, cfg.parallel.tensor
    if multiple < 1 or tensor < 1:
        return  # ranges has said so
    if cfg.model.weights:
        if why := VocabRows(hf.vocab, multiple).why_not(tensor):
            yield why
    elif not cfg.model.tokenizer and multiple % tensor:
        yield (
            f"model.vocab_multiple={multiple}: must be a multiple of parallel.tensor={tensor} where the tokenizer is "
            f"learned, as its size is not known before; set model.vocab_multiple={lcm(multiple, tensor)}"
        )


def _without_experts(cfg: Config, hf: HFConfig) -> Iterator[str]:
    """What a model without experts cannot have: one cause and one line, with every key to set."""
    p, rollout, warm, router = cfg.parallel, cfg.rollout, cfg.warm_start, cfg.model.router
    asked = [
        ("parallel.expert", p.expert, "1", p.expert > 1),
        ("parallel.expert_tensor", p.expert_tensor, "1", p.expert_tensor > 1),
        ("rollout.record_routing", "true", "false", rollout.record_routing),
        ("rollout.replay_routing", "true", "false", rollout.replay_routing),
        ("model.aux_loss_coefficient", cfg.model.aux_loss_coefficient, "0", cfg.model.aux_loss_coefficient > 0),
        (
            *("warm_start.aux_loss_coefficient", warm.aux_loss_coefficient, "0"),
            warm.enabled and warm.aux_loss_coefficient > 0,
        ),
        ("model.router", router.get("_target_"), "{}", bool(router) and not plug_points.is_default_router(router)),
    ]
    wrong = [(key, value, right) for key, value, right, on in asked if on]
    if wrong:
        having = " or ".join(name for name, family in FAMILIES.items() if family.experts is not None)
        yield (
            f"{', '.join(f'{key}={value}' for key, value, _ in wrong)}: the model has no experts (model_type "
            f"{hf.family}); set {' '.join(f'{key}={right}' for key, _, right in wrong)}, or choose a model of {having}"
        )


def _batch(cfg: Config, world: int) -> Iterator[str]:
    b, p, tasks = cfg.batch, cfg.parallel, cfg.tasks
    if b.trajectories_per_task < 2 and cfg.credit.normalize in ("std", "mean"):
        yield (
            f"batch.trajectories_per_task={b.trajectories_per_task}: credit.normalize={cfg.credit.normalize} compares "
            "the trajectories of a group, so it needs at least 2 (or credit.normalize=none)"
        )
    if (
        b.trajectories_per_task <= cfg.credit.std_ddof
        and cfg.credit.normalize == "std"
        and b.trajectories_per_task >= 2
    ):
        yield f"credit.std_ddof={cfg.credit.std_ddof}: needs more than {cfg.credit.std_ddof} trajectories a task"
    trajectories = b.tasks_per_step * b.trajectories_per_task
    factors = f"{b.tasks_per_step} x {b.trajectories_per_task} = {trajectories}"
    product = f"batch.tasks_per_step x trajectories_per_task = {factors}"
    if b.optimizer_steps_per_batch >= 1 and trajectories % b.optimizer_steps_per_batch:
        yield f"{product}: not divisible by batch.optimizer_steps_per_batch={b.optimizer_steps_per_batch}"
    ranks = p.tensor * p.pipeline * p.context
    data_parallel = world // ranks if ranks >= 1 and world % ranks == 0 else 1
    if trajectories % data_parallel:
        yield f"{product}: not divisible by the {data_parallel} data-parallel ranks"
    if 1 <= tasks.train_tasks < b.tasks_per_step:
        yield (
            f"tasks.train_tasks={tasks.train_tasks}: the task set is shorter than a step "
            f"(batch.tasks_per_step={b.tasks_per_step})"
        )
    longest = min(b.tokens_per_row, cfg.model.max_context) if b.tokens_per_row > 0 else cfg.model.max_context
    if b.tokens_per_microbatch < longest:
        yield (
            f"batch.tokens_per_microbatch={b.tokens_per_microbatch}: a row may have {longest} tokens "
            "(model.max_context, or batch.tokens_per_row when set)"
        )
    if b.share_prefixes:
        from megatron_ext.models.backends import wants_transformer_engine  # it imports torch

        reason = "batch.share_prefixes=true: "
        if p.context > 1:
            yield f"{reason}parallel.context={p.context} cuts rows over ranks; turn one of the two off"
        if wants_transformer_engine(cfg.backend):
            yield (
                f"{reason}backend.layer_spec={cfg.backend.layer_spec} is Transformer Engine, whose attention takes no "
                "tree; set backend.layer_spec=local or turn it off"
            )
        if cfg.model.aux_loss_coefficient > 0:
            yield (
                f"{reason}model.aux_loss_coefficient={cfg.model.aux_loss_coefficient} balances experts over every "
                "row's tokens, shared ones included; turn one of the two off"
            )
    e = cfg.evaluation
    if (e.before or e.after) and tasks.test_tasks < 1:
        yield f"tasks.test_tasks={tasks.test_tasks}: evaluation.before or after needs at least 1"
    if e.every > 0 and tasks.dev_tasks < 1:
        yield f"tasks.dev_tasks={tasks.dev_tasks}: evaluation.every={e.every} needs at least 1"
    if e.samples > 0 and not e.temperature > 0:
        yield f"evaluation.temperature={e.temperature}: sampled evaluation needs a temperature above 0"
    w = cfg.warm_start
    if w.enabled and w.max_epochs < w.min_epochs:
        yield f"warm_start.max_epochs={w.max_epochs}: below warm_start.min_epochs={w.min_epochs}"
    if w.enabled and w.target_success > 0 and tasks.dev_tasks < w.gate_tasks:
        yield f"warm_start.gate_tasks={w.gate_tasks}: the gate plays dev tasks, and tasks.dev_tasks={tasks.dev_tasks}"


def _rollout(cfg: Config, hf: HFConfig | None) -> Iterator[str]:
    r = cfg.rollout
    if not r.temperature > 0:
        yield f"rollout.temperature={r.temperature}: training samples, so it must be above 0"
    if not 0 < r.top_p <= 1:
        yield f"rollout.top_p={r.top_p}: must be above 0 and at most 1"
    if r.max_new_tokens >= cfg.model.max_context:
        yield (
            f"rollout.max_new_tokens={r.max_new_tokens}: leaves no room for a prompt in "
            f"model.max_context={cfg.model.max_context}"
        )
    budget = cfg.harness.get("context_budget")
    if isinstance(budget, int) and budget >= cfg.model.max_context:
        yield (
            f"harness.context_budget={budget}: a dialogue is compressed before it is full, so the budget must leave "
            f"room for an observation and a summary in model.max_context={cfg.model.max_context}"
        )
    if r.replay_routing and not r.record_routing and (hf is None or any(hf.moe_pattern)):
        yield "rollout.replay_routing=true: nothing is recorded; set rollout.record_routing=true"
    if not cfg.environments:
        yield "environments: none; name at least one (environments.NAME._target_=...)"
    elif cfg.tasks.environment not in cfg.environments:
        yield f"tasks.environment={cfg.tasks.environment}: not among environments ({', '.join(cfg.environments)})"
    if not cfg.rewards:
        yield "rewards: none; nothing would be learned"
    if not cfg.loss.terms:
        yield "loss.terms: none; nothing would be learned"
