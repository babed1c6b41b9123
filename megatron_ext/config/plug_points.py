"""Builds the plug points that are small objects, and asks what only they know: what each refuses, and what it needs of
the others.

Losses, rewards, harness, credit edits, router policy and trackers are built, from their own arguments; environments and
engines are not.

Invariants (``tests/config/test_plug_points.py``):

1. Each plug point that cannot be built is a line for each of its reasons, which names it; the others are judged all
   the same.
2. What plug points say about each other, and of the model, is judged among those that could be built.
3. An edit or a router policy that reads what nothing in the configuration writes is refused (``needs.py``).
4. A class that lacks a member of its plug point's protocol is refused (``protocols.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_ext.config import keys, needs, protocols, targets
from megatron_ext.config.errors import ConfigError
from megatron_ext.config.instantiate import import_target, instantiate
from megatron_ext.config.schema import Config
from megatron_ext.models.families import FAMILIES
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.moe.protocol import routing_loss
from megatron_ext.rewards.compose import RewardSet

DEFAULT_ROUTER = "megatron_ext.moe.policies.TrainedRouter"
ONE = ("harness", "rollout.engine", "tasks.source")  # maps that are one plug point and cannot be empty


def problems(cfg: Config, hf: HFConfig | None = None) -> Iterator[str]:
    """One line a problem. ``hf`` is the model's HF configuration; None: not known, and what it says is left out."""
    for path in ONE:
        if "_target_" not in (node := keys.value(cfg, path)):
            yield f"{path}: needs _target_ (the import path of what it is), got {node!r}"
    build = _Builder(cfg)
    harness, router = build.one("harness"), build.one("model.router")
    rewards, terms, edits = build.rewards(), build.each("loss.terms"), build.each("credit.edits")
    build.each("tracking")
    environments, _, _ = (build.named(path) for path in ("environments", "rollout.engine", "tasks.source"))
    yield from build.lines
    yield from _terms(cfg, terms)
    setters = [name for name, edit in edits.items() if edit.traits.scale.value == "sets"]
    if len(setters) > 1:
        yield f"credit.edits: {' and '.join(setters)} each set the scale of the advantage; keep one"
    if hf is not None and not any(hf.moe_pattern):
        router = None  # ``validate`` says that there are no routers
    else:
        yield from _routers(cfg, hf, router, terms, edits)
    yield from needs.unmet_labels(edits, router, rewards, needs.labels_of(environments.get(cfg.tasks.environment)))
    yield from needs.unmet_ids(edits, harness)


@dataclass
class _Builder:
    """Builds plug points; ``lines`` are what those that cannot be built say. What composing the configuration has
    complained about is left out."""

    cfg: Config
    lines: list[str] = field(default_factory=list)

    def one(self, path: str) -> Any:
        """The plug point at ``path``; None where there is none, or none that can be built."""
        node = keys.value(self.cfg, path)
        if "_target_" not in node or any(targets.problems(path, node)) or not self._fits(path, node):
            return None
        return self._keeps(path, self._build(path, partial(instantiate, node, where=path)))

    def named(self, path: str) -> dict[str, Any]:
        """Entries of the map at ``path``, or the one plug point there under its path, whose classes may stand there."""
        node = keys.value(self.cfg, path)
        if path not in ONE:
            return self._sound(path)
        sound = "_target_" in node and not any(targets.problems(path, node)) and self._fits(path, node)
        return {path: node} if sound else {}

    def each(self, path: str) -> dict[str, Any]:
        """Entries of the map at ``path`` by name, those that can be built."""
        made = {}
        for name, node in self._sound(path).items():
            at = f"{path}.{name}"
            made[name] = self._keeps(at, self._build(at, partial(instantiate, node, skip=("order",), where=at)))
        return {name: plug_point for name, plug_point in made.items() if plug_point is not None}

    def rewards(self) -> RewardSet | None:
        """The whole reward; None unless every part can be built and they go together."""
        sound = self._sound("rewards")
        made = {n: self._build(f"rewards.{n}", partial(RewardSet.from_config, {n: node})) for n, node in sound.items()}
        parts = [part is not None and self._keeps(f"rewards.{n}", part.parts[0].reward) for n, part in made.items()]
        if not all(parts) or len(sound) < len(self.cfg.rewards) or not sound:
            return None
        whole: RewardSet | None = next(iter(made.values()))
        if len(made) > 1:  # what they say about each other
            whole = self._build("rewards", partial(RewardSet.from_config, sound))
        return whole

    def _sound(self, path: str) -> dict[str, Any]:
        nodes = keys.value(self.cfg, path)
        return {
            name: node
            for name, node in nodes.items()
            if not any(targets.problems(path, {name: node})) and self._fits(f"{path}.{name}", node)
        }

    def _fits(self, path: str, node: Mapping[str, Any]) -> bool:
        """Whether the class that a sound node names may stand at ``path``."""
        problem = protocols.class_problem(path, import_target(node["_target_"]))
        self.lines += [] if problem is None else [problem]
        return problem is None

    def _keeps(self, path: str, made: Any) -> Any:
        """What was made for ``path``; None when nothing was, or something that may not stand there."""
        problem = None if made is None else protocols.built_problem(path, made)
        self.lines += [] if problem is None else [problem]
        return made if problem is None else None

    def _build(self, path: str, make: Callable[[], Any]) -> Any:
        """What ``make`` builds; None when it cannot."""
        try:
            return make()
        except ConfigError as error:
            self.lines += error.problems
        except Exception as error:  # it may be the user's code, and whatever that raises is an answer to this question
            text = " ".join(str(error).split())
            text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            self.lines.append(text if text.startswith(path) else f"{path}: {text}")
        return None


