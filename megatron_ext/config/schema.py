"""Typed schema of a run. One dataclass a section; ``metadata['help']`` is what ``launch.train --help`` prints.

Plug points are maps ``name -> {_target_, order, ...}`` (never lists), so that an override can touch one entry:
``losses.kl.coefficient=0.01``. Everything else is a typed field; an unknown key is an error with the nearest names.
Sizes are named by what they count: tasks, trajectories, rows, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def opt(default: Any, text: str) -> Any:
    """A field with a default and its line of help."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class RunConfig:
    name: str = opt(MISSING, "name of the run; its folder is <root>/<name>")
    root: str = opt("runs", "folder that holds the runs")
    seed: int = opt(1, "seed of everything: initialisation, data order, sampling")
    steps: int = opt(100, "optimizer-step batches to train (one per rollout batch)")
    max_minutes: float = opt(0.0, "stop training after this many minutes, save and evaluate; 0 = no limit")
    deterministic: bool = opt(
        False, "repeat exactly, also across kills: batch-invariant decoding, fixed order, one training thread (slower)"
    )
    threads: int = opt(
        2, "CPU threads of the training process; the engine gets the same number while the trainer waits"
    )


@dataclass
class ParallelConfig:
    tensor: int = opt(1, "tensor-parallel size (TP)")
    pipeline: int = opt(1, "pipeline-parallel size (PP)")
    virtual_pipeline: int = opt(1, "model chunks a pipeline rank (VPP); 1 = off")
    expert: int = opt(1, "expert-parallel size (EP)")
    expert_tensor: int = opt(1, "tensor-parallel size of the experts (ETP)")
    context: int = opt(1, "context-parallel size (CP)")
    sequence: bool = opt(False, "sequence parallelism; MoE training with TP > 1 requires it")
    distributed_optimizer: bool = opt(False, "shard optimizer state over the data-parallel ranks")


@dataclass
class BackendConfig:
    device: str = opt("auto", "auto | cpu | cuda")
    layer_spec: str = opt("auto", "auto | local | te: Megatron layer implementation (auto: te on GPU, local on CPU)")
    optimizer: str = opt("auto", "auto | torch | fused: fused is Apex or Transformer Engine FusedAdam")
    communication: str = opt("auto", "auto | gloo | nccl")
    dtype: str = opt("float32", "float32 | bfloat16: parameter type; the optimizer keeps fp32 master weights")


@dataclass
class ModelConfig:
    hf_config: str = opt(MISSING, "HF config.json, or a folder that holds one (relative paths: recipes/)")
    weights: str = opt("", "HF folder with safetensors to start from; empty = fresh initialisation")
    tokenizer: str = opt("", "folder with tokenizer.json; empty = learn one on the training split (see tokenizer.*)")
    init: str = opt("fan_in", "fresh initialisation: fan_in (std 1/sqrt(fan-in)) | normal (config's initializer_range)")
    embedding_std: float = opt(0.08, "std of fresh embeddings under init=fan_in")
    max_context: int = opt(512, "tokens of context; a longer trajectory ends with status MAX_CONTEXT")
    vocab_multiple: int = opt(
        8, "Megatron's embedding and output rows are filled up to a multiple of this, which parallel.tensor shares out"
    )
    aux_loss_coefficient: float = opt(0.0, "MoE load-balancing loss; 0 = exactly off")
    router: dict[str, Any] = opt({}, "router policy {_target_: ...}; empty = trained, no auxiliary loss")


@dataclass
class TokenizerConfig:
    vocab_size: int = opt(1024, "BPE vocabulary to learn, special tokens included (<= 2048)")
    corpus_tasks: int = opt(500, "training tasks whose demonstrations the BPE is learned on")
    phrases: list[str] = opt([], "regular expressions whose matches stay one token (long stock phrases)")


@dataclass
class BatchConfig:
    tasks_per_step: int = opt(16, "tasks (= groups) of one step")
    trajectories_per_task: int = opt(8, "trajectories of a group")
    optimizer_steps_per_batch: int = opt(1, "optimizer steps on one batch of trajectories")
    tokens_per_microbatch: int = opt(8192, "token cap of a packed micro-batch on one rank")
    tokens_per_row: int = opt(0, "cut rows longer than this at a turn; 0 = never (a row is a whole segment)")
    share_prefixes: bool = opt(False, "run tokens that rows of a micro-batch begin with in common once (local layers)")


