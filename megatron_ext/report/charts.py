"""Which charts the report has, in order, and the series of each.

Invariant (``tests/report/test_charts.py``): every metric named here is in the table of names, and every metric that a
run logged is shown, in its chart or among the others; but for ``TWICE``, which another chart tells better.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.tracking.names import lookup


@dataclass(frozen=True)
class Spec:
    """A chart. ``metrics`` are names, or families with ``<...>`` for whatever a run has of them, each with its label in
    the legend; ``intervals`` names the (low, high) metrics around one of them. ``log`` allows a logarithmic axis where
    the values span decades; ``share`` fixes the axis to 0 to 1; ``levels`` names arguments of the router policy that
    are drawn as dashed lines, each with what it says; ``rows`` says what a family over layers shows, which is drawn as
    a heat map with a row a layer, ``ends`` the lowest and highest value of its scale, which values beyond stretch.
    ``<...>`` in a label stands for what a name's family leaves open."""

    title: str
    metrics: Mapping[str, str]
    log: bool = False
    share: bool = False
    intervals: Mapping[str, tuple[str, str]] | None = None
    levels: Mapping[str, str] | None = None
    rows: str = ""
    ends: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Section:
    title: str
    charts: tuple[Spec, ...]


PARTS = "reward/part/<part>"
PHASES = "time/<phase>"
ONCE = ("time/start", "time/warm_start")
NO_PHASE = ("time/step", *ONCE)

SECTIONS: tuple[Section, ...] = (
    Section(
        "What it learns",
        (
            Spec("Reward", {"reward/mean": "mean", "reward/group_std": "std within a group"}),
            Spec("Success while training", {"reward/success": "sampled training episodes"}, share=True),
            Spec(
                "Success on dev tasks",
                {"eval/dev/greedy_pass1": "greedy", "eval/dev/sampled_pass1": "sampled"},
                share=True,
                intervals={
                    "eval/dev/greedy_pass1": ("eval/dev/greedy_ci_low", "eval/dev/greedy_ci_high"),
                    "eval/dev/sampled_pass1": ("eval/dev/sampled_ci_low", "eval/dev/sampled_ci_high"),
                },
            ),
            Spec("Parts of the reward", {PARTS: ""}),
            Spec("Labels of judged turns", {"judge/label/<name>/<label>": ""}, share=True),
        ),
    ),
    Section(
        "Policy",
        (
            Spec(
                "Entropy",
                {
                    "policy/entropy": "full vocabulary, in the update",
                    "rollout/entropy": "-log p of sampled tokens, in the rollout",
                },
            ),
            Spec("Divergence (KL)", {"policy/kl_old": "from the old policy", "policy/kl_ref": "from the reference"}),
            Spec(
                "Clip fraction",
                {
                    "policy/clip_fraction_low": "lower bound",
                    "policy/clip_fraction_high": "upper bound",
                    "policy/clip_fraction_dual": "dual clip",
                },
            ),
        ),
    ),
    Section(
        "Update",
        (
            Spec("Gradient norm", {"train/grad_norm": "before clipping"}, log=True),
            Spec("Loss", {"train/loss": "loss terms together", "moe/loss/<name>": "routing, <name>"}),
            Spec("Probability ratio", {"policy/ratio_mean": "mean"}),
            Spec("Advantage", {"credit/advantage_mean": "mean", "credit/advantage_std": "std"}),
        ),
    ),
    Section(
        "Between training and rollout",
        (
            Spec(
                "Log-prob difference",
                {"offpolicy/logp_diff_mean": "mean", "offpolicy/logp_diff_max": "maximum"},
                log=True,
            ),
            Spec("Staleness", {"offpolicy/lag_mean": "mean lag", "offpolicy/lag_max": "maximum lag"}),
            Spec("Routing flips", {"offpolicy/routing_flips": "expert choices"}),
        ),
    ),
    Section(
        "Expert load",
        (
            Spec(
                "Imbalance of the load", {"moe/load_cv": "coefficient of variation", "moe/load_peak": "busiest expert"}
            ),
            Spec("Cold experts", {"moe/cold_fraction": "less than a tenth of the mean"}),
            *(
                Spec(title, {f"moe/layer/<layer>/{name}": ""}, rows=note, ends=ends)
                for title, name, note, ends in (
                    ("Imbalance of each layer", "load_cv", "variation of the tokens per expert", (0.0, 1.0)),
                    ("Busiest expert of each layer", "load_peak", "over the mean", (1.0, 3.0)),
                    ("Cold experts of each layer", "cold_fraction", "share below a tenth of the mean", (0.0, 0.5)),
                )
            ),
        ),
    ),
    Section(
        "Structure of the routing",
        (
            Spec("Experts from token to token", {"moe/token_jaccard": "Jaccard index of neighbours"}),
            Spec(
                "Experts and operations",
                {
                    "moe/op_mi": "mutual information, chosen experts",
                    "moe/turn_mi": "router probabilities",
                    "moe/turn_mi_after": "after the update",
                },
            ),
            Spec("Training and rollout", {"moe/disagreement": "tokens routed otherwise, mean over layers"}),
            Spec(
                "Entropy at the gate",
                {"moe/gate_entropy": "of the policy before the update"},
                levels={"entropy_low": "open from", "entropy_high": "open up to"},
            ),
            Spec("Gate of the routing losses", {"moe/gate": "1 open, 0 closed"}, share=True),
            Spec("Token loss", {"moe/token_loss": "mean over pairs"}),
            Spec("Tokens pulled together", {"moe/pulled_fraction": "of adjacent tokens"}, share=True),
            Spec("How far routers have moved", {"moe/router_change": "since RL started, over their norm"}),
            Spec("Missed by the linearisation", {"moe/mi_linear_error": "mutual information (nats)"}),
            *(
                Spec(title, {f"moe/layer/<layer>/{name}": ""}, rows=note, ends=ends)
                for title, name, note, ends in (
                    ("Token to token in each layer", "token_jaccard", "Jaccard index", (0.0, 0.0)),
                    ("Operations in each layer", "op_mi", "mutual information in nats", (0.0, 0.0)),
                    ("Training and rollout in each layer", "disagreement", "share of tokens", (0.0, 0.1)),
                )
            ),
        ),
    ),
    Section(
        "Time and memory",
        (
            Spec("Time per phase", {PHASES: ""}),
            Spec(
                "Speed",
                {
                    "rollout/tokens_per_s": "rollout",
                    "train/tokens_per_s": "update",
                    "progress/tokens_per_s": "whole step",
                },
                log=True,
            ),
            Spec(
                "Memory",
                {
                    "memory/rss_gib": "trainer",
                    "memory/rss_peak_gib": "trainer, peak",
                    "memory/engine_gib": "engine",
                    "memory/device_peak_gib": "device, peak",
                },
            ),
        ),
    ),
    Section(
        "Rollout",
        (
            Spec("Turns of a trajectory", {"rollout/turns_mean": "mean", "rollout/turns_max": "maximum"}),
            Spec("Length of a trajectory", {"rollout/tokens_mean": "generated", "rollout/length_mean": "all tokens"}),
            Spec(
                "What went wrong",
                {
                    "rollout/malformed_fraction": "malformed turns",
                    "rollout/invalid_fraction": "invalid actions",
                    "rollout/max_turns_fraction": "out of turns",
                    "rollout/max_context_fraction": "out of context",
                },
            ),
            Spec("Groups kept", {"filter/kept_fraction": "of those drawn"}, share=True),
        ),
    ),
)

