"""Refuses impossible combinations before anything is allocated: a pure function from a configuration to lines.

Back ends are judged by ``models.backends.resolve_backend``, the model's own fields by ``models.hf_config``.

Invariants (``tests/config/test_validate.py``):

1. Complete, and nothing is started or written: every problem is returned, not the first. Plug points that are small
   objects (losses, rewards, harness, credit edits, router, trackers) are built, since only they know what they refuse;
   environments and engines are not.
2. A line names the keys and their values, what is impossible about them, and so what to change.
3. A configuration with no problem gives the empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from pathlib import PurePath
from typing import Any

from megatron_ext.config import keys, targets
from megatron_ext.config.instantiate import InstantiateError, import_target, instantiate
from megatron_ext.config.keys import Kind
from megatron_ext.config.schema import Config, OptimizerConfig
from megatron_ext.config.signature import Signature
from megatron_ext.losses.aggregation import MODES
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.tracking.names import NEITHER, MetricNameError, lookup

# Allowed values of the keys that choose by name.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.init": ("fan_in", "normal"),
    "credit.normalize": ("std", "mean", "none"),
    "loss.aggregation": MODES,
    "rollout.replay_missing": ("error", "live"),
    "optimizer.name": ("adam", "sgd"),
    "optimizer.schedule": ("constant", "cosine", "linear"),
    "warm_start.optimizer.name": ("adam", "sgd"),
    "warm_start.optimizer.schedule": ("constant", "cosine", "linear"),
}

# Smallest allowed value of the keys that count something.
AT_LEAST: Mapping[str, float] = {
    "run.seed": 0,
    "run.steps": 0,
    "run.max_minutes": 0,
    "run.threads": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.expert": 1,
    "parallel.expert_tensor": 1,
    "parallel.context": 1,
    "model.max_context": 2,
    "model.aux_loss_coefficient": 0,
    "tokenizer.corpus_tasks": 1,
    "batch.tasks_per_step": 1,
    "batch.trajectories_per_task": 1,
    "batch.optimizer_steps_per_batch": 1,
    "batch.tokens_per_microbatch": 1,
    "batch.tokens_per_row": 0,
    "rollout.top_k": 0,
    "rollout.max_new_tokens": 1,
    "rollout.max_turns": 1,
    "rollout.concurrency": 1,
    "rollout.env_workers": 1,
    "credit.eps": 0,
    "credit.filter.draw_limit": 1,
    "credit.filter.tolerance": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_grad": 0,
    "warm_start.seed": 0,
    "warm_start.demonstrations": 1,
    "warm_start.min_epochs": 0,
    "warm_start.gate_tasks": 1,
    "warm_start.gate_every": 1,
    "warm_start.trajectories_per_step": 1,
    "warm_start.observation_weight": 0,
    "warm_start.aux_loss_coefficient": 0,
    "tasks.train_tasks": 1,
    "tasks.dev_tasks": 0,
    "tasks.test_tasks": 0,
    "evaluation.every": 0,
    "evaluation.samples": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "samples.every": 0,
    "samples.groups": 0,
}

ABOVE_ZERO = (
    "model.embedding_std",
    "rollout.env_deadline_s",
    "rollout.lease_deadline_s",
    "optimizer.lr",
    "warm_start.optimizer.lr",
)
SHARES = ("optimizer.min_lr_ratio", "warm_start.mistake_rate", "warm_start.target_success")
STRUCTURED, FROZEN = ".StructuredRouter", ".FrozenRouter"  # router policies
ROUTING_LOSSES = ("mutual_information", "consistency")  # their coefficients, arguments of the former
MAX_VOCAB = 2048
MIN_VOCAB = 264  # the special tokens, the 256 bytes, and at least one piece to learn
MAX_SEED = 2**32 - 1  # what every generator takes
ONE_PLUG_POINT = ("harness", "rollout.engine", "tasks.source")  # maps that are one plug point and cannot be empty


def problems(cfg: Config, hf: Mapping[str, Any] | None, world_size: int = 1) -> list[str]:
    """One line a problem. ``hf`` is the model's HF ``config.json`` (None: not readable, its checks are left out);
    ``world_size`` the number of training ranks."""
    return [
        *_run(cfg),
        *_ranges(cfg),
        *_parallel(cfg, world_size),
        *(_model(cfg, hf) if hf is not None else ()),
        *_batch(cfg, world_size),
        *_rollout(cfg),
        *_optimizer("optimizer", cfg.optimizer),
        *_optimizer("warm_start.optimizer", cfg.warm_start.optimizer),
        *_plug_points(cfg),
    ]


def _get(cfg: Config, path: str) -> Any:
    value: Any = cfg
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _run(cfg: Config) -> Iterator[str]:
    name = cfg.run.name
    if name in ("", ".", "..") or PurePath(name).name != name:
        yield f"run.name={name!r}: names a folder inside run.root, so it holds no slash; run.root says where that is"
    for key, seed in (("run.seed", cfg.run.seed), ("warm_start.seed", cfg.warm_start.seed)):
        if seed > MAX_SEED:
            yield f"{key}={seed}: must be at most {MAX_SEED}"
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


def _ranges(cfg: Config) -> Iterator[str]:
    for key in keys.walk(Config):
        if key.kind is Kind.VALUE and isinstance(value := _get(cfg, key.path), float) and value in (inf, -inf):
            yield f"{key.path}={value}: must be finite"
    for path, allowed in CHOICES.items():
        if (value := _get(cfg, path)) not in allowed:
            yield f"{path}={value}: must be one of {', '.join(allowed)}"
    for path, least in AT_LEAST.items():
        if not (value := _get(cfg, path)) >= least:  # written so that NaN fails
            yield f"{path}={value}: must be at least {least:g}"
    for path in ABOVE_ZERO:
        if not (value := _get(cfg, path)) > 0:
            yield f"{path}={value}: must be above 0"
    for path in SHARES:
        if not 0 <= (value := _get(cfg, path)) <= 1:
            yield f"{path}={value}: is a share, 0 to 1"
    if cfg.credit.std_ddof not in (0, 1):
        yield f"credit.std_ddof={cfg.credit.std_ddof}: must be 0 (population) or 1 (sample)"
    if not cfg.model.tokenizer and not MIN_VOCAB <= cfg.tokenizer.vocab_size <= MAX_VOCAB:
        yield (
            f"tokenizer.vocab_size={cfg.tokenizer.vocab_size}: a learned vocabulary has {MIN_VOCAB} to {MAX_VOCAB} "
            "tokens, special tokens and bytes included"
        )


def _parallel(cfg: Config, world: int) -> Iterator[str]:
    p = cfg.parallel
    if min(p.tensor, p.pipeline, p.virtual_pipeline, p.expert, p.expert_tensor, p.context) < 1:
        return  # _ranges has said so
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


def _model(cfg: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    p = cfg.parallel

    def divides(key: str, size: int, field: str, what: str) -> Iterator[str]:
        count = hf.get(field)
        if isinstance(count, int) and size >= 1 and count % size:
            yield f"{key}={size}: does not divide the model's {count} {what} ({field})"

    yield from divides("parallel.tensor", p.tensor, "num_attention_heads", "attention heads")
    yield from divides("parallel.tensor", p.tensor, "num_key_value_heads", "key-value groups")
    if hf.get("num_experts"):
        yield from divides("parallel.expert", p.expert, "num_experts", "experts")
        yield from divides("parallel.expert_tensor", p.expert_tensor, "moe_intermediate_size", "columns of an expert")
        if p.tensor > 1 and not p.sequence:
            yield (
                f"parallel.tensor={p.tensor}: training a Mixture-of-Experts model with tensor parallelism needs "
                "parallel.sequence=true"
            )
    else:
        yield from divides("parallel.tensor", p.tensor, "intermediate_size", "columns of the MLP")
        for key, value in (("expert", p.expert), ("expert_tensor", p.expert_tensor)):
            if value > 1:
                yield f"parallel.{key}={value}: the model has no experts"
        if cfg.model.aux_loss_coefficient > 0:
            yield f"model.aux_loss_coefficient={cfg.model.aux_loss_coefficient}: the model has no experts to balance"
        if cfg.rollout.replay_routing:
            yield "rollout.replay_routing=true: the model has no experts, so no routing to replay"
        if cfg.rollout.record_routing:
            yield "rollout.record_routing=true: the model has no experts, so no routing to record"
        if cfg.model.router.get("_target_", "").endswith(STRUCTURED):
            yield f"model.router={cfg.model.router['_target_']}: the model has no experts, so no routing to structure"
    layers, chunks = hf.get("num_hidden_layers"), p.pipeline * p.virtual_pipeline
    if isinstance(layers, int) and chunks >= 1 and layers % chunks:
        factors = f"{p.pipeline} x {p.virtual_pipeline} = {chunks}"
        yield f"parallel.pipeline x virtual_pipeline = {factors}: does not divide the model's {layers} layers"
    longest = hf.get("max_position_embeddings")
    if isinstance(longest, int) and cfg.model.max_context > longest:
        yield f"model.max_context={cfg.model.max_context}: the model has {longest} positions (max_position_embeddings)"


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


def _rollout(cfg: Config) -> Iterator[str]:
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
    if r.replay_routing and not r.record_routing:
        yield "rollout.replay_routing=true: nothing is recorded; set rollout.record_routing=true"
    if not cfg.environments:
        yield "environments: none; name at least one (environments.NAME._target_=...)"
    elif cfg.tasks.environment not in cfg.environments:
        yield f"tasks.environment={cfg.tasks.environment}: not among environments ({', '.join(cfg.environments)})"
    if not cfg.rewards:
        yield "rewards: none; nothing would be learned"
    if not cfg.loss.terms:
        yield "loss.terms: none; nothing would be learned"


def _optimizer(path: str, o: OptimizerConfig) -> Iterator[str]:
    for name, value in (("beta1", o.beta1), ("beta2", o.beta2)):
        if not 0 <= value < 1:
            yield f"{path}.{name}={value}: must be at least 0 and below 1"
    if not o.eps > 0:
        yield f"{path}.eps={o.eps}: must be above 0"


def _plug_points(cfg: Config) -> Iterator[str]:
    """Judgements that need the plug points themselves: they are small objects, built from their own arguments."""
    lines: list[str] = []

    def build(path: str, make: Callable[[], Any]) -> Any:
        """What ``make`` builds; None when it cannot."""
        try:
            return make()
        except Exception as error:  # it may be the user's code, and whatever that raises is an answer to this question
            text = " ".join(str(error).split())
            text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            lines.append(text if text.startswith(path) else f"{path}: {text}")
            return None

    def build_each(path: str) -> dict[str, Any]:
        """Entries of the map at ``path`` by name, without those that composing has complained about."""
        sound = {n: e for n, e in _get(cfg, path).items() if not any(targets.problems(path, {n: e}))}
        made = {
            name: build(f"{path}.{name}", partial(instantiate, node, skip=("order",), where=f"{path}.{name}"))
            for name, node in sound.items()
        }
        return {name: plug_point for name, plug_point in made.items() if plug_point is not None}

    for path in ONE_PLUG_POINT:
        if "_target_" not in _get(cfg, path):
            lines.append(f"{path}: needs _target_ (the import path of what it is), got {_get(cfg, path)!r}")
    if "_target_" in cfg.harness and not any(targets.problems("harness", cfg.harness)):
        build("harness", partial(instantiate, cfg.harness, where="harness"))
    sound = {name: node for name, node in cfg.rewards.items() if not any(targets.problems("rewards", {name: node}))}
    made = [build(f"rewards.{name}", partial(RewardSet.from_config, {name: node})) for name, node in sound.items()]
    if len(made) > 1 and None not in made:  # what they say about each other
        build("rewards", partial(RewardSet.from_config, sound))
    terms = build_each("loss.terms")
    if cfg.batch.tokens_per_row > 0:
        lines.extend(
            f"batch.tokens_per_row={cfg.batch.tokens_per_row}: cuts segments, and loss.terms.{name} takes a ratio over "
            "whole ones; set batch.tokens_per_row=0, or its granularity and correction_granularity to token or step"
            for name, term in terms.items()
            if term.unit.value == "sequence"
        )
    build_each("tracking")
    edits = build_each("credit.edits")
    setters = [name for name, edit in edits.items() if edit.traits.scale.value == "sets"]
    if len(setters) > 1:
        lines.append(f"credit.edits: {' and '.join(setters)} each set the scale of the advantage; keep one")
    rate = cfg.model.router.get("bias_update_rate", 0)
    if isinstance(rate, (int, float)) and rate > 0:
        readers = [f"loss.terms.{name}" for name, term in terms.items() if term.needs_reference]
        readers += [f"credit.edits.{name}" for name, edit in edits.items() if edit.traits.reference]
        if readers:
            lines.append(
                f"model.router.bias_update_rate={rate}: expert biases move and the reference policy that "
                f"{', '.join(readers)} reads has none of its own; set it to 0"
            )
    coefficient = cfg.model.aux_loss_coefficient
    acting = [f"{name}={cfg.model.router[name]}" for name in ROUTING_LOSSES if cfg.model.router.get(name)]
    if acting and cfg.model.router.get("_target_", "").endswith(FROZEN):
        lines.append(
            f"model.router: a frozen router does not learn from a routing loss ({', '.join(acting)}); choose "
            "megatron_ext.moe.structured.StructuredRouter, or leave the loss out"
        )
    if cfg.model.router and not any(targets.problems("model.router", cfg.model.router)):
        policy = build("model.router", partial(instantiate, cfg.model.router, where="model.router"))
        if policy is not None and coefficient > 0 and policy.config_overrides().get("moe_aux_loss_coeff") == 0.0:
            lines.append(
                f"model.aux_loss_coefficient={coefficient}: the router policy {cfg.model.router['_target_']} keeps the "
                "auxiliary loss off"
            )
        coefficient = cfg.warm_start.aux_loss_coefficient
        if cfg.warm_start.enabled and coefficient > 0 and cfg.model.router.get("in_warm_start", False):
            lines.append(
                f"warm_start.aux_loss_coefficient={coefficient}: model.router.in_warm_start=true keeps the auxiliary "
                "loss off; set one of them to its default"
            )
    yield from lines
