"""Packing and prefix trees: balance against the ideal and against verl's on the same lengths, token ratios against a
trie made one token at a time.

``packing_lockstep_*`` is the sum over micro-batches of the slowest rank's cost, over a perfect split, recounted here
from the rows. verl's own balancing runs on the same lengths where verl is installed; its rows are informative.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median

import numpy as np
from numpy.typing import NDArray

from launch.bench import table
from launch.measurement import Measurement, Report
from megatron_ext.trajectory.packing import PackPlan, pack, row_cost
from megatron_ext.trajectory.prefix_tree import build_prefix_tree
from megatron_ext.trajectory.tree_packing import pack_tree

Ints = NDArray[np.int64]

CAP = 32_768
RANKS = 8
SEEDS = range(10)
SIZE = "512 rollouts, log-normal(8.6, 0.9) clipped to 200-32,768, cap 32,768, DP 8, seeds 0-9"
BRANCHES, TRUNK, LEAF = 16, 6_144, 2_048
GROUPS = 32


def rollout_lengths(seed: int) -> Ints:
    drawn = np.random.default_rng(seed).lognormal(8.6, 0.9, 512)
    return np.clip(drawn, 200, CAP).astype(np.int64)


def lockstep(microbatches: Sequence[Sequence[Ints]], lengths: Ints) -> float:
    """Of any plan; a rank with fewer micro-batches than another waits for it."""
    cost = row_cost(lengths)
    slowest = [0.0] * max(len(rank) for rank in microbatches)
    for rank in microbatches:
        for m, rows in enumerate(rank):
            slowest[m] = max(slowest[m], float(cost[rows].sum()))
    return sum(slowest) / (float(cost.sum()) / len(microbatches))


def over_cap(microbatches: Sequence[Sequence[Ints]], lengths: Ints) -> int:
    return sum(int(lengths[rows].sum()) > CAP for rank in microbatches for rows in rank)


def seconds_of(work: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of several repeats."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def report_packing(report: Report) -> None:
    lengths = [rollout_lengths(seed) for seed in SEEDS]

    def plan(rows: Ints) -> PackPlan:
        return pack(rows, cap=CAP, ranks=RANKS)

    plans = [plan(rows) for rows in lengths]
    ratios = [lockstep(p.microbatches, rows) for p, rows in zip(plans, lengths, strict=True)]
    milliseconds = [1e3 * seconds_of(lambda rows=rows: plan(rows)) for rows in lengths]  # type: ignore[misc]
    # Beyond ceil(bins that the tokens need / ranks) + 1, the most any seed takes.
    beyond = [
        p.num_microbatches - (-(-int(n.sum()) // CAP) + RANKS - 1) // RANKS - 1
        for p, n in zip(plans, lengths, strict=True)
    ]
    over = sum(over_cap(p.microbatches, rows) for p, rows in zip(plans, lengths, strict=True))
    report(Measurement("packing_lockstep_median", median(ratios), "x ideal", 1.03, "lower", SIZE))
    report(Measurement("packing_lockstep_worst", max(ratios), "x ideal", 1.045, "lower", SIZE))
    report(Measurement("packing_ms", median(milliseconds), "ms", 20.0, "lower", SIZE))
    report(Measurement("packing_microbatches_over_bound", max(beyond), "a rank", 0.0, "lower", SIZE))
    report(Measurement("packing_over_cap", over, "micro-batches", 0.0, "lower", SIZE))


def report_verl(report: Report) -> None:
    """Trajectories to ranks in equal numbers, then each rank's to micro-batches, both as verl 0.9.1's trainer does."""
    if find_spec("verl") is None:
        print(
            "error: verl is not installed, packing_verl_* are left out; "
            "run: bash launch/env --peers python -m launch.bench core",
            file=sys.stderr,
        )
        return
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, ceildiv, get_seqlen_balanced_partitions

    def plan(lengths: Ints) -> list[list[Ints]]:
        work = calculate_workload(torch.from_numpy(lengths))
        ranks = [np.array(part) for part in get_seqlen_balanced_partitions(work.tolist(), RANKS, equal_size=True)]
        count = max(ceildiv(int(lengths[rows].sum()), CAP) for rows in ranks)
        while True:  # its ranks agree on the count and raise it until every micro-batch fits
            table = [
                [rows[part] for part in get_seqlen_balanced_partitions(work[rows].tolist(), count, equal_size=False)]
                for rows in ranks
            ]
            if not over_cap(table, lengths):
                break
            count += 1
        for rank in table:
            rank.sort(key=lambda rows: float(work[rows].sum()), reverse=True)
        return table

    lengths = [rollout_lengths(seed) for seed in SEEDS]
    ratios = [lockstep(plan(rows), rows) for rows in lengths]
    ours = sum(seconds_of(lambda rows=rows: pack(rows, cap=CAP, ranks=RANKS), 1) for rows in lengths)  # type: ignore[misc]
    theirs = sum(seconds_of(lambda rows=rows: plan(rows), 1) for rows in lengths)  # type: ignore[misc]
    report(Measurement("packing_verl_lockstep_median", median(ratios), "x ideal", None, "lower", SIZE))
    report(Measurement("packing_verl_lockstep_worst", max(ratios), "x ideal", None, "lower", SIZE))
    report(Measurement("packing_speedup_vs_verl", theirs / ours, "x", None, "higher", SIZE))


def branching(rng: np.random.Generator, trunk: int, leaf: int, branches: int) -> list[Ints]:
    """Rows that share ``trunk`` tokens and differ from there on."""
    shared = rng.integers(0, 150_000, trunk)
    heads = rng.choice(150_000, branches, replace=False)
    return [np.concatenate([shared, heads[b : b + 1], rng.integers(0, 150_000, leaf - 1)]) for b in range(branches)]


def nested(rng: np.random.Generator, depth: int) -> list[Ints]:
    """Rows of a ragged tree: runs of 1 to 200 tokens, 0 to 4 children each; some rows end at a branch."""
    run = rng.integers(0, 150_000, int(rng.integers(1, 201)))
    children = int(rng.integers(0, 5)) if depth else 0
    rows = [np.concatenate([run, row]) for _ in range(children) for row in nested(rng, depth - 1)]
    if not children or rng.random() < 0.2:
        rows.append(run)
    return rows


def joined(rows: Sequence[Ints]) -> tuple[Ints, Ints]:
    return np.concatenate(rows), np.cumsum([0, *(len(row) for row in rows)])


def trie_ratio(rows: Sequence[Ints]) -> float:
    """Tokens of the rows over the nodes of their trie, made one token at a time."""
    children: dict[tuple[int, int], int] = {}
    for row in rows:
        node = 0
        for token in row.tolist():
            node = children.setdefault((node, token), len(children) + 1)
    return sum(map(len, rows)) / len(children)


def report_prefix_tree(report: Report) -> None:
    rng = np.random.default_rng(0)
    rows = branching(rng, TRUNK, LEAF, BRANCHES)
    ratio = build_prefix_tree(*joined(rows)).token_ratio
    report(
        Measurement(
            "prefix_tree_token_ratio", ratio, "x", 16 / 4.75, "higher", f"16 branches of {TRUNK + LEAF:,}, 75 % shared"
        )
    )
    errors = [abs(ratio / trie_ratio(rows) - 1)]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = [row for _ in range(4) for row in nested(rng, 5)]
        size = f"{len(rows)} rows of 4 ragged trees, {sum(map(len, rows)):,} tokens, seed {seed}; bar: the trie's"
        ratio, exact = build_prefix_tree(*joined(rows)).token_ratio, trie_ratio(rows)
        errors.append(abs(ratio / exact - 1))
        report(Measurement("prefix_tree_token_ratio_nested", ratio, "x", exact, "higher", size))
    # A tree that shares too much would pass the bars above.
    size = "largest deviation from the trie's ratio, all of the above"
    report(Measurement("prefix_tree_token_ratio_error", max(errors), "of the ratio", 0.0, "lower", size))

    rng = np.random.default_rng(1)
    rows = [row for _ in range(GROUPS) for row in branching(rng, TRUNK, LEAF, BRANCHES)]
    ids, offsets = joined(rows)
    tree = build_prefix_tree(ids, offsets)
    size = f"{len(rows)} rows, {len(ids):,} tokens"
    build = seconds_of(lambda: build_prefix_tree(ids, offsets))
    report(Measurement("prefix_tree_ms", 1e3 * build, "ms", None, "lower", size))
    plan = pack_tree(tree, cap=CAP, ranks=RANKS)
    size = f"{size}, cap 32,768, DP 8"
    pack_ms = 1e3 * seconds_of(lambda: pack_tree(tree, cap=CAP, ranks=RANKS))
    plain = pack(np.diff(offsets), cap=CAP, ranks=RANKS)
    report(Measurement("prefix_tree_packing_ms", pack_ms, "ms", None, "lower", size))
    report(Measurement("prefix_tree_packing_speedup", plain.step_cost / plan.step_cost, "x", None, "higher", size))


def run(report: Report) -> None:
    report_packing(report)
    report_prefix_tree(report)
    report_verl(report)


if __name__ == "__main__":
    measured: list[Measurement] = []
    run(measured.append)
    print(table(measured))