# Shown elsewhere: the held-out evaluations stand in the header.
_HEADER = re.compile(r"eval/(before|after)/.*")
HOLE = re.compile(r"<\w+>")
# The entropy of a load is its coefficient of variation once more (1 - CV^2 / (2 log experts) near an even load), and
# hardly moves where that does: a layer's is drawn nowhere, the mean over layers among the others.
TWICE = re.compile(r"moe/layer/\d+/load_entropy")


def members(metric: str, logged: Iterable[str]) -> list[str]:
    """The logged names that a metric or a family of them stands for; ``time/step`` is a total, not a phase,
    and what a run does once before its first step would dwarf the steps."""
    if not HOLE.search(metric):
        return [metric] if metric in set(logged) else []
    pattern = re.compile(HOLE.sub(r"[^/]+", metric))
    return sorted((n for n in logged if pattern.fullmatch(n) and n not in NO_PHASE), key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def others(logged: Sequence[str]) -> list[str]:
    """Logged metrics that no chart of ``SECTIONS`` shows, and none tells better."""
    shown: set[str] = set()
    for section in SECTIONS:
        for spec in section.charts:
            for metric in spec.metrics:
                shown.update(members(metric, logged))
            for pair in (spec.intervals or {}).values():
                shown.update(pair)
    return sorted(n for n in logged if n not in shown and not _HEADER.fullmatch(n) and not TWICE.fullmatch(n))


def hint(name: str) -> str:
    """What a metric means, with its unit."""
    metric = lookup(name)
    return f"{name}: {metric.description} ({metric.unit})"
