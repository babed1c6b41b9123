"""The plug points that this library ships, by the key they go to.

Invariant (``tests/config/test_shipped.py``): every public class of the library that keeps a plug point's protocol is
here, and whatever is here keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping


def _in(package: str, **modules: str) -> tuple[str, ...]:
    return tuple(
        f"megatron_ext.{package}.{module.replace('__', '.')}.{name}"
        for module, names in modules.items()
        for name in names.split()
    )


SHIPPED: Mapping[str, tuple[str, ...]] = {
    "environments": _in(
        "environments",
        textworld__games="TextWorld",
        textworld_express="TextWorldExpress",
        reasoning_gym="ReasoningGym",
        calculator="Calculator",
        search__environment="Search",
        records__environment="Records",
        task_file="TaskFile",
    ),
    "harness": _in("harness", text="TextHarness", tools="ToolHarness"),
    "rollout.engine": _in("rollout", embedded__engine="EmbeddedEngine", replicas="ReplicatedEngine"),
    "tasks.source": _in("rollout", sources="ShuffledTasks SequentialTasks WeightedTasks"),
    "rewards": _in(
        "rewards",
        outcome="Success Score StepRewardSum MalformedPenalty TurnPenalty",
        info="LastInfo",
        python_reward="PythonReward",
        judge_reward="JudgeReward",
    ),
    "credit.edits": _in("credit.edits", whiten="Whiten", length_penalty="LengthPenalty"),
    "loss.terms": _in(
        "losses",
        policy="ClipLoss GSPO StepClip",
        cispo="CISPO",
        masks="IntervalMask TwoSidedMask",
        posterior="PosteriorMatching",
        kl="KLToReference",
        entropy="EntropyBonus",
        sft="NegativeLogLikelihood",
    ),
    "model.router": _in("moe", policies="TrainedRouter FrozenRouter", structured="StructuredRouter"),
    "tracking": _in("tracking", console="ConsoleTracker", jsonl="JsonlTracker", wandb="WandbTracker"),
}
