"""Procedural reasoning tasks of the ``reasoning-gym`` package: one question, one answer, the package's own verifier.

Invariants (``tests/environments/test_single_turn.py`` and ``test_contract.py``):

1. The reward is the verifier's score of the answer text, 0..1; the episode is a success at ``success_at`` and above.
2. A seed fixes family and question: families take turns over the seeds, in the order of the configuration.
3. No question belongs to two splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolSpec, stable_hash
from megatron_ext.environments.splits import SplitScan, check_split
from megatron_ext.trajectory.task import Task


class ReasoningGym:
    """Single-turn tasks of several families."""

    def __init__(self, families: Mapping[str, Mapping[str, Any] | None], success_at: float = 1.0) -> None:
        """
        Args:
            families: family -> parameters of its generator, e.g. ``{"chain_sum": {"max_terms": 3}}``.
            success_at: verifier score from which an answer counts as solved.
        """
        from reasoning_gym.factory import DATASETS

        if not families:
            raise ValueError("reasoning_gym: families is empty; name at least one, e.g. families.chain_sum={}")
        unknown = sorted(set(families) - set(DATASETS))
        if unknown:
            raise ValueError(
                f"reasoning_gym: unknown families {', '.join(unknown)}; see reasoning_gym.factory.DATASETS"
            )
        self._families = {name: dict(params or {}) for name, params in families.items()}
        self._success_at = success_at
        self._scans: dict[str, SplitScan] = {}
        self._seed: int | None = None
        self._split = "train"
        self._answer: str | None = None
        for name in self._families:
            self._item(name, 0)

    def _item(self, family: str, seed: int) -> tuple[Any, dict[str, Any]]:
        """The generator and its item for one seed. A generator a seed, since some build all their items up front."""
        import reasoning_gym

        try:
            dataset = reasoning_gym.create_dataset(family, seed=seed, size=1, **self._families[family])
        except (TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym: family {family!r}, {self._families[family]}: {error}") from error
        return dataset, dataset[0]

    def _current(self) -> tuple[Any, dict[str, Any]]:
        if self._seed is None:
            raise EnvironmentEnded("reasoning_gym: no episode; call reset first")
        names = list(self._families)
        return self._item(names[self._seed % len(names)], self._seed)

    def _question(self, seed: int) -> str:
        names = list(self._families)
        return str(self._item(names[seed % len(names)], seed)[1]["question"])

    # -- protocol --------------------------------------------------------------------------------------------------
    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        self._seed, self._split, self._answer = seed, check_split(split), None
        return Observation(str(self._current()[1]["question"]))

    def step(self, action: Action) -> Observation:
        dataset, item = self._current()
        if self._answer is not None:
            raise EnvironmentEnded("reasoning_gym: step after the end; call reset first")
        valid = isinstance(action, str) and bool(action.strip())
        self._answer = action.strip() if isinstance(action, str) else ""
        score = float(dataset.score_answer(self._answer, item)) if valid else 0.0
        family = str(item["metadata"]["source_dataset"])
        return Observation(
            "Answer received.",
            reward=score,
            done=True,
            success=score >= self._success_at,
            score=score,
            valid=valid,
            info={"family": family},
        )

    def copy(self) -> ReasoningGym:
        twin = ReasoningGym(self._families, self._success_at)
        twin._seed, twin._split, twin._answer = self._seed, self._split, self._answer
        return twin

    def state_hash(self) -> str:
        _, item = self._current()
        answered = "open" if self._answer is None else f"answered {self._answer}"
        return stable_hash("reasoning_gym", str(self._seed), str(item["question"]), answered)

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        scan = self._scans.setdefault(split, SplitScan(split))
        for seed in scan.until(start + count):
            scan.offer(seed, self._question(seed))
        names = list(self._families)
        return [
            Task(f"reasoning_gym/{split}/{names[seed % len(names)]}-{seed}", "reasoning_gym", seed, split)
            for seed in scan.seeds[start : start + count]
        ]

    def close(self) -> None:
        self._seed = None

    # -- demonstrator ----------------------------------------------------------------------------------------------
    def expert_action(self, rng: Random, mistake_rate: float) -> str:
        """The gold answer; as mistake the answer to another question of the family."""
        _, item = self._current()
        family = str(item["metadata"]["source_dataset"])
        if item["answer"] is None:
            raise ValueError(f"reasoning_gym: family {family!r} gives no gold answer, so it cannot be demonstrated")
        gold = str(item["answer"])
        if rng.random() < mistake_rate:
            for _ in range(20):
                other = self._item(family, rng.randrange(1 << 30))[1]["answer"]
                if other is not None and str(other) != gold:
                    return str(other)
        return gold

    def corpus(self, split: str, count: int) -> Iterator[str]:
        for task in self.tasks(split, count):
            yield self.reset(task.seed, split=split).text
            yield self.expert_action(Random(task.seed), 0.0)
