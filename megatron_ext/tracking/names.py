"""The one table of metric names: ``area/name`` -> unit, meaning, and which direction is better.

Invariants (``tests/tracking/test_names.py`` asserts each):

1. A name outside the table is an error that offers the nearest names.
2. Families (``reward/part/<name>``) match their placeholders alone; a fixed name wins over a family.
3. Every name has a unit, a description and a direction.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

HIGHER, LOWER, NEITHER = "higher", "lower", "neither"
COUNT, SHARE, NATS, SECONDS, SPEED = "count", "share", "nats", "s", "tokens/s"


class MetricNameError(KeyError):
    """A metric that is not in the table."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Metric:
    """``name`` may hold placeholders ``<...>``; ``better`` is ``higher``, ``lower`` or ``neither``."""

    name: str
    unit: str
    description: str
    better: str = NEITHER


METRICS: tuple[Metric, ...] = (
    # Rewards, over the trajectories that the step trains on.
    Metric("reward/mean", "reward", "mean reward of the finished trajectories of the step", HIGHER),
    Metric("reward/std", "reward", "standard deviation of the reward over trajectories"),
    Metric("reward/min", "reward", "lowest reward"),
    Metric("reward/max", "reward", "highest reward"),
    Metric("reward/success", SHARE, "trajectories that solved their task", HIGHER),
    Metric("reward/group_std", "reward", "mean over groups of the standard deviation within the group"),
    Metric("reward/part/<part>", "reward", "mean of one named part of the reward", HIGHER),
    Metric("reward/missing/<part>", COUNT, "trajectories that have no value of one named part", LOWER),
    # Judges, over the groups that this step generated.
    Metric("judge/trajectories", COUNT, "trajectories that were judged"),
    Metric("judge/asked", COUNT, "turns that a judge was asked about"),
    Metric("judge/calls", COUNT, "requests that were sent to judges, tries counted one by one"),
    Metric("judge/failed", COUNT, "turns that no judge answered on", LOWER),
    Metric("judge/unknown", COUNT, "answers whose label is none of those configured, read as the default", LOWER),
    Metric("judge/seconds", SECONDS, "wait of a played trajectory for its judge, mean", LOWER),
    Metric("judge/label/<name>/<label>", SHARE, "judged turns with one label, of those labelled under that name"),
    # Rollout.
    Metric(
        "rollout/tokens_per_s",
        SPEED,
        "generated tokens per second of the rollout phase; none in a step whose groups were all generated before a "
        "resume",
        HIGHER,
    ),
    Metric("rollout/trajectories", COUNT, "trajectories finished for this step"),
    Metric("rollout/tokens", COUNT, "tokens generated for this step"),
    Metric("rollout/turns_mean", COUNT, "model turns of a trajectory, mean"),
    Metric("rollout/turns_max", COUNT, "model turns of a trajectory, maximum"),
    Metric("rollout/tokens_mean", COUNT, "generated tokens of a trajectory, mean"),
    Metric("rollout/tokens_max", COUNT, "generated tokens of a trajectory, maximum"),
    Metric("rollout/length_mean", COUNT, "all tokens of a trajectory, mean"),
    Metric("rollout/sessions_mean", COUNT, "sessions of a trajectory (its own, compressions, sub-agents), mean"),
    Metric("rollout/compressions_mean", COUNT, "compressions of a trajectory's dialogues, mean"),
    Metric("rollout/subagents_mean", COUNT, "sub-agents that a trajectory sent, mean"),
    Metric(
        "rollout/summaries_retokenised",
        COUNT,
        "summaries that went on as text, not as the ids that were sampled",
        LOWER,
    ),
    Metric("rollout/summaries_empty", COUNT, "compressions whose turn held no summary", LOWER),
    Metric("rollout/malformed_fraction", SHARE, "model turns that held no valid action", LOWER),
    Metric("rollout/invalid_fraction", SHARE, "model turns whose action the environment did not understand", LOWER),
    Metric("rollout/truncated_fraction", SHARE, "trajectories cut by the turn or context limit", LOWER),
    Metric("rollout/max_turns_fraction", SHARE, "trajectories that used up their turns", LOWER),
    Metric("rollout/max_context_fraction", SHARE, "trajectories that filled the context", LOWER),
    Metric("rollout/env_errors", COUNT, "trajectories masked because the environment raised", LOWER),
    Metric(
        "rollout/env_deadlines", COUNT, "trajectories masked because the environment was killed at its deadline", LOWER
    ),
    Metric("rollout/reward_invalid", COUNT, "trajectories masked because a reward was not finite", LOWER),
    Metric("rollout/aborted", COUNT, "trajectories masked because they were aborted", LOWER),
    Metric("rollout/entropy", NATS, "minus the mean log-prob of the sampled tokens"),
    Metric("rollout/time", SECONDS, "duration of the rollout phase", LOWER),
    # Dynamic filtering at step agreement.
    Metric("filter/groups_drawn", COUNT, "groups generated for this step"),
    Metric("filter/groups_kept", COUNT, "groups that the step trains on", HIGHER),
    Metric("filter/groups_constant", COUNT, "groups dropped because their rewards were all equal", LOWER),
    Metric("filter/groups_all_success", COUNT, "dropped groups that always succeeded"),
    Metric("filter/groups_all_failure", COUNT, "dropped groups that never succeeded"),
    Metric(
        "filter/groups_untrainable", COUNT, "groups dropped because fewer than two trajectories could be trained", LOWER
    ),
    Metric("filter/draw_limit_hit", COUNT, "1 when the draw limit ended the refill of a step", LOWER),
    Metric("filter/kept_fraction", SHARE, "groups kept of those drawn", HIGHER),
    # Training step.
    Metric("train/loss", "loss", "loss of the optimizer step: its loss terms together, routing losses not among them"),
    Metric("train/loss/<term>", "loss", "one term of the loss, before its coefficient"),
    Metric("train/aux_loss", "loss", "load-balancing loss of the router"),
    Metric("train/grad_norm", "norm", "global gradient norm before clipping"),
    Metric("train/grad_clipped", SHARE, "optimizer steps whose gradient was clipped"),
    Metric("train/lr", "rate", "learning rate"),
    Metric("train/tokens", COUNT, "tokens that went through the training forward"),
    Metric("train/trained_tokens", COUNT, "tokens with a loss"),
    Metric("train/rows", COUNT, "rows of the step"),
    Metric("train/microbatches", COUNT, "micro-batches of the step"),
    Metric("train/padding_fraction", SHARE, "positions of the micro-batches that hold no token", LOWER),
    Metric("train/tokens_per_s", SPEED, "tokens through forward and backward per second", HIGHER),
    Metric("train/time_<part>", SECONDS, "duration of a part of the update", LOWER),
    Metric("train/optimizer_steps", COUNT, "optimizer steps taken so far"),
    Metric("train/nan_steps", COUNT, "optimizer steps skipped because loss or gradient was not finite", LOWER),
    # Policy.
    Metric(
        "policy/ratio_mean", "ratio", "the loss's probability ratio (current over old or rollout), mean over tokens"
    ),
    Metric("policy/clip_fraction_low", SHARE, "tokens held or masked by the lower bound of the ratio"),
    Metric("policy/clip_fraction_high", SHARE, "tokens held or masked by the upper bound of the ratio"),
    Metric("policy/clip_fraction_dual", SHARE, "tokens held by the dual clip"),
    Metric("policy/stopped_positive", SHARE, "tokens of positive advantage whose gradient a bound or mask removed"),
    Metric("policy/stopped_negative", SHARE, "tokens of negative advantage whose gradient a bound or mask removed"),
    Metric("policy/target_clipped", SHARE, "tokens whose step's posterior target was clipped"),
    Metric("policy/target_gap", "probability", "distance of the step's posterior from its target, mean", LOWER),
    Metric("policy/past_target", SHARE, "tokens whose step's posterior has gone past its target"),
    Metric("policy/log_ratio_clamped", SHARE, "tokens whose log-ratio was clamped before the exponent", LOWER),
    Metric("policy/kl_old", NATS, "divergence of the old policy from the current one (k3)"),
    Metric("policy/kl_ref", NATS, "divergence of the current policy from the reference"),
    Metric("policy/kl_ref_clamped", SHARE, "tokens whose log-ratio to the reference was clamped", LOWER),
    Metric(
        "policy/entropy",
        NATS,
        "full-vocabulary entropy of the trained tokens in the update, mean over its optimizer steps, each under the "
        "weights that it begins with",
    ),
    Metric("policy/nll", NATS, "negative log-likelihood of a trained token", LOWER),
    # Credit.
    Metric("credit/advantage_mean", "advantage", "mean advantage of the trained tokens"),
    Metric("credit/advantage_std", "advantage", "standard deviation of the advantage over trained tokens"),
    Metric("credit/<edit>/changed_fraction", SHARE, "trained tokens whose advantage the edit changed"),
    Metric("credit/<edit>/positive_mass_before", "advantage", "sum of positive advantages before the edit"),
    Metric("credit/<edit>/positive_mass_after", "advantage", "sum of positive advantages after the edit"),
    Metric("credit/<edit>/negative_mass_before", "advantage", "sum of negative advantages before the edit"),
    Metric("credit/<edit>/negative_mass_after", "advantage", "sum of negative advantages after the edit"),
    Metric("credit/<edit>/count/<counter>", COUNT, "a counter of the edit's own, described where the edit is"),
    Metric("credit/<edit>/mean/<counter>", "of the counter", "a mean of the edit's own, described where the edit is"),
    Metric("credit/<edit>/share/<counter>", SHARE, "a share of the edit's own, described where the edit is"),
    # Forwards that credit edits ask for.
    Metric("scoring/requests", COUNT, "sequences that credit edits asked to be scored"),
    Metric("scoring/asked_tokens", COUNT, "tokens of these sequences, one by one"),
    Metric("scoring/forward_tokens", COUNT, "tokens that were run for them", LOWER),
    # Between the engines, and staleness.
    Metric("offpolicy/logp_diff_mean", NATS, "absolute log-prob difference between training and rollout, mean", LOWER),
    Metric(
        "offpolicy/logp_diff_max", NATS, "absolute log-prob difference between training and rollout, maximum", LOWER
    ),
    Metric(
        "offpolicy/kl_rollout", NATS, "divergence of the sampling policy from the training engine's old one (k3)", LOWER
    ),
    Metric("offpolicy/ess", SHARE, "effective sample size of the trained tokens under old over rollout ratios", HIGHER),
    Metric("offpolicy/ratio_p<k>", "ratio", "percentile of the old over rollout ratio of the trained tokens"),
    Metric("offpolicy/ratio_clamped", SHARE, "tokens whose old over rollout log-ratio left the histogram", LOWER),
    Metric("offpolicy/correction_mean", "ratio", "weight of the rollout correction, mean over tokens"),
    Metric("offpolicy/correction_low", SHARE, "tokens whose old over rollout ratio is below the correction's interval"),
    Metric(
        "offpolicy/correction_high", SHARE, "tokens whose old over rollout ratio is above the correction's interval"
    ),
    Metric("offpolicy/correction_clamped", SHARE, "tokens whose log-ratio the correction clamped", LOWER),
    Metric("offpolicy/lag_mean", "steps", "optimizer steps between sampling and training a token, mean", LOWER),
    Metric("offpolicy/lag_max", "steps", "optimizer steps between sampling and training a token, maximum", LOWER),
    Metric("offpolicy/routing_flips", SHARE, "expert choices that differ between training and rollout", LOWER),
    Metric("offpolicy/stale_masked", COUNT, "tokens masked because they were older than the staleness bound", LOWER),
    # Mixture of experts.
    Metric("moe/load_cv", "ratio", "coefficient of variation of the tokens per expert, mean over layers", LOWER),
    Metric("moe/load_peak", "ratio", "tokens of the busiest expert over the mean, worst layer", LOWER),
    Metric("moe/cold_fraction", SHARE, "experts that got less than a tenth of the mean", LOWER),
    Metric("moe/load_entropy", SHARE, "entropy of the load over its maximum, mean over layers", HIGHER),
    Metric("moe/token_jaccard", SHARE, "Jaccard index of the experts of adjacent sampled tokens, mean over layers"),
    Metric("moe/op_mi", NATS, "mutual information of chosen experts and operations over turns, mean over layers"),
    Metric(
        "moe/disagreement", SHARE, "tokens whose experts differ between training and rollout, mean of layers", LOWER
    ),
    Metric("moe/layer/<layer>/cold_fraction", SHARE, "experts of one layer below a tenth of its mean load", LOWER),
    Metric("moe/layer/<layer>/load_entropy", SHARE, "entropy of one layer's load over its maximum", HIGHER),
    Metric("moe/layer/<layer>/token_jaccard", SHARE, "Jaccard index of one layer's experts of adjacent sampled tokens"),
    Metric("moe/layer/<layer>/op_mi", NATS, "mutual information of one layer's chosen experts and operations"),
    Metric("moe/layer/<layer>/disagreement", SHARE, "tokens whose experts of one layer differ from rollout's", LOWER),
    # Routing losses, under the weights that opened the batch.
    Metric("moe/gate", SHARE, "1 while the policy's entropy lets routing losses act, else 0"),
    Metric(
        "moe/gate_entropy",
        NATS,
        "entropy that the gate looks at: of the policy before the update, under the weights that scored the batch, "
        "mean over trained tokens; policy/entropy is that of the update's own forwards",
    ),
    Metric(
        "moe/turn_mi", NATS, "mutual information of router probabilities and operations, the turn loss is its negative"
    ),
    Metric("moe/turn_mi_after", NATS, "moe/turn_mi of the same batch after its update"),
    Metric("moe/mi_linear_error", NATS, "moe/turn_mi_after minus what the linearised loss took it for"),
    Metric("moe/loss/<name>", "loss", "a routing loss as it is optimized: by its coefficient, 0 at a closed gate"),
    Metric("moe/own/<name>", "of the loss", "another number of a routing loss, described where the loss is"),
    Metric("moe/labelled_turns", COUNT, "turns with an operation, in the field that has most"),
    Metric("moe/unlabelled_batch", COUNT, "1 when no turn of the step has an operation, else 0", LOWER),
    Metric("moe/token_loss", NATS, "-log probability on the experts of the token before, mean over pairs"),
    Metric("moe/pulled_fraction", SHARE, "adjacent tokens that are pulled together"),
    Metric(
        "moe/router_change",
        "ratio",
        "distance of router weights and expert biases from those that RL started from, over their norm; 0: none moved",
    ),
    Metric(
        "moe/replayed_share",
        SHARE,
        "tokens of the update's forward that ran the experts recorded in rollout; the rest are the last sampled token "
        "of a segment and what an environment said last: nothing was generated from them, so nothing was recorded",
    ),
    Metric("moe/replay_missing", SHARE, "tokens that needed recorded experts and had none (routers chose)", LOWER),
    Metric("moe/replay_reruns", COUNT, "tokens that the engine ran again on other experts than recorded before", LOWER),
    Metric("moe/replay_displaced", COUNT, "sampled tokens behind experts of another forward than sampled them", LOWER),
    Metric(
        "moe/layer/<layer>/load_cv", "ratio", "coefficient of variation of the tokens per expert of one layer", LOWER
    ),
    Metric("moe/layer/<layer>/load_peak", "ratio", "tokens of the busiest expert over the mean of one layer", LOWER),
    # Warm start.
    Metric("warm_start/loss", NATS, "negative log-likelihood of a demonstrated token", LOWER),
    Metric("warm_start/grad_norm", "norm", "global gradient norm before clipping"),
    Metric("warm_start/lr", "rate", "learning rate"),
    Metric("warm_start/epochs", "epochs", "passes over the demonstrations"),
    Metric("warm_start/success", SHARE, "greedy success on the gate's dev tasks", HIGHER),
    Metric("warm_start/tokens_per_s", SPEED, "tokens through forward and backward per second", HIGHER),
    # Evaluation; <set> is the name of the task set.
    Metric("eval/<set>/tasks", COUNT, "tasks evaluated"),
    Metric("eval/<set>/greedy_pass1", SHARE, "tasks solved by the greedy trajectory", HIGHER),
    Metric("eval/<set>/greedy_ci_low", SHARE, "lower end of the 95 % interval of greedy_pass1", HIGHER),
    Metric("eval/<set>/greedy_ci_high", SHARE, "upper end of the 95 % interval of greedy_pass1", HIGHER),
    Metric("eval/<set>/sampled_pass1", SHARE, "share of the sampled trajectories that solve their task", HIGHER),
    Metric("eval/<set>/sampled_ci_low", SHARE, "lower end of the 95 % interval of sampled_pass1", HIGHER),
    Metric("eval/<set>/sampled_ci_high", SHARE, "upper end of the 95 % interval of sampled_pass1", HIGHER),
    Metric("eval/<set>/pass_at_<k>", SHARE, "tasks solved by one of k sampled trajectories (unbiased)", HIGHER),
    Metric("eval/<set>/turns_median", COUNT, "model turns of a greedy trajectory, median"),
    Metric(
        "eval/<set>/reward_mean", "reward", "mean reward of the greedy trajectories, without parts that wait", HIGHER
    ),
    Metric(
        "eval/<set>/untrainable", COUNT, "greedy trajectories lost to environment errors and counted as failures", LOWER
    ),
    Metric("eval/<set>/gain", SHARE, "greedy_pass1 after training minus before", HIGHER),
    Metric("eval/<set>/gain_ci_low", SHARE, "lower end of the paired 95 % interval of the gain", HIGHER),
    Metric("eval/<set>/gain_ci_high", SHARE, "upper end of the paired 95 % interval of the gain", HIGHER),
    Metric("eval/<set>/time", SECONDS, "duration of the evaluation", LOWER),
    # Throughput over all ranks. FLOPs are those of the model's matrix products, as defined in ``models.flops``.
    Metric("perf/flops", "FLOP", "model FLOPs of the step: scoring forwards, and update forwards and backwards"),
    Metric("perf/flops_per_s", "FLOP/s", "model FLOPs per second of the scoring and update phases", HIGHER),
    Metric("perf/peak_flops_per_s", "FLOP/s", "matmul speed measured when this process started, all ranks together"),
    Metric("perf/mfu", SHARE, "perf/flops_per_s over perf/peak_flops_per_s", HIGHER),
    Metric("perf/model_tokens", COUNT, "tokens that the model ran over in the step, each forward counted"),
    Metric("perf/model_tokens_per_s", SPEED, "tokens that the model ran over per second of scoring and update", HIGHER),
    Metric("perf/sampled_tokens_per_s", SPEED, "tokens sampled for the step per second of the whole step", HIGHER),
    Metric("perf/trained_tokens_per_s", SPEED, "tokens with a loss per second of the whole step", HIGHER),
    # Time, memory, progress.
    Metric("time/step", SECONDS, "duration of the whole step", LOWER),
    Metric("time/<phase>", SECONDS, "duration of a phase of the step", LOWER),
    Metric("memory/rss_gib", "GiB", "resident memory of the training process", LOWER),
    Metric("memory/rss_peak_gib", "GiB", "highest resident memory of the training process", LOWER),
    Metric("memory/device_peak_gib", "GiB", "highest memory allocated on the device", LOWER),
    Metric("memory/engine_gib", "GiB", "resident memory of the engine", LOWER),
    Metric("memory/kv_used_fraction", SHARE, "KV cache in use, highest of the phase"),
    Metric("progress/step", COUNT, "steps done"),
    Metric("progress/tasks", COUNT, "tasks drawn so far"),
    Metric("progress/trajectories", COUNT, "trajectories trained so far"),
    Metric("progress/tokens", COUNT, "tokens trained so far"),
    Metric("progress/epoch", "epochs", "passes over the training tasks"),
    Metric("progress/minutes", "min", "wall time of training so far"),
    Metric("progress/tokens_per_s", SPEED, "generated tokens per second of the whole step", HIGHER),
)