@dataclass
class RolloutConfig:
    engine: dict[str, Any] = opt(
        {"_target_": "megatron_ext.rollout.embedded.engine.EmbeddedEngine"}, "engine {_target_}"
    )
    temperature: float = opt(1.0, "sampling temperature in training; the trainer's log-probs use the same")
    top_p: float = opt(1.0, "nucleus truncation")
    top_k: int = opt(0, "top-k truncation; 0 = off")
    max_new_tokens: int = opt(64, "tokens of one model turn")
    max_turns: int = opt(10, "model turns of a trajectory")
    concurrency: int = opt(128, "episodes in flight")
    env_workers: int = opt(1, "environment worker processes of a driver")
    env_deadline_s: float = opt(30.0, "an environment call slower than this kills its worker; the trajectory is masked")
    lease_deadline_s: float = opt(600.0, "a driver that finishes no group for this long has stalled")
    record_routing: bool = opt(False, "record the experts of every token")
    replay_routing: bool = opt(
        False, "train and score with the recorded experts (R3); the router's own scores of them, and its gradient, stay"
    )
    replay_missing: str = opt(
        "error", "error | live: a token that training needs and whose experts were not recorded; live = router chooses"
    )
    replay_rerun: str = opt(
        "segment",
        "segment | first: a prompt that the engine ran again on other experts (new weights, lost cache); segment = the "
        "record goes on in a new one, every token replays the forward that sampled it; first = the first experts stay",
    )
    ignore_stop: bool = opt(
        False, "training turns run to max_new_tokens whatever is sampled (fixed lengths, for measuring)"
    )


@dataclass
class FilterConfig:
    constant_groups: bool = opt(True, "drop groups constant in reward at step agreement, and draw others")
    draw_limit: float = opt(3.0, "at most this many times tasks_per_step groups are drawn for one step")
    tolerance: float = opt(1e-6, "rewards closer than this are equal")


@dataclass
class CreditConfig:
    normalize: str = opt("std", "group baseline: std ((R-mean)/(std+eps)) | mean (R-mean) | none (R)")
    std_ddof: int = opt(0, "0 population | 1 sample standard deviation")
    eps: float = opt(1e-6, "added to the standard deviation")
    edits: dict[str, Any] = opt({}, "credit edits name -> {_target_, order, ...}, applied in order")
    filter: FilterConfig = field(default_factory=FilterConfig)


@dataclass
class LossConfig:
    aggregation: str = opt(
        "token_mean",
        "token_mean | row_mean | session_mean | turn_mean | trajectory_mean | prompt_mean | prompt_turn_mean | "
        "prompt_trajectory_mean, over the global batch",
    )
    terms: dict[str, Any] = opt(
        {"policy": {"_target_": "megatron_ext.losses.policy.ClipLoss", "clip_low": 0.2, "clip_high": 0.28}},
        "loss terms name -> {_target_, coefficient, ...}",
    )


@dataclass
class OptimizerConfig:
    name: str = opt("adam", "adam | sgd")
    lr: float = opt(1e-3, "peak learning rate")
    min_lr_ratio: float = opt(1.0, "final learning rate as a share of the peak")
    schedule: str = opt("constant", "constant | cosine | linear, after the warm-up")
    warmup_steps: int = opt(10, "optimizer steps of linear warm-up")
    beta1: float = opt(0.9, "Adam beta1")
    beta2: float = opt(0.95, "Adam beta2")
    eps: float = opt(1e-8, "Adam epsilon")
    weight_decay: float = opt(0.0, "decoupled weight decay")
    clip_grad: float = opt(1.0, "global gradient-norm clip; 0 = off")


