"""What plug points read of the record that another plug point has to write: turn labels, and ids prepared for scoring.

===============  ==================================================  ==================================================
                 who reads says so                                   who writes says so
===============  ==================================================  ==================================================
turn labels      ``EditTraits.labels``, a router policy's            a reward part's ``written_labels``, an
                 ``reads_labels`` and ``label_room``                 environment's ``label_words``
prepared ids     ``EditTraits.prepared``                             a harness's ``prepares``, and tasks with an answer
===============  ==================================================  ==================================================

State keys (``EditTraits.states``) are written for every environment; credit refuses a batch without them.

Invariants (``tests/config/test_needs.py``):

1. What is read and written by nothing is one line: who reads it, what it misses, and the keys that provide it.
2. What is not known is no reason to refuse. Which labels an environment gives, and how many values each, is known once
   it is built, and whether tasks have answers once they are listed: ``check_started`` refuses then.
   ``asks_environment`` says whether that is worth building one for, before a run makes its folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_ext.config.compose import ConfigError
from megatron_ext.config.instantiate import InstantiateError, import_target, instantiate
from megatron_ext.config.schema import Config
from megatron_ext.credit.protocol import CreditEdit
from megatron_ext.environments.protocol import Labelling, ToolSpec
from megatron_ext.harness.protocol import Harness
from megatron_ext.moe.protocol import LabelRoom, RouterPolicy
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rewards.protocol import written_labels
from megatron_ext.trajectory.task import Task

JUDGE, TOOLS = "megatron_ext.rewards.judge_reward.JudgeReward", "megatron_ext.harness.tools.ToolHarness"


def labels_of(environment: Mapping[str, Any] | None) -> frozenset[str] | None:
    """Labels that the environment of a configuration node gives, as far as its class says: none, or None where that is
    known only once it is built."""
    try:
        found = None if environment is None else import_target(str(environment.get("_target_")))
    except InstantiateError:
        return None  # composing the configuration complains about it
    return frozenset() if isinstance(found, type) and not issubclass(found, Labelling) else None


def unmet_labels(
    edits: Mapping[str, CreditEdit],
    router: RouterPolicy | None,
    rewards: RewardSet | None,
    given: Collection[str] | None,
) -> Iterator[str]:
    """One line a label that is read and never written. ``given``: labels of the environment; None for it or for
    ``rewards`` is not known."""
    if rewards is None or given is None:
        return
    written = set(given).union(*(written_labels(part.reward) for part in rewards.parts))
    readers = {f"credit.edits.{name}": edit.traits.labels for name, edit in edits.items()}
    if router is not None:
        readers["model.router"] = router.reads_labels
    there = f"written are: {', '.join(sorted(written))}" if written else "none is written"
    for reader, labels in readers.items():
        for label in sorted(labels - written):
            yield (
                f"{reader}: reads the turn label {label!r}, which no reward part and no environment writes ({there}); "
                f"add a part that does (rewards.NAME._target_={JUDGE}, rewards.NAME.label={label}) or set "
                "tasks.environment to an environment that gives it"
            )


def unmet_room(router: RouterPolicy | None, given: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """One line a label of which the environment gives more values than the router policy has room for."""
    if not isinstance(router, LabelRoom):
        return
    for label, (argument, room) in router.label_room.items():
        words = given.get(label, ())
        if len(words) > room:
            yield (
                f"model.router.{argument}={room}: the environment gives {len(words)} values of the turn label "
                f"{label!r} ({', '.join(words)}); set model.router.{argument}={len(words)} or more"
            )


def unmet_ids(edits: Mapping[str, CreditEdit], harness: Harness | None) -> Iterator[str]:
    """One line an edit that reads ids which the harness does not prepare; None for it is not known."""
    if harness is None:
        return
    for name, edit in edits.items():
        missing = sorted(edit.traits.prepared - harness.prepares)
        if missing:
            yield (
                f"credit.edits.{name}: reads the prepared ids {', '.join(missing)}, which the harness does not "
                f"prepare; set harness.answer_tool to the tool that gives the final answer (harness._target_={TOOLS})"
            )


def _readers(cfg: Config) -> tuple[dict[str, CreditEdit], RouterPolicy | None]:
    """The credit edits by name, and the router policy (None: the default), built."""
    edits = {n: instantiate(node, skip=("order",)) for n, node in cfg.credit.edits.items() if node is not None}
    return edits, instantiate(cfg.model.router) if cfg.model.router else None


def asks_environment(cfg: Config) -> tuple[bool, bool]:
    """Whether ``check_started`` could refuse what the environment's class does not tell: over its labels, and over its
    tasks. ``cfg`` has no other problem."""
    edits, router = _readers(cfg)
    read = any(edit.traits.labels for edit in edits.values()) or (
        router is not None and bool(router.reads_labels or isinstance(router, LabelRoom))
    )
    labels = read and labels_of(cfg.environments[cfg.tasks.environment]) is None
    return labels, any(edit.traits.prepared for edit in edits.values())


def check_started(
    cfg: Config, given: Mapping[str, Sequence[str]], tools: Sequence[ToolSpec], tasks: Sequence[Task]
) -> None:
    """Refuses, once the environment is there, what its class did not tell.

    Args:
        given: labels that the environment gives, and what the values of each mean; ``tools`` its tools; ``tasks`` those
            to train on.

    Raises:
        ConfigError: a label that is read and never written, one with more values than there is room for, or prepared
            ids that no task has.
        HarnessError: the harness was told to prepare an answer and cannot.
    """
    edits, router = _readers(cfg)
    lines = [
        *unmet_labels(edits, router, RewardSet.from_config(cfg.rewards), given),
        *unmet_room(router, given),
    ]
    readers = [name for name, edit in edits.items() if edit.traits.prepared]
    if readers and not _some_answer(instantiate(cfg.harness), tools, tasks):
        lines += [
            f"credit.edits.{name}: reads the answers of tasks, and none of the {len(tasks)} training tasks of "
            f"environment {cfg.tasks.environment!r} has one (task.data['answer']); set tasks.environment to an "
            "environment whose tasks do"
            for name in readers
        ]
    if lines:
        raise ConfigError(lines)


def _some_answer(harness: Harness, tools: Sequence[ToolSpec], tasks: Sequence[Task]) -> bool:
    calls = (harness.answer_call(task, tools) for task in tasks)
    return any(call is not None and call.end > 0 for call in calls)