def _routing_loss(target: str, router: Any) -> Iterator[str]:
    try:
        loss = routing_loss(router)
    except ValueError as error:
        yield f"model.router: {error}"
        return
    if loss is not None and not loss.learns:
        yield (
            f"model.router={target}: its routers are frozen, and a routing loss trains routers; let them learn, or "
            "choose megatron_ext.moe.policies.FrozenRouter without a routing loss"
        )


def _terms(cfg: Config, terms: dict[str, Any]) -> Iterator[str]:
    if cfg.batch.tokens_per_row > 0:
        for name, term in terms.items():
            if term.unit.value == "sequence":
                yield (
                    f"batch.tokens_per_row={cfg.batch.tokens_per_row}: cuts segments, and loss.terms.{name} takes a "
                    "ratio over whole ones; set batch.tokens_per_row=0, or its granularity and correction_granularity "
                    "to token or step"
                )


def is_default_router(node: Mapping[str, Any]) -> bool:
    """Whether a router policy's node says no more than none does."""
    arguments = [value for name, value in node.items() if name != "_target_"]
    return not any(arguments) and node.get("_target_", DEFAULT_ROUTER) == DEFAULT_ROUTER


def _routers(
    cfg: Config, hf: HFConfig | None, router: Any, terms: dict[str, Any], edits: dict[str, Any]
) -> Iterator[str]:
    node = cfg.model.router
    rate = node.get("bias_update_rate", 0)
    if isinstance(rate, (int, float)) and rate > 0:
        readers = [f"loss.terms.{name}" for name, term in terms.items() if term.needs_reference]
        readers += [f"credit.edits.{name}" for name, edit in edits.items() if edit.traits.reference]
        if hf is not None and not hf.expert_bias:
            having = ", ".join(name for name, family in FAMILIES.items() if family.sigmoid)
            yield (
                f"model.router.bias_update_rate={rate}: routers of {hf.family} have no expert biases to move; set it "
                f"to 0, or choose a model that has (model_type {having})"
            )
        elif readers:
            yield (
                f"model.router.bias_update_rate={rate}: expert biases move and the reference policy that "
                f"{', '.join(readers)} reads has none of its own; set it to 0"
            )
    if router is not None:
        yield from _routing_loss(node["_target_"], router)
    coefficient = cfg.model.aux_loss_coefficient
    off = router is not None and router.config_overrides().get("moe_aux_loss_coeff") == 0.0
    if off and coefficient > 0:
        yield (
            f"model.aux_loss_coefficient={coefficient}: the router policy {node['_target_']} keeps the auxiliary loss "
            "off"
        )
    coefficient = cfg.warm_start.aux_loss_coefficient
    if off and router.in_warm_start and cfg.warm_start.enabled and coefficient > 0:
        yield (
            f"warm_start.aux_loss_coefficient={coefficient}: the router policy {node['_target_']} acts in the warm "
            "start too (in_warm_start) and keeps the auxiliary loss off; set one of them to its default"
        )