@dataclass
class WarmStartConfig:
    enabled: bool = opt(False, "supervised warm start on scripted demonstrations before RL")
    demonstrations: int = opt(3000, "demonstrations, from training tasks")
    mistake_rate: float = opt(0.3, "how often the script makes its systematic mistake")
    max_epochs: float = opt(6.0, "stop after this many passes even if the gate was not met")
    min_epochs: float = opt(1.0, "do not consult the gate before this many passes")
    target_success: float = opt(0.3, "stop when greedy success on dev tasks reaches this; 0 = run max_epochs")
    gate_tasks: int = opt(64, "dev tasks of the gate")
    gate_every: int = opt(50, "optimizer steps between two looks at the gate")
    trajectories_per_step: int = opt(32, "demonstrations of one optimizer step")
    observation_weight: float = opt(0.0, "loss weight of observation tokens; 0 = action tokens only")
    aux_loss_coefficient: float = opt(0.0, "MoE load-balancing loss during the warm start")
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3, warmup_steps=20))
    seed: int = opt(0, "seed of the warm start, so that runs of several seeds can share one; 0 = run.seed")
    cache: str = opt("", "folder that keeps warm starts by key, so that arms and seeds share one; empty = no cache")


@dataclass
class TasksConfig:
    environment: str = opt(MISSING, "which of environments.* the tasks come from")
    source: dict[str, Any] = opt(
        {"_target_": "megatron_ext.rollout.sources.ShuffledTasks"}, "task source (curriculum) {_target_, ...}"
    )
    train_tasks: int = opt(2500, "distinct training tasks")
    dev_tasks: int = opt(64, "tasks looked at while tuning")
    test_tasks: int = opt(200, "held-out tasks of the reported evaluation")


@dataclass
class EvalConfig:
    every: int = opt(0, "evaluate on dev tasks every this many steps; 0 = only before and after")
    before: bool = opt(True, "evaluate the held-out tasks before training")
    after: bool = opt(True, "evaluate the held-out tasks after training")
    samples: int = opt(2, "sampled trajectories a task; pass@k is reported for k up to this")
    temperature: float = opt(1.0, "temperature of sampled evaluation (greedy is always run too)")


@dataclass
class CheckpointConfig:
    every: int = opt(20, "save every this many steps; 0 = only at the end")
    keep: int = opt(2, "keep the last this many")
    best: str = opt(
        "eval/dev/greedy_pass1", "also keep the one with the best value of this metric at its step; empty = none"
    )
    asynchronous: bool = opt(True, "write while training goes on, from a copy in host memory")
    warm_start_minutes: float = opt(5.0, "save an unfinished warm start this often; 0 = only when it is interrupted")


@dataclass
class SamplesConfig:
    every: int = opt(0, "keep the first step, every this many and the last, with per-token scores; 0 = none")
    groups: int = opt(2, "groups of a kept step; 0 = all (what a replay of the step needs)")


@dataclass
class ProfileConfig:
    steps: list[int] = opt([], "[first, last] step to record with torch's profiler, into profile/; empty = off")
    peak: bool = opt(True, "measure the machine's matmul peak at the start (0.3 s), so that perf/mfu can be told")


@dataclass
class ControlConfig:
    permute_rewards: bool = opt(False, "control experiment: permute rewards over the step before filtering")


@dataclass
class Config:
    """One run. Recipes inherit through ``defaults`` and hold only what differs."""

    recipe: str = opt(MISSING, "which recipe composed this; set by recipe=SLUG or recipe=SLUG/PRESET")
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    environments: dict[str, Any] = opt({}, "environments name -> {_target_, ...}")
    harness: dict[str, Any] = opt({"_target_": "megatron_ext.harness.text.TextHarness"}, "harness {_target_, ...}")
    tasks: TasksConfig = field(default_factory=TasksConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: dict[str, Any] = opt(
        {"success": {"_target_": "megatron_ext.rewards.outcome.Success", "weight": 1.0}},
        "reward parts name -> {_target_, weight, cap}",
    )
    credit: CreditConfig = field(default_factory=CreditConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    tracking: dict[str, Any] = opt(
        {
            "console": {"_target_": "megatron_ext.tracking.console.ConsoleTracker"},
            "metrics": {"_target_": "megatron_ext.tracking.jsonl.JsonlTracker"},
            "wandb": {"_target_": "megatron_ext.tracking.wandb.WandbTracker", "project": "megatron-ext"},
        },
        "trackers name -> {_target_, ...}",
    )
    method: Any = opt(None, "a recipe's own dataclass of constants, or null")