_PLACEHOLDER = re.compile(r"<(\w+)>")
_FIXED = {metric.name: metric for metric in METRICS if not _PLACEHOLDER.search(metric.name)}


def _pattern(template: str) -> re.Pattern[str]:
    """``<k>`` stands for a number, any other placeholder for a word of letters, digits, ``_``, ``.`` and ``-``."""
    text, end = "", 0
    for hole in _PLACEHOLDER.finditer(template):
        text += re.escape(template[end : hole.start()]) + (r"\d+" if hole[1] == "k" else r"[A-Za-z0-9_.-]+")
        end = hole.end()
    return re.compile(text + re.escape(template[end:]))


_FAMILIES = tuple((_pattern(metric.name), metric) for metric in METRICS if metric.name not in _FIXED)


@lru_cache(maxsize=4096)
def lookup(name: str) -> Metric:
    """The entry of a metric; ``MetricNameError`` with the nearest names when there is none."""
    if name in _FIXED:
        return _FIXED[name]
    for pattern, metric in _FAMILIES:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise MetricNameError(f"metric {name!r} is not in the table of megatron_ext/tracking/names.py{hint}")


def check(names: Iterable[str]) -> None:
    """Raises ``MetricNameError`` at the first name that is not in the table."""
    for name in names:
        lookup(name)
